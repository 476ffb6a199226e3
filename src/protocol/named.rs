//! Restricts bodies to the one encoding that `docs/wire.md` describes.
//!
//! Serde reads more: a struct from a list of its field values, fields and variants by their number, binary fields from
//! text and from lists of numbers. These would be further, undocumented formats, which depend on the order in which fields
//! are declared; and a list is a way to amplify memory, because two bytes of it would become 40. [`Named`] refuses them,
//! and forwards everything else to the deserializer that it wraps.
//!
//! A variant that an enum does not know is read with any content, so that an enum with a catch-all
//! (`#[serde(other)]`) takes words and maps of later versions.

use std::borrow::Cow;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, Expected, IgnoredAny, IntoDeserializer as _,
    MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
};

use crate::limits::RESERVED_ITEMS_MAX;
use crate::trail::Trail;

/// Names of catch-alls in the enums of bodies. Sent as words, they are as unknown as others, and may have content.
const CATCH_ALLS: [&str; 2] = ["other", "unknown"];

/// Wraps a deserializer, or a part of it, and refuses structs that are encoded as lists, at any depth. The trail notes where
/// an error came from.
pub(super) struct Named<'t, T>(pub(super) T, pub(super) &'t Trail);

/// Wraps the visitor of anything but a struct.
struct Anything<'t, V>(V, &'t Trail);

/// Wraps the visitor of a struct: accepts a map, refuses a list.
struct Fields<'t, V>(V, &'t Trail);

/// Reads a text, a field's name or a variant's name: accepts text alone. Errors name what was expected.
struct Text<'a>(&'a dyn Expected);

/// Reads a binary field: accepts binary alone.
struct Binary<'a>(&'a dyn Expected);

/// Wraps the visitor of an enum: accepts a variant's name, or a map of one to its content.
struct Variant<'t, V> {
    known: &'static [&'static str],
    visitor: V,
    trail: &'t Trail,
}

/// The variant of an enum that is encoded as a map, after its name has been read.
struct Content<'t, A> {
    name: String,
    known: bool,
    map: A,
    trail: &'t Trail,
}

macro_rules! forward {
    ($($name:ident)*) => {
        $(fn $name<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.0.$name(Anything(visitor, self.1))
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Named<'_, D> {
    type Error = D::Error;

    forward! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_f32 deserialize_f64
        deserialize_char deserialize_option deserialize_unit deserialize_seq deserialize_map
        deserialize_ignored_any
    }

    // Texts and binaries are read before their visitor is called: with one reader for all of them, this package compiles
    // in half the time.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        match self.0.deserialize_str(Text(&visitor))? {
            Cow::Borrowed(text) => visitor.visit_borrowed_str(text),
            Cow::Owned(text) => visitor.visit_string(text),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        match self.0.deserialize_bytes(Binary(&visitor))? {
            Cow::Borrowed(bytes) => visitor.visit_borrowed_bytes(bytes),
            Cow::Owned(bytes) => visitor.visit_byte_buf(bytes),
        }
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.deserialize_bytes(visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0
            .deserialize_unit_struct(name, Anything(visitor, self.1))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0
            .deserialize_newtype_struct(name, Anything(visitor, self.1))
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_tuple(len, Anything(visitor, self.1))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0
            .deserialize_tuple_struct(name, len, Anything(visitor, self.1))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0
            .deserialize_struct(name, fields, Fields(visitor, self.1))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(Variant {
            known,
            visitor,
            trail: self.1,
        })
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

macro_rules! visit {
    ($($name:ident: $type:ty;)*) => {
        $(fn $name<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.0.$name(value)
        })*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Anything<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    visit! {
        visit_bool: bool;
        visit_i64: i64;
        visit_u64: u64;
        visit_f32: f32;
        visit_f64: f64;
        visit_str: &str;
        visit_borrowed_str: &'de str;
        visit_string: String;
        visit_bytes: &[u8];
        visit_borrowed_bytes: &'de [u8];
        visit_byte_buf: Vec<u8>;
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, some: D) -> Result<V::Value, D::Error> {
        self.0.visit_some(Named(some, self.1))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.0.visit_newtype_struct(Named(inner, self.1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(Named(list, self.1))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Named(map, self.1))
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Fields<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map with the fields of ")?;
        self.0.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Named(map, self.1))
    }
}

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for Named<'_, T> {
    type Value = T::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T::Value, D::Error> {
        self.0.deserialize(Named(deserializer, self.1))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Named<'_, A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        let item = self.0.next_element_seed(Named(seed, self.1));
        item.inspect_err(|_| self.1.note(self.0.size_hint()))
    }

    /// The length that the message claims, cut, because capacity is reserved by it: a list of a length that is not
    /// there would take a mebibyte.
    fn size_hint(&self) -> Option<usize> {
        let claimed = self.0.size_hint()?;
        Some(claimed.min(RESERVED_ITEMS_MAX))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Named<'_, A> {
    type Error = A::Error;

    fn next_key_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        self.0.next_key_seed(Named(seed, self.1))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        let value = self.0.next_value_seed(Named(seed, self.1));
        value.inspect_err(|_| self.1.note(self.0.size_hint()))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text: ")?;
        self.0.fmt(f)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(text.to_owned()))
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(text))
    }
}

impl<'de> Visitor<'de> for Binary<'_> {
    type Value = Cow<'de, [u8]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("binary: ")?;
        self.0.fmt(f)
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Cow<'de, [u8]>, E> {
        Ok(Cow::Owned(bytes.to_owned()))
    }

    fn visit_borrowed_bytes<E: Error>(self, bytes: &'de [u8]) -> Result<Cow<'de, [u8]>, E> {
        Ok(Cow::Borrowed(bytes))
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Variant<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one of {}", self.known.join(", "))
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        let name: StrDeserializer<'_, E> = name.into_deserializer();
        self.visitor.visit_enum(name)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        let mut map = Named(map, self.trail);
        let name = map.next_key::<String>()?;
        let name = name.ok_or_else(|| A::Error::invalid_length(0, &"a map of one variant"))?;
        let content = Content {
            known: self.known.contains(&name.as_str()) && !CATCH_ALLS.contains(&name.as_str()),
            name,
            map: &mut map,
            trail: self.trail,
        };
        let value = self.visitor.visit_enum(content)?;
        match map.next_key::<IgnoredAny>()? {
            None => Ok(value),
            Some(_) => Err(A::Error::invalid_length(2, &"a map of one variant")),
        }
    }
}

impl<'de, A: MapAccess<'de>> EnumAccess<'de> for Content<'_, &mut A> {
    type Error = A::Error;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), A::Error> {
        let name: StrDeserializer<'_, A::Error> = self.name.as_str().into_deserializer();
        let value = seed.deserialize(name)?;
        Ok((value, self))
    }
}

impl<'de, A: MapAccess<'de>> VariantAccess<'de> for Content<'_, &mut A> {
    type Error = A::Error;

    /// A variant without content is its name alone, unless it stands for one that this version does not know.
    fn unit_variant(self) -> Result<(), A::Error> {
        if self.known {
            return Err(A::Error::invalid_type(Unexpected::Map, &"the name alone"));
        }
        self.map.next_value::<IgnoredAny>()?;
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, A::Error> {
        self.map.next_value_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.map
            .next_value_seed(Seed(Anything(visitor, self.trail)))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(Seed(Fields(visitor, self.trail)))
    }
}

/// Visits the content of a variant.
struct Seed<V>(V);

impl<'de, V: Visitor<'de>> DeserializeSeed<'de> for Seed<V> {
    type Value = V::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        deserializer.deserialize_any(self.0)
    }
}
