//! Strict parser of one line of a trace, a JSON object.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;

use super::error::LineError;
use super::limits::{TIMESTAMP_MS_MAX, TOKENS_MAX};

/// The fields of one line.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    pub(super) timestamp_us: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) hash_ids: Vec<u64>,
}

/// Parses one line, without its line feed.
pub(super) fn parse(bytes: &[u8]) -> Result<Line, LineError> {
    let text = std::str::from_utf8(bytes)
        .map_err(|error| LineError::NotUtf8(error.valid_up_to().saturating_add(1)))?;
    let fields: Fields = serde_json::from_str(text).map_err(|error| explain(&error))?;
    let tokens = |field, tokens| match tokens {
        0..=TOKENS_MAX => Ok(tokens),
        _ => Err(LineError::TooManyTokens { field, tokens }),
    };
    Ok(Line {
        timestamp_us: microseconds(fields.timestamp_ms)?,
        input_tokens: tokens("input_length", fields.input_length)?,
        output_tokens: tokens("output_length", fields.output_length)?,
        hash_ids: fields.hash_ids,
    })
}

/// Removes "line 1" from the parser's message, because it is not the line number in the file.
fn explain(error: &serde_json::Error) -> LineError {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let reason = text.strip_suffix(&position).unwrap_or(&text).to_owned();
    match error.classify() {
        Category::Data => LineError::Field(reason),
        Category::Io | Category::Syntax | Category::Eof => LineError::NotJson {
            column: error.column(),
            reason,
        },
    }
}

fn microseconds(ms: Number) -> Result<u64, LineError> {
    let too_late = || LineError::TooLate(ms.to_string());
    match ms {
        Number::Whole(ms) if ms <= TIMESTAMP_MS_MAX => Ok(ms * 1_000),
        Number::Part(ms) if ms <= TIMESTAMP_MS_MAX as f64 => Ok((ms * 1_000.0).round() as u64),
        Number::Whole(_) | Number::Part(_) => Err(too_late()),
    }
}

/// A number that is not below zero.
#[derive(Debug, Clone, Copy)]
enum Number {
    Whole(u64),
    Part(f64),
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => number.fmt(f),
            Self::Part(number) => number.fmt(f),
        }
    }
}

struct Fields {
    timestamp_ms: Number,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Timestamp,
    InputLength,
    OutputLength,
    HashIds,
    #[serde(other)]
    Other,
}

impl<'de> de::Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with 'timestamp', 'input_length', 'output_length' and 'hash_ids'")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let (mut timestamp_ms, mut input_length, mut output_length) = (None, None, None);
        let mut hash_ids = None;
        while let Some(key) = map.next_key()? {
            match key {
                Key::Timestamp => once("timestamp", &mut timestamp_ms, &mut map, Milliseconds)?,
                Key::InputLength => {
                    let name = "input_length";
                    once(name, &mut input_length, &mut map, Whole(name))?;
                }
                Key::OutputLength => {
                    let name = "output_length";
                    once(name, &mut output_length, &mut map, Whole(name))?;
                }
                Key::HashIds => once("hash_ids", &mut hash_ids, &mut map, Ids)?,
                Key::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(Fields {
            timestamp_ms: timestamp_ms.ok_or_else(|| missing("timestamp"))?,
            input_length: input_length.ok_or_else(|| missing("input_length"))?,
            output_length: output_length.ok_or_else(|| missing("output_length"))?,
            hash_ids: hash_ids.ok_or_else(|| missing("hash_ids"))?,
        })
    }
}

fn missing<E: de::Error>(name: &str) -> E {
    E::custom(format_args!("'{name}' is missing"))
}

fn once<'de, A: MapAccess<'de>, S: DeserializeSeed<'de>>(
    name: &str,
    place: &mut Option<S::Value>,
    map: &mut A,
    seed: S,
) -> Result<(), A::Error> {
    if place.is_some() {
        return Err(de::Error::custom(format_args!("'{name}' is given twice")));
    }
    *place = Some(map.next_value_seed(seed)?);
    Ok(())
}

/// Reads a number, whole or not, of milliseconds.
struct Milliseconds;

