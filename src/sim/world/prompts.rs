//! Page sequences of prompts: each family has a trunk from which its branches leave at random pages. A sequence is
//! drawn repeatedly, with different lengths, in some worlds also from the middle on.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use super::SimContext;
use kvferry_types::PageHashes;

/// Branches of a family, its trunk included.
const BRANCHES: u64 = 4;

/// Draws a namespace and the page hashes of a sequence. The same hashes occur in every namespace.
pub(super) fn draw(env: &mut SimContext) -> (u8, PageHashes) {
    let namespace = env.rng.u8(0..env.setup.namespaces);
    let family = env.rng.u64(0..env.setup.families);
    let branch = env.rng.u64(0..BRANCHES);
    let pages = env.rng.u32(1..=env.setup.longest);
    let leaves = match branch {
        0 => pages,
        _ => u32::try_from(number(family, branch, 0) % 24).unwrap_or(0),
    };
    let mut bytes = Vec::with_capacity(pages as usize * 16);
    let first = match env.setup.tails && env.rng.bool() {
        true => env.rng.u32(0..pages),
        false => 0,
    };
    for page in first..pages {
        let branch = if page < leaves { 0 } else { branch };
        bytes.extend_from_slice(&hash(family, branch, page.into()));
    }
    let hashes = PageHashes::packed(16, bytes.clone());
    (
        namespace,
        hashes.unwrap_or_else(|| unreachable!("16 bytes a page")),
    )
}

fn hash(family: u64, branch: u64, page: u64) -> [u8; 16] {
    let mut hasher = SipHasher24::new();
    [family, branch, page + 1]
        .into_iter()
        .for_each(|word| hasher.write_u64(word));
    hasher.finish128().as_bytes()
}

fn number(family: u64, branch: u64, page: u64) -> u64 {
    let bytes = hash(family, branch, page);
    u64::from(bytes[0]) | u64::from(bytes[1]) << 8
}
