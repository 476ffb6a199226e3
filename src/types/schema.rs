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
        if let Some(words) = schema.remove(list) {
            let mut known = json_schema!({ (list): words });
            if let Some(kind) = schema.remove("type") {
                known.insert("type".to_owned(), kind);
            }
            let later = json_schema!({"description": "A word of a later version.", "type": ["string", "object"]});
            schema.insert(
                "anyOf".to_owned(),
                vec![known.to_value(), later.to_value()].into(),
            );
        }
    }
}
