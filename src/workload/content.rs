//! The expected bytes of a page, so that every loaded byte can be checked without keeping a copy.
//!
//! A byte is a function of the page's hash, the layer, the role, the shard and the offset. A copy that went to the
//! wrong place, or was partial or repeated, leaves bytes that belong elsewhere.

use kvferry_types::{Fingerprint, Shard, TensorRole};

/// Fill byte of unwritten memory: engine pages before they are computed or loaded, and depots before a store. Content
/// equals it in one byte of 256 by chance, so that a page of it never passes.
pub const POISON: u8 = 0xdb;

const LANES: usize = 8;
const CHUNK_BYTES: usize = LANES * 8;
/// 2^64 divided by the golden ratio, made odd: multiples of it spread evenly.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
const STEP: u64 = GAMMA.wrapping_mul(LANES as u64);

/// The key of the bytes of one page in one layer and role, of one shard of the KV.
///
/// Word `i` (8 bytes, little-endian) is a mix of `start + i x GAMMA` and `twist`, two numbers that BLAKE3 derives from
/// the four. The mix uses only additions, shifts and exclusive ors, which baseline x86-64 performs on two words at
/// once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentKey {
    start: u64,
    twist: u64,
}

/// Bytes that differ from the expected ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{mismatched_bytes} bytes differ, the first at offset {first_offset}: expected {expected:#04x}, \
     found {found:#04x}"
)]
pub struct Mismatch {
    /// Offset of the first wrong byte.
    pub first_offset: usize,
    /// The expected byte.
    pub expected: u8,
    /// The byte that was found.
    pub found: u8,
    /// Number of wrong bytes.
    pub mismatched_bytes: u64,
}

