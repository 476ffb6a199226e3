//! The size of a tier, in bytes or in pages.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use kvferry_memory::Depot;
use kvferry_tiers::disk::format::{Geometry, SetKey};
use kvferry_types::ByteSize;

/// A size such as `8GiB`, or a number of pages and the size of each, such as `4096x2MiB`. Every KV shard has room for that
/// many pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierSize {
    /// Bytes of all KV shards.
    Bytes(ByteSize),
    /// Pages of each KV shard.
    Pages {
        /// Their number.
        pages: u32,
        /// Bytes of one page of a shard.
        page_bytes: ByteSize,
    },
}

impl TierSize {
    /// Bytes of host memory for this size. `None` if they cannot be counted, or pages have no bytes.
    pub fn host_bytes(self, shards: u16) -> Option<ByteSize> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Pages { pages: 0, .. } => Some(ByteSize(0)),
            Self::Pages { pages, page_bytes } => {
                let one = Depot::bytes_for(pages, page_bytes.0);
                let all = one.checked_mul(shards.into()).filter(|_| page_bytes.0 > 0);
                all.map(ByteSize)
            }
        }
    }

    /// Bytes of this number of disks for this size, in blocks of up to `ratio` pages. `None` as above.
    pub fn disk_bytes(self, shards: u16, disks: usize, ratio: u32) -> Option<ByteSize> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Pages { pages: 0, .. } => Some(ByteSize(0)),
            Self::Pages { pages, page_bytes } => {
                let disks = u16::try_from(disks.max(1)).ok()?;
                let key = SetKey {
                    layout: [0; 16],
                    page_bytes: page_bytes.0,
                    ratio,
                    shards,
                };
                let share = Geometry::share_for(&key, disks, pages)?;
                let all = share
                    .checked_mul(disks.into())?
                    .checked_mul(shards.into())?;
                Some(ByteSize(all))
            }
        }
    }
}

impl FromStr for TierSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((pages, page_bytes)) = text.split_once('x') else {
            let bytes = text.parse::<ByteSize>();
            return bytes.map(Self::Bytes).map_err(|error| error.to_string());
        };
        let number = pages.trim().parse();
        let pages = number.map_err(|_| format!("'{}' is not a number of pages", pages.trim()))?;
        let page_bytes = page_bytes.parse::<ByteSize>();
        let page_bytes = page_bytes.map_err(|error| error.to_string())?;
        Ok(Self::Pages { pages, page_bytes })
    }
}

impl fmt::Display for TierSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{}", bytes.0),
            Self::Pages { pages, page_bytes } => write!(f, "{pages}x{}", page_bytes.0),
        }
    }
}

impl Serialize for TierSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => bytes.serialize(serializer),
            Self::Pages { .. } => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for TierSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Given {
            Number(u64),
            Text(String),
        }
        match Given::deserialize(deserializer)? {
            Given::Number(bytes) => Ok(Self::Bytes(ByteSize(bytes))),
            Given::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_given_in_pages_has_room_for_them_in_every_shard_and_for_no_more_than_needed() {
        for (pages, page_bytes, ratio, shards, disks) in [
            (1, 4096, 1, 1, 1),
            (1000, 100_000, 32, 2, 3),
            (4096, 2 << 20, 32, 4, 1),
        ] {
            let size: TierSize = format!("{pages}x{page_bytes}").parse().expect("a size");
            let host = size.host_bytes(shards).expect("bytes").0 / u64::from(shards);
            assert_eq!(Depot::pages_in(host, page_bytes), pages);
            let room = |bytes: u64| {
                let key = SetKey {
                    layout: [9; 16],
                    page_bytes,
                    ratio,
                    shards,
                };
                let share = bytes / u64::from(shards) / disks as u64;
                let geometry = Geometry::new(&key, disks as u16, share).expect("a valid key");
                geometry.pages(geometry.segments(share))
            };
            let disk = size.disk_bytes(shards, disks, ratio).expect("bytes").0;
            assert!(room(disk) >= pages, "{} pages of {pages}", room(disk));
            assert!(room(disk - disk / 10) < pages || pages < 100);
        }
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for text in ["8589934592", "4096x2097152", "0"] {
            let size: TierSize = text.parse().expect("a size");
            assert_eq!(size.to_string(), text);
        }
        assert_eq!("8GiB".parse(), Ok(TierSize::Bytes(ByteSize(8 << 30))));
        let (pages, page_bytes) = (7, ByteSize(2 << 20));
        assert_eq!(
            "7 x 2MiB".parse(),
            Ok(TierSize::Pages { pages, page_bytes })
        );
        for refused in ["x2MiB", "-1x2MiB", "7x", "1.5x2MiB", "9999999999x1"] {
            assert!(refused.parse::<TierSize>().is_err(), "{refused}");
        }
        let none: TierSize = "7x0".parse().expect("a size");
        assert_eq!((none.host_bytes(1), none.disk_bytes(1, 1, 1)), (None, None));
    }
}
