//! Proofs of the mapping: bytes that the engine read in its memory, and that the worker must find through its own
//! mapping.
//!
//! The nonce proves the piece of memory that contains it. Every other piece (an allocation, or a chunk of one) is
//! opened by a handle of its own, which may refer to other memory: an earlier registration's, or a neighbouring piece.

use std::collections::BTreeMap;
use std::fmt;

use super::{NONCE_BYTES_MAX, NONCE_BYTES_MIN, RegistrationError, allocation_of};
use kvferry_types::{AllocationHandle, Nonce, Registration};

/// Most proofs of one registration: four for each chunk.
pub const PROOFS_MAX: usize = 65_536;
/// Bytes prove something only if they have at least this many different values: zeros and repeated constants occur
/// anywhere.
const TELLING_VALUES: usize = 8;
/// Number of proofs that one read fetches.
const READ_TOGETHER: usize = 1024;

/// A piece of memory that is opened by a handle of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    allocation: u32,
    chunk: Option<u32>,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocations[{}]", self.allocation)?;
        match self.chunk {
            Some(chunk) => write!(f, ".handle.chunks[{chunk}]"),
            None => Ok(()),
        }
    }
}

/// Why verification of the proofs failed.
#[derive(Debug, thiserror::Error)]
pub enum ProofError<E> {
    /// The memory could not be read.
    #[error("proofs: {0}")]
    Read(E),
    /// A piece contains other bytes than the engine read there.
    #[error(
        "{piece} has other bytes at byte {offset_bytes} of its allocation than the engine: the opened memory is not the \
         engine's, or the engine wrote there meanwhile: register again with the bytes of then"
    )]
    Other {
        /// The piece that was refuted.
        piece: Piece,
        /// Offset in the allocation of the first of its proofs that did not match.
        offset_bytes: u64,
    },
}

/// The pieces of a registration, as the ends of each allocation's chunks; `None` for an allocation without chunks.
struct Pieces(Vec<Option<Vec<u64>>>);

impl Pieces {
    fn of(registration: &Registration) -> Self {
        let ends = registration.allocations.iter().map(|allocation| {
            let AllocationHandle::Chunks(chunks) = &allocation.handle else {
                return None;
            };
            let mut end: u64 = 0;
            let ends = chunks.iter().map(|chunk| {
                end = end.saturating_add(chunk.bytes);
                end
            });
            Some(ends.collect())
        });
        Self(ends.collect())
    }

    fn all(&self) -> impl Iterator<Item = Piece> {
        let counted = (0..).zip(&self.0);
        counted.flat_map(|(allocation, ends)| {
            let chunks = ends.as_ref().map_or(1, Vec::len);
            let chunked = ends.is_some();
            (0..).take(chunks).map(move |chunk| Piece {
                allocation,
                chunk: chunked.then_some(chunk),
            })
        })
    }

    /// The piece that contains a whole proof.
    fn holding(&self, proof: &Nonce) -> Option<Piece> {
        let allocation = proof.allocation;
        let Some(ends) = self.0.get(usize::try_from(allocation).ok()?)? else {
            let chunk = None;
            return Some(Piece { allocation, chunk });
        };
        let end = proof.offset_bytes.checked_add(proof.bytes.len() as u64)?;
        let place = ends.partition_point(|end| *end <= proof.offset_bytes);
        let holds = ends.get(place).is_some_and(|its| end <= *its);
        let chunk = Some(u32::try_from(place).ok().filter(|_| holds)?);
        Some(Piece { allocation, chunk })
    }
}

/// Checks the number and the positions of the proofs.
pub(super) fn check(registration: &Registration) -> Result<(), RegistrationError> {
    let proofs = &registration.proofs;
    if proofs.len() > PROOFS_MAX {
        let value = format!("a list of {}", proofs.len());
        let remedy = format!("give at most {PROOFS_MAX}");
        return Err(RegistrationError::new("proofs", value, remedy));
    }
    let pieces = Pieces::of(registration);
    for (index, proof) in proofs.iter().enumerate() {
        check_one(registration, &format!("proofs[{index}]"), proof)?;
        if pieces.holding(proof).is_none() {
            let remedy = "it must end within the chunk that it begins in";
            let field = format!("proofs[{index}].offset_bytes");
            return Err(RegistrationError::new(field, proof.offset_bytes, remedy));
        }
    }
    Ok(())
}

/// Checks the length of a nonce or a proof, and that the bytes lie in their allocation.
pub(super) fn check_one(
    registration: &Registration,
    field: &str,
    proof: &Nonce,
) -> Result<(), RegistrationError> {
    let Nonce {
        allocation,
        offset_bytes,
        bytes,
    } = proof;
    if !(NONCE_BYTES_MIN..=NONCE_BYTES_MAX).contains(&bytes.len()) {
        return Err(RegistrationError::new(
            format!("{field}.bytes"),
            format!("{} bytes long", bytes.len()),
            format!("give {NONCE_BYTES_MIN} to {NONCE_BYTES_MAX} bytes"),
        ));
    }
    let memory = allocation_of(registration, format!("{field}.allocation"), *allocation)?;
    let end = offset_bytes.checked_add(bytes.len() as u64);
    if end.is_none_or(|end| end > memory) {
        return Err(RegistrationError::new(
            format!("{field}.offset_bytes"),
            offset_bytes,
            format!("the bytes must end within allocations[{allocation}] ({memory} bytes)"),
        ));
    }
    Ok(())
}

