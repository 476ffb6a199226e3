//! Sizes in bytes as users write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The units in which sizes are printed, from the smallest one on.
const SHOWN: [(&str, u64); 5] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];
/// The letters of units. With `i` they are powers of 1,024, without it of 1,000; a `B` may follow.
const LETTERS: [char; 4] = ['K', 'M', 'G', 'T'];

/// A number of bytes, written `8GiB`, `1.5 GB` or `4096`. Binary units (KiB, MiB, GiB, TiB) are powers of 1,024,
/// decimal ones (KB, MB, GB, TB) powers of 1,000; the B may be left out, as in quantities of Kubernetes. Case does not
/// matter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// A size that cannot be parsed; names the text and the expected form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a size: write a number and a unit, such as 8GiB, 512Mi, 64GB or 4096 (bytes)"
)]
pub struct ParseByteSizeError(String);

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseByteSizeError(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed
            .bytes()
            .take_while(|b| b.is_ascii_digit() || *b == b'.')
            .count();
        let (number, unit) = trimmed.split_at(digits);
        let factor = factor_of(unit.trim()).ok_or_else(refuse)?;
        parse_scaled(number, factor).map(Self).ok_or_else(refuse)
    }
}

/// Bytes of a unit; `None` for an unknown one.
fn factor_of(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_uppercase();
    let prefix = unit.strip_suffix('B').unwrap_or(&unit);
    if prefix.is_empty() {
        return Some(1);
    }
    let (letter, base) = match prefix.strip_suffix('I') {
        Some(letter) => (letter, 1_024_u64),
        None => (prefix, 1_000),
    };
    let power = (1..).zip(LETTERS);
    let power = power.filter(|(_, known)| letter.strip_prefix(*known) == Some(""));
    power.map(|(power, _)| base.pow(power)).next()
}

/// `number` x `factor` in whole bytes, without floating point: `1.5` x 1,024 is 1,536; a rest below one byte is cut.
fn parse_scaled(number: &str, factor: u64) -> Option<u64> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if part.len() > 9 || (part.is_empty() && number.contains('.')) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let mut total = u128::from(whole) * u128::from(factor);
    if !part.is_empty() {
        let scale = 10_u128.pow(u32::try_from(part.len()).ok()?);
        total += part.parse::<u128>().ok()? * u128::from(factor) / scale;
    }
    u64::try_from(total).ok()
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut units = SHOWN.iter().rev();
        let unit = units.find(|(_, factor)| self.0 >= *factor);
        let (name, factor) = unit.copied().unwrap_or(("B", 1));
        let (whole, rest) = (self.0 / factor, self.0 % factor);
        let tenths = u128::from(rest) * 10 / u128::from(factor);
        match tenths {
            0 => write!(f, "{whole} {name}"),
            _ => write!(f, "{whole}.{tenths} {name}"),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"8GiB\", or a whole number of bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes)
                    .map(ByteSize)
                    .map_err(|_| E::custom(format!("'{bytes}' is not a size: it is below zero")))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_users_write_them() {
        let cases = [
            ("8GiB", 8 << 30),
            ("1.5 gib", 3 << 29),
            ("4096", 4096),
            ("0", 0),
            ("2MB", 2_000_000),
            (" 7 B ", 7),
            ("64Gi", 64 << 30),
            ("1Ki", 1 << 10),
            ("3 mi", 3 << 20),
            ("2Ti", 2 << 40),
            ("64G", 64_000_000_000),
            ("1K", 1_000),
            ("5m", 5_000_000),
            ("2t", 2_000_000_000_000),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_and_quoted() {
        for text in [
            "",
            "GiB",
            "1.GiB",
            ".",
            "-1",
            "8 GiBs",
            "8 i",
            "8 iB",
            "8 GB B",
            "8 KMi",
            "8 Pi",
            "1e3",
            "99999999999TiB",
        ] {
            let error = text.parse::<ByteSize>().expect_err(text);
            assert!(error.to_string().contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn prints_with_one_digit_behind_the_point() {
        assert_eq!(ByteSize(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteSize(8 << 30).to_string(), "8 GiB");
        assert_eq!(ByteSize(12).to_string(), "12 B");
    }
}
