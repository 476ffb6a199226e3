//! Schemas of what serde alone describes wrongly.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// Schema of a binary field, which is MessagePack `bin`.
pub struct BinarySchema;

impl JsonSchema for BinarySchema {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Binary".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "contentEncoding": "binary"})
    }
}

/// Makes the schema of an enumeration one to which words may be added: the known words, or another text or map.
pub fn open_words(schema: &mut Schema) {
    for list in ["oneOf", "enum"] {
        if let Some(known) = schema.remove(list) {
            schema.remove("type");
            let words = json_schema!({
                "anyOf": [
                    { (list): known },
                    { "description": "A word of a later version.", "type": ["string", "object"] },
                ]
            });
            if let Some(words) = words.get("anyOf") {
                schema.insert("anyOf".to_owned(), words.clone());
            }
        }
    }
}