/// Number of pieces of a registration for which the engine gives no proof, and that do not contain the nonce.
pub fn pieces_without_proof(registration: &Registration) -> usize {
    let pieces = Pieces::of(registration);
    let given = registration.proofs.iter().chain([&registration.nonce]);
    let mut given: Vec<Piece> = given.filter_map(|proof| pieces.holding(proof)).collect();
    given.sort_unstable();
    given.dedup();
    pieces.all().count() - given.len()
}

/// Result of the comparison for one piece.
#[derive(Clone, Copy, Default)]
struct Known {
    proven: bool,
    /// Offset of the first proof that did not match.
    other: Option<u64>,
}

/// Verifies the proofs of a validated registration. `read` reads ranges (offset and length) of an allocation, one after
/// another. Returns the number of pieces that are neither proven nor refuted.
///
/// The proofs of one piece are alternatives, because a serving engine may meanwhile write over some of them: a piece is
/// proven by one proof that matches and has at least 8 different byte values, and refuted when no proof does so and
/// another one does not match.
pub fn verify_proofs<E>(
    registration: &Registration,
    mut read: impl FnMut(u32, &[(u64, u64)], &mut [u8]) -> Result<(), E>,
) -> Result<usize, ProofError<E>> {
    let pieces = Pieces::of(registration);
    let mut known: BTreeMap<Piece, Known> = pieces
        .all()
        .map(|piece| (piece, Known::default()))
        .collect();
    // The nonce has been verified before.
    if let Some(its) = pieces
        .holding(&registration.nonce)
        .and_then(|piece| known.get_mut(&piece))
    {
        its.proven = true;
    }
    let mut proofs: Vec<&Nonce> = registration.proofs.iter().collect();
    proofs.sort_by_key(|proof| (proof.allocation, proof.offset_bytes));
    let mut seen = Vec::new();
    for of_one in proofs.chunk_by(|one, other| one.allocation == other.allocation) {
        for together in of_one.chunks(READ_TOGETHER) {
            let ranges = together
                .iter()
                .map(|proof| (proof.offset_bytes, proof.bytes.len() as u64));
            let ranges: Vec<(u64, u64)> = ranges.collect();
            seen.resize(together.iter().map(|proof| proof.bytes.len()).sum(), 0);
            read(together[0].allocation, &ranges, &mut seen).map_err(ProofError::Read)?;
            let mut rest = &seen[..];
            for proof in together {
                let (found, behind) = rest.split_at(proof.bytes.len());
                rest = behind;
                let piece = pieces.holding(proof);
                let Some(its) = piece.and_then(|piece| known.get_mut(&piece)) else {
                    continue;
                };
                match found == proof.bytes {
                    true => its.proven |= distinguishes(found),
                    false => its.other = its.other.or(Some(proof.offset_bytes)),
                }
            }
        }
    }
    for (piece, its) in &known {
        if let (false, Some(offset_bytes)) = (its.proven, its.other) {
            let piece = *piece;
            return Err(ProofError::Other {
                piece,
                offset_bytes,
            });
        }
    }
    Ok(known.values().filter(|its| !its.proven).count())
}

/// Whether bytes are unlikely to occur anywhere else.
fn distinguishes(bytes: &[u8]) -> bool {
    let mut values = bytes.to_vec();
    values.sort_unstable();
    values.dedup();
    values.len() >= TELLING_VALUES
}

#[cfg(test)]
mod tests {
    use super::super::tests::separate_layers;
    use super::super::validate;
    use super::*;
    use kvferry_types::{AllocationKind, Chunk, ChunkHandle};

    /// A proof of pseudo-random bytes, different for each allocation and offset.
    fn at(allocation: u32, offset_bytes: u64) -> Nonce {
        let seed = u64::from(allocation) << 32 | offset_bytes;
        let mut bytes = vec![0; 32];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        Nonce {
            allocation,
            offset_bytes,
            bytes,
        }
    }

    /// The first allocation is one piece, the second has three chunks; each piece has two proofs.
    fn proven() -> Registration {
        let mut registration = separate_layers();
        let bytes = registration.allocations[1].bytes / 4;
        let chunk = |number: u8, bytes| Chunk {
            handle: ChunkHandle::CudaFabric([number; 64]),
            bytes,
        };
        let chunks = vec![chunk(1, bytes), chunk(2, 2 * bytes), chunk(3, bytes)];
        for allocation in &mut registration.allocations {
            allocation.kind = AllocationKind::Device;
        }
        registration.allocations[1].handle = AllocationHandle::Chunks(chunks);
        let chunked = [0, bytes, 3 * bytes].map(|offset| [at(1, offset), at(1, offset + 40)]);
        registration.proofs = [at(2, 0), at(2, 100), at(3, 0), at(3, 100)]
            .into_iter()
            .chain(chunked.into_iter().flatten())
            .collect();
        registration
    }