impl ContentKey {
    /// Creates the key of one page in one layer and role, of one shard.
    pub fn new(page: Fingerprint, layer: u32, role: TensorRole, shard: Shard) -> Self {
        let mut input = [0; 23];
        input[..16].copy_from_slice(&page.0.to_le_bytes());
        input[16..20].copy_from_slice(&layer.to_le_bytes());
        input[20] = role_number(role);
        input[21..].copy_from_slice(&shard.0.to_le_bytes());
        let digest = blake3::hash(&input);
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&digest.as_bytes()[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        Self {
            start: word(0),
            twist: word(8),
        }
    }

    /// Writes the bytes from offset 0 on.
    pub fn fill(&self, out: &mut [u8]) {
        let mut words = self.words();
        let (chunks, rest) = out.as_chunks_mut::<CHUNK_BYTES>();
        for chunk in chunks {
            *chunk = to_bytes(words.take());
        }
        let last = to_bytes(words.take());
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// Checks that `bytes` are what [`ContentKey::fill`] writes.
    ///
    /// # Errors
    ///
    /// The first wrong byte, and the number of wrong bytes.
    pub fn verify(&self, bytes: &[u8]) -> Result<(), Mismatch> {
        let mut words = self.words();
        let mut mismatch = None;
        let (chunks, rest) = bytes.as_chunks::<CHUNK_BYTES>();
        for (number, chunk) in chunks.iter().enumerate() {
            let expected = words.take();
            if differ(&expected, chunk) {
                compare(
                    &mut mismatch,
                    number * CHUNK_BYTES,
                    &to_bytes(expected),
                    chunk,
                );
            }
        }
        let last = to_bytes(words.take());
        compare(
            &mut mismatch,
            chunks.len() * CHUNK_BYTES,
            &last[..rest.len()],
            rest,
        );
        mismatch.map_or(Ok(()), Err)
    }

    fn words(&self) -> Words {
        let mut counters = [self.start; LANES];
        for (lane, counter) in counters.iter_mut().enumerate() {
            *counter = counter.wrapping_add(GAMMA.wrapping_mul(lane as u64));
        }
        Words {
            counters,
            twist: self.twist,
        }
    }
}

/// Numbers that do not change when roles are added to the enumeration.
fn role_number(role: TensorRole) -> u8 {
    match role {
        TensorRole::K => 0,
        TensorRole::V => 1,
        TensorRole::Kv => 2,
        TensorRole::Latent => 3,
        TensorRole::State => 4,
        TensorRole::Other => u8::MAX,
    }
}

struct Words {
    counters: [u64; LANES],
    twist: u64,
}

impl Words {
    /// Returns the next words. Every step is invertible, so that different counters give different words.
    #[inline(always)]
    fn take(&mut self) -> [u64; LANES] {
        let mut words = self.counters;
        for word in &mut words {
            let mut mixed = *word;
            mixed ^= mixed >> 29;
            mixed = mixed.wrapping_add(mixed << 13);
            mixed ^= self.twist;
            mixed ^= mixed >> 17;
            mixed = mixed.wrapping_add(mixed << 23);
            mixed ^= mixed >> 31;
            *word = mixed;
        }
        for counter in &mut self.counters {
            *counter = counter.wrapping_add(STEP);
        }
        words
    }
}

#[inline(always)]
fn to_bytes(words: [u64; LANES]) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    bytes
}

#[inline(always)]
fn differ(expected: &[u64; LANES], chunk: &[u8; CHUNK_BYTES]) -> bool {
    let mut difference = 0;
    for (expected, found) in expected.iter().zip(chunk.as_chunks::<8>().0) {
        difference |= expected ^ u64::from_le_bytes(*found);
    }
    difference != 0
}

/// Counts the wrong bytes of one chunk, which starts at `offset`.
#[cold]
fn compare(mismatch: &mut Option<Mismatch>, offset: usize, expected: &[u8], found: &[u8]) {
    let wrong = expected
        .iter()
        .zip(found)
        .enumerate()
        .filter(|(_, (expected, found))| expected != found);
    for (at, (expected, found)) in wrong {
        let mismatch = mismatch.get_or_insert(Mismatch {
            first_offset: offset + at,
            expected: *expected,
            found: *found,
            mismatched_bytes: 0,
        });
        mismatch.mismatched_bytes += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Fingerprint = Fingerprint(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

    fn key() -> ContentKey {
        ContentKey::new(PAGE, 3, TensorRole::K, Shard(1))
    }

    fn bytes(key: ContentKey, length: usize) -> Vec<u8> {
        let mut bytes = vec![POISON; length];
        key.fill(&mut bytes);
        bytes
    }

    #[test]
    fn verify_agrees_with_fill_and_the_start_does_not_depend_on_the_length() {
        let long = bytes(key(), 256);
        for length in 0..=200 {
            let filled = bytes(key(), length);
            assert_eq!(filled, long[..length]);
            assert_eq!(key().verify(&filled), Ok(()), "{length}");
        }
    }

    #[test]
    fn every_changed_byte_is_found_where_it_is() {
        for length in [1, 7, 8, 63, 64, 65, 200] {
            let mut filled = bytes(key(), length);
            for at in 0..length {
                let expected = filled[at];
                filled[at] ^= 1 << (at % 8);
                let mismatch = Mismatch {
                    first_offset: at,
                    expected,
                    found: filled[at],
                    mismatched_bytes: 1,
                };
                assert_eq!(key().verify(&filled), Err(mismatch));
                filled[at] = expected;
            }
        }
        let mut filled = bytes(key(), 200);
        for at in [10, 70, 199] {
            filled[at] = !filled[at];
        }
        let mismatch = key().verify(&filled).expect_err("three are wrong");
        assert_eq!((mismatch.first_offset, mismatch.mismatched_bytes), (10, 3));
    }

    /// Whether about one byte of 256 agrees by chance, as for bytes that are unrelated to the key.
    fn foreign(key: ContentKey, bytes: &[u8]) -> bool {
        let wrong = key
            .verify(bytes)
            .expect_err("foreign bytes")
            .mismatched_bytes;
        let agree = bytes.len() as u64 - wrong;
        agree < bytes.len() as u64 / 128
    }

    #[test]
    fn another_page_layer_role_or_rank_is_caught() {
        let others = (0..128)
            .map(|bit| {
                ContentKey::new(Fingerprint(PAGE.0 ^ (1 << bit)), 3, TensorRole::K, Shard(1))
            })
            .chain(
                [0, 1, 2, 4, 3 + (1 << 8), 3 + (1 << 31)]
                    .map(|layer| ContentKey::new(PAGE, layer, TensorRole::K, Shard(1))),
            )
            .chain(
                [
                    TensorRole::V,
                    TensorRole::Kv,
                    TensorRole::Latent,
                    TensorRole::State,
                ]
                .map(|role| ContentKey::new(PAGE, 3, role, Shard(1))),
            )
            .chain(
                [0, 2, 63, 257].map(|rank| ContentKey::new(PAGE, 3, TensorRole::K, Shard(rank))),
            );
        for other in others {
            assert!(foreign(key(), &bytes(other, 8_192)), "{other:?}");
        }
        // Swapping a layer and a rank gives a different key.
        let swapped = ContentKey::new(PAGE, 1, TensorRole::K, Shard(3));
        assert!(foreign(key(), &bytes(swapped, 8_192)));
    }

    #[test]
    fn a_shifted_offset_is_caught() {
        let long = bytes(key(), 1 << 17);
        for shift in (1..=300).chain([512, 1 << 10, 1 << 12, 1 << 14, 1 << 16]) {
            assert!(foreign(key(), &long[shift..shift + 8_192]), "{shift}");
        }
    }

    #[test]
    fn poison_and_zeros_are_never_content() {
        for byte in [POISON, 0, 0xff] {
            assert!(foreign(key(), &[byte; 8_192]), "{byte}");
        }
    }

    #[test]
    fn bytes_are_spread_evenly() {
        let mut counts = [0_u32; 256];
        for byte in bytes(key(), 1 << 20) {
            counts[usize::from(byte)] += 1;
        }
        // 4,096 are expected of each; ten standard deviations are 640.
        assert!(
            counts.iter().all(|count| (3_456..4_736).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn the_bytes_of_a_page_never_change() {
        assert_eq!(bytes(key(), 8), [191, 153, 175, 79, 167, 188, 177, 11]);
    }
}
