//! Page hashes of a trace: derives the chained hashes of an engine's pages from the hash ids of the trace's blocks.

use kvferry_types::PageHashes;

/// Bytes of a page hash.
pub const PAGE_HASH_BYTES: usize = 16;
/// Largest number of pages in one block of a trace, and of blocks in one page.
pub const SPLIT_MAX: u32 = 4_096;

const STATE_BYTES: usize = 32;
/// Bytes that one BLAKE3 output node yields.
const NODE_BYTES: usize = 64;

/// Block and page sizes that cannot be converted into each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageHasherError {
    /// A size is zero.
    #[error("{flag} is 0: it counts tokens and is at least 1; 16 suits most engines")]
    Zero {
        /// The flag that carries the size.
        flag: &'static str,
    },
    /// Neither size divides the other.
    #[error(
        "--engine-page-tokens is {engine_page_tokens} and --trace-block-tokens is \
         {trace_block_tokens}: one must divide the other; choose a page of a power of two tokens"
    )]
    NotMultiple {
        /// Tokens of an engine page.
        engine_page_tokens: u32,
        /// Tokens of a trace block.
        trace_block_tokens: u32,
    },
    /// One size is more than [`SPLIT_MAX`] times the other.
    #[error(
        "--engine-page-tokens is {engine_page_tokens} and --trace-block-tokens is \
         {trace_block_tokens}: one may be at most {SPLIT_MAX} times the other"
    )]
    TooFar {
        /// Tokens of an engine page.
        engine_page_tokens: u32,
        /// Tokens of a trace block.
        trace_block_tokens: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    PagesInBlock(usize),
    BlocksInPage(usize),
}

/// Makes page hashes of [`PAGE_HASH_BYTES`] from a trace's hash ids, for one pair of sizes.
///
/// A BLAKE3 chain runs over the blocks. Each step hashes the previous state and the ids of the step; the first 32 bytes
/// of its output are the next state, and the output, extended as far as needed, is split into the hashes of the step's
/// pages. A page's hash therefore covers its own block and all earlier ones. A step is one block, or all blocks that
/// one page spans.
#[derive(Debug, Clone)]
pub struct PageHasher {
    step: Step,
    seed: [u8; STATE_BYTES],
}

impl PageHasher {
    /// Creates a hasher for blocks of `trace_block_tokens` and pages of `engine_page_tokens`. Both sizes are part of
    /// every hash, so pages of different sizes never have equal hashes.
    pub fn new(trace_block_tokens: u32, engine_page_tokens: u32) -> Result<Self, PageHasherError> {
        let zero = |flag| Err(PageHasherError::Zero { flag });
        let step = match (trace_block_tokens, engine_page_tokens) {
            (0, _) => return zero("--trace-block-tokens"),
            (_, 0) => return zero("--engine-page-tokens"),
            (block, page) if block % page == 0 => Step::PagesInBlock((block / page) as usize),
            (block, page) if page % block == 0 => Step::BlocksInPage((page / block) as usize),
            _ => {
                return Err(PageHasherError::NotMultiple {
                    engine_page_tokens,
                    trace_block_tokens,
                });
            }
        };
        let (Step::PagesInBlock(times) | Step::BlocksInPage(times)) = step;
        if times > SPLIT_MAX as usize {
            return Err(PageHasherError::TooFar {
                engine_page_tokens,
                trace_block_tokens,
            });
        }
        let mut sizes = [0; 8];
        sizes[..4].copy_from_slice(&trace_block_tokens.to_le_bytes());
        sizes[4..].copy_from_slice(&engine_page_tokens.to_le_bytes());
        Ok(Self {
            step,
            seed: blake3::derive_key("kvferry trace page hashes 1", &sizes),
        })
    }

    /// Number of full pages in `blocks` full blocks of a trace.
    pub fn pages(&self, blocks: usize) -> usize {
        match self.step {
            Step::PagesInBlock(times) => blocks.saturating_mul(times),
            Step::BlocksInPage(times) => blocks / times,
        }
    }

    /// Hashes all full pages of `blocks`, the first blocks of a prompt.
    pub fn hash(&self, blocks: &[u64]) -> PageHashes {
        let mut bytes = vec![0; self.pages(blocks.len()) * PAGE_HASH_BYTES];
        let (ids, pages) = match self.step {
            Step::PagesInBlock(times) => (1, times),
            Step::BlocksInPage(times) => (times, 1),
        };
        let mut chain = Chain {
            hasher: blake3::Hasher::new(),
            state: self.seed,
        };
        let outputs = bytes.chunks_exact_mut(pages * PAGE_HASH_BYTES);
        for (ids, output) in blocks.chunks_exact(ids).zip(outputs) {
            chain.step(ids, output);
        }
        let Some(hashes) = PageHashes::packed(PAGE_HASH_BYTES, bytes) else {
            unreachable!("the width is in bounds and divides the length")
        };
        hashes
    }
}