    /// Result of the verification when the memory contains the proofs' bytes after `change`.
    fn verdict(registration: &Registration, change: impl Fn(&mut Nonce)) -> Result<usize, String> {
        let shown = registration.proofs.iter().cloned().map(|mut proof| {
            change(&mut proof);
            proof
        });
        let shown: Vec<Nonce> = shown.collect();
        let verdict = verify_proofs(registration, |allocation, ranges, mut out| {
            for (offset_bytes, len_bytes) in ranges {
                let place = |it: &&Nonce| (it.allocation, it.offset_bytes);
                let found = shown
                    .iter()
                    .find(|it| place(it) == (allocation, *offset_bytes));
                let bytes = &found.expect("asked for a proof").bytes;
                assert_eq!(bytes.len() as u64, *len_bytes);
                let (part, behind) = out.split_at_mut(bytes.len());
                part.copy_from_slice(bytes);
                out = behind;
            }
            Ok::<_, String>(())
        });
        verdict.map_err(|error| error.to_string())
    }

    #[test]
    fn a_piece_is_proven_by_one_of_its_proofs() {
        let registration = proven();
        validate(&on_device(registration.clone())).expect("consistent");
        assert_eq!(pieces_without_proof(&registration), 0);
        assert_eq!(verdict(&registration, |_| {}), Ok(0));
        // The engine has overwritten the first proof of each piece.
        let second = |proof: &mut Nonce| {
            if [0, 208, 624].contains(&proof.offset_bytes) {
                proof.bytes.fill(9);
            }
        };
        assert_eq!(verdict(&registration, second), Ok(0));
    }

    #[test]
    fn a_piece_that_shows_other_bytes_is_named() {
        let registration = proven();
        for (allocation, offset, name) in [
            (2, 0, "allocations[2] "),
            (1, 208, "allocations[1].handle.chunks[1] "),
            (1, 624, "allocations[1].handle.chunks[2] "),
        ] {
            let near =
                |proof: &Nonce| proof.allocation == allocation && proof.offset_bytes >= offset;
            let wrong = verdict(&registration, |proof| {
                if near(proof) && proof.offset_bytes <= offset + 100 {
                    proof.bytes[5] ^= 1;
                }
            });
            let text = wrong.expect_err("other bytes");
            assert!(text.starts_with(name), "{text}");
        }
    }

    #[test]
    fn bytes_that_occur_everywhere_prove_nothing_and_refute_nothing() {
        let mut registration = proven();
        for proof in &mut registration.proofs {
            proof.bytes = [1, 0, 0x80, 0x3f].repeat(8);
        }
        // Two allocations and three chunks; the nonce is in another one.
        assert_eq!(verdict(&registration, |_| {}), Ok(5));
        let wrong = verdict(&registration, |proof| {
            if (proof.allocation, proof.offset_bytes) == (3, 100) {
                proof.bytes.fill(0);
            }
        });
        let text = wrong.expect_err("other bytes");
        assert!(
            text.starts_with("allocations[3] has other bytes at byte 100 "),
            "{text}"
        );
    }

    #[test]
    fn pieces_without_proof_are_counted() {
        let mut registration = proven();
        registration.proofs.retain(|proof| proof.allocation != 1);
        assert_eq!(pieces_without_proof(&registration), 3);
        assert_eq!(verdict(&registration, |_| {}), Ok(3));
        registration.proofs.clear();
        assert_eq!(pieces_without_proof(&registration), 5);
        registration.allocations.truncate(1);
        assert_eq!(pieces_without_proof(&registration), 0);
    }

    #[test]
    fn proofs_outside_of_all_memory_are_refused_by_name() {
        type Spoil = fn(&mut Registration);
        let cases: [(&str, Spoil); 6] = [
            ("proofs[1].allocation", |r| r.proofs[1].allocation = 4),
            ("proofs[1].bytes", |r| r.proofs[1].bytes.truncate(15)),
            ("proofs[1].bytes", |r| r.proofs[1].bytes.resize(65, 0)),
            ("proofs[1].offset_bytes", |r| {
                r.proofs[1].offset_bytes = u64::MAX;
            }),
            ("proofs[4].offset_bytes", |r| r.proofs[4].offset_bytes = 177),
            ("proofs", |r| {
                let one = r.proofs[0].clone();
                r.proofs.resize(PROOFS_MAX + 1, one);
            }),
        ];
        for (field, spoil) in cases {
            let mut registration = on_device(proven());
            spoil(&mut registration);
            let refused = validate(&registration).expect_err("it lies nowhere");
            assert_eq!(refused.field, field, "{refused}");
        }
    }

    /// A registration with a UUID of a GPU and matching handles.
    fn on_device(mut registration: Registration) -> Registration {
        registration.device_uuid = Some("GPU-0".to_owned());
        for (number, allocation) in (10..).zip(&mut registration.allocations) {
            if !matches!(allocation.handle, AllocationHandle::Chunks(_)) {
                allocation.handle = AllocationHandle::CudaIpc([number; 64]);
            }
        }
        registration
    }
}