impl<'de> DeserializeSeed<'de> for Milliseconds {
    type Value = Number;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Number, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for Milliseconds {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of milliseconds in 'timestamp'")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Number, E> {
        Ok(Number::Whole(number))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Number, E> {
        Err(negative("timestamp", number))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Number, E> {
        match number {
            0.0.. => Ok(Number::Part(number)),
            _ => Err(negative("timestamp", number)),
        }
    }
}

fn negative<E: de::Error>(name: &str, number: impl fmt::Display) -> E {
    E::custom(format_args!(
        "'{name}' is {number}: it must not be below zero"
    ))
}

/// Reads one whole number that is not below zero. The field's name is used in errors.
struct Whole(&'static str);

impl<'de> DeserializeSeed<'de> for Whole {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for Whole {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number in '{}'", self.0)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<u64, E> {
        Err(negative(self.0, number))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<u64, E> {
        if number < 0.0 {
            return Err(negative(self.0, number));
        }
        Err(E::custom(format_args!(
            "'{}' is {number}: it must be a whole number below 2^64",
            self.0
        )))
    }
}

/// Reads the list of hash ids.
struct Ids;

impl<'de> DeserializeSeed<'de> for Ids {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u64>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Ids {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers in 'hash_ids'")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = seq.next_element_seed(Whole("hash_ids"))? {
            ids.push(id);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(line: &str) -> String {
        parse(line.as_bytes()).expect_err(line).to_string()
    }

    #[test]
    fn reads_the_four_fields_and_ignores_the_rest() {
        let line = br#"{"hash_ids":[1, 18446744073709551615],"x":{"y":[null]},"timestamp":1.0005,
            "input_length":7,"output_length":0}"#;
        assert_eq!(
            parse(line),
            Ok(Line {
                timestamp_us: 1_001,
                input_tokens: 7,
                output_tokens: 0,
                hash_ids: vec![1, u64::MAX],
            })
        );
    }

    #[test]
    fn errors_name_the_field_and_the_defect() {
        let ok = r#"{"timestamp":0,"input_length":7,"output_length":1,"hash_ids":[5]}"#;
        assert!(parse(ok.as_bytes()).is_ok());
        let cases = [
            (r#""timestamp":0,"#, "", "'timestamp' is missing"),
            (r#","hash_ids":[5]"#, "", "'hash_ids' is missing"),
            (
                "[5]",
                "[5,-2]",
                "'hash_ids' is -2: it must not be below zero",
            ),
            ("[5]", "[5,2.5]", "'hash_ids' is 2.5: it must be a whole"),
            ("[5]", "[18446744073709551616]", "whole number below 2^64"),
            ("[5]", r#"["5"]"#, "expected a whole number in 'hash_ids'"),
            ("[5]", "5", "expected a list of whole numbers in 'hash_ids'"),
            (
                ":7",
                ":-7",
                "'input_length' is -7: it must not be below zero",
            ),
            (":7", ":4294967297", "'input_length' is 4294967297: at most"),
            (":1", ":null", "expected a whole number in 'output_length'"),
            (
                ":0",
                ":-0.5",
                "'timestamp' is -0.5: it must not be below zero",
            ),
            (
                ":0",
                r#":"0""#,
                "expected a number of milliseconds in 'timestamp'",
            ),
            (":0", ":1e300", "'timestamp' is 1000"),
            (":0", r#":0,"timestamp":0"#, "'timestamp' is given twice"),
            ("}", "", "not JSON: EOF while parsing an object at column"),
            ("}", "} x", "not JSON: trailing characters at column"),
        ];
        for (old, new, expected) in cases {
            let line = ok.replacen(old, new, 1);
            let reason = reason(&line);
            assert!(reason.contains(expected), "{line}: {reason}");
            assert!(!reason.contains("line 1"), "{reason}");
        }
        assert!(reason("[1]").contains("expected an object with 'timestamp'"));
        let error = parse(b"{\"timestamp\":\"\xff\"}").expect_err("not text");
        assert_eq!(error, LineError::NotUtf8(15));
    }
}
