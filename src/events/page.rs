//! Pages as subscribers know them.

use rmpv::Value;

/// The number by which events name a page: 8 bytes of its hash, as an integer with or without a sign.
///
/// For an engine's page hash the number is its *last* 8 bytes. An engine whose events use other bytes of its hash names
/// the pages to kvferry by a hash that ends with these bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub u64);

impl PageKey {
    /// The page that the last bytes of a hash name; `None` if there are fewer than 8.
    pub fn of_hash(hash: &[u8]) -> Option<Self> {
        hash.last_chunk()
            .map(|last| Self(u64::from_be_bytes(*last)))
    }

    /// Reads an integer of either sign, or a hash in bytes.
    pub(crate) fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Integer(number) => number
                .as_u64()
                .or_else(|| number.as_i64().map(i64::cast_unsigned))
                .map(Self),
            Value::Binary(hash) => Self::of_hash(hash),
            _ => None,
        }
    }

    /// The value that an engine writes whose numbers have a sign, or none.
    pub(crate) fn value(self, signed: bool) -> Value {
        if signed {
            Value::from(self.0.cast_signed())
        } else {
            Value::from(self.0)
        }
    }
}

/// A tier of kvferry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Host memory.
    Host,
    /// A disk.
    Disk,
}

impl Tier {
    /// Every tier, the fastest first.
    pub const ALL: [Self; 2] = [Self::Host, Self::Disk];

    /// The tier that the wire numbers so; `None` for others, which events do not name.
    pub const fn of_number(number: u8) -> Option<Self> {
        match number {
            2 => Some(Self::Host),
            3 => Some(Self::Disk),
            _ => None,
        }
    }

    /// The medium in events.
    pub const fn medium(self) -> &'static str {
        match self {
            Self::Host => "CPU",
            Self::Disk => "STORAGE",
        }
    }

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Host => 0,
            Self::Disk => 1,
        }
    }
}