struct Chain {
    hasher: blake3::Hasher,
    state: [u8; STATE_BYTES],
}

impl Chain {
    /// Hashes the ids of one step and writes the hashes of its pages. Reads the output in whole nodes, because BLAKE3
    /// recomputes a node at each partial read.
    fn step(&mut self, ids: &[u64], hashes: &mut [u8]) {
        self.hasher.reset();
        self.hasher.update(&self.state);
        for id in ids {
            self.hasher.update(&id.to_le_bytes());
        }
        let mut reader = self.hasher.finalize_xof();
        let mut first = [0; NODE_BYTES];
        reader.fill(&mut first);
        self.state.copy_from_slice(&first[..STATE_BYTES]);
        let (head, tail) = hashes.split_at_mut(NODE_BYTES.min(hashes.len()));
        head.copy_from_slice(&first[..head.len()]);
        reader.fill(tail);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes() -> impl Strategy<Value = (u32, u32)> {
        (0_u32..6, 0_u32..6).prop_map(|(a, b)| (1 << a, 1 << b))
    }

    proptest! {
        #[test]
        fn equal_prefixes_are_equal_and_a_divergence_stays(
            (block, page) in sizes(),
            prefix in prop::collection::vec(any::<u64>(), 0..40),
            a in prop::collection::vec(0_u64..1_000, 1..40),
            b in prop::collection::vec(1_000_u64..2_000, 1..40),
        ) {
            let hasher = PageHasher::new(block, page).expect("powers of two");
            let (a, b) = ([&prefix[..], &a].concat(), [&prefix[..], &b].concat());
            let (first, second) = (hasher.hash(&a), hasher.hash(&b));
            prop_assert_eq!(first.len(), hasher.pages(a.len()));
            prop_assert_eq!(first.len(), a.len() * block as usize / page as usize);
            let shared = prefix.len() * block as usize / page as usize;
            for at in 0..first.len().min(second.len()) {
                prop_assert_eq!(first.get(at) == second.get(at), at < shared, "page {}", at);
            }
        }

        #[test]
        fn a_longer_prompt_starts_with_the_hashes_of_a_shorter_one(
            (block, page) in sizes(),
            ids in prop::collection::vec(any::<u64>(), 0..80),
            cut in 0_usize..80,
        ) {
            let hasher = PageHasher::new(block, page).expect("powers of two");
            let short = hasher.hash(&ids[..cut.min(ids.len())]);
            prop_assert!(hasher.hash(&ids).as_bytes().starts_with(short.as_bytes()));
        }
    }

    #[test]
    fn all_pages_differ_also_when_ids_repeat() {
        for (block, page) in [(512, 16), (64, 16), (16, 16), (16, 64), (48, 16)] {
            let hashes = PageHasher::new(block, page).expect("sizes").hash(&[5; 64]);
            let mut seen: Vec<&[u8]> = (0..hashes.len()).map(|at| hashes.get(at)).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), hashes.len(), "{block} {page}");
        }
    }

    #[test]
    fn the_hashes_of_a_trace_never_change() {
        let first = |block, page| {
            let hashes = PageHasher::new(block, page)
                .expect("sizes")
                .hash(&[1, 2, 3, 4]);
            format!("{:032x}", hashes.fingerprint(hashes.len() - 1).0)
        };
        assert_eq!(
            [first(64, 16), first(16, 32)],
            [
                "add33f546ade13950ce206cbeae5fe53",
                "dbb4cbaf97be106c0e7af0567bda8676"
            ]
        );
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused_with_both_flags() {
        let error = PageHasher::new(48, 32).expect_err("48 and 32").to_string();
        for part in [
            "--engine-page-tokens is 32",
            "--trace-block-tokens is 48",
            "divide",
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(matches!(
            PageHasher::new(0, 16),
            Err(PageHasherError::Zero { .. })
        ));
        assert!(matches!(
            PageHasher::new(16, 0),
            Err(PageHasherError::Zero { .. })
        ));
        assert!(PageHasher::new(SPLIT_MAX, 1).is_ok() && PageHasher::new(1, SPLIT_MAX).is_ok());
        let far = PageHasher::new(1, 2 * SPLIT_MAX);
        assert!(matches!(far, Err(PageHasherError::TooFar { .. })));
    }
}
