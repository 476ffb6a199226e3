//! The built-in workload: multi-turn conversations over a few shared system prompts, generated from a seed.
//!
//! Only integers and a generator of this crate are used, so that a seed gives the same requests on every platform.

use std::ops::RangeInclusive;

use super::{REQUESTS_MAX, Trace, TraceRequest};

/// Parameters of the built-in workload. A range whose start is above its end counts as its start.
///
/// Memory grows with `requests x prompt_tokens_max / block_tokens x 8` bytes: 1.6 MB with the defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Tokens that one hash id stands for; 0 counts as 1. Default: `16`.
    pub block_tokens: u32,
    /// Number of requests, at most [`REQUESTS_MAX`]. Default: `400`.
    pub requests: u32,
    /// Conversations that are live at the same time; 0 counts as 1. Default: `24`.
    pub conversations: u32,
    /// System prompts, each the start of many conversations; with 0 every conversation starts empty. Default: `4`.
    pub system_prompts: u32,
    /// Tokens of a system prompt. Default: `400..=1500`.
    pub system_tokens: RangeInclusive<u32>,
    /// Tokens that a user adds at each turn. Default: `100..=900`.
    pub user_tokens: RangeInclusive<u32>,
    /// Tokens of an answer; the next turn's prompt contains it. Default: `20..=300`.
    pub output_tokens: RangeInclusive<u32>,
    /// Longest prompt, in tokens. A conversation ends before a turn that would exceed the limit, except that its first
    /// turn may exceed it. Default: `8192`.
    pub prompt_tokens_max: u32,
    /// Largest number of turns of a conversation. Default: `12`.
    pub turns_max: u32,
    /// Percentage of new conversations that branch from an earlier turn of a live one, instead of starting at a system
    /// prompt. Default: `20`.
    pub branch_percent: u32,
    /// Approximate time over which the requests arrive, in milliseconds. Default: `20000`.
    pub span_ms: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            block_tokens: 16,
            requests: 400,
            conversations: 24,
            system_prompts: 4,
            system_tokens: 400..=1_500,
            user_tokens: 100..=900,
            output_tokens: 20..=300,
            prompt_tokens_max: 8_192,
            turns_max: 12,
            branch_percent: 20,
            span_ms: 20_000,
        }
    }
}

/// Makes the trace of a shape and a seed. Equal arguments give an equal trace, on every platform.
///
/// Hash ids count up from 0 as new blocks appear, so that each id stands for one prefix and always follows the same
/// block.
pub fn generate(shape: &Shape, seed: u64) -> Trace {
    let block_tokens = shape.block_tokens.max(1);
    let requests = GeneratedWorkload::new(shape, seed).requests();
    Trace::new(format!("builtin-{seed}"), block_tokens, requests)
}

/// splitmix64: a counter in steps of the golden ratio, mixed by two multiplications. Steele, Lea and Flood, "Fast
/// Splittable Pseudorandom Number Generators", OOPSLA 2014.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which must not be 0: the high half of a product, without rejection. The bias is below
    /// `end / 2^64`.
    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    fn within(&mut self, range: &RangeInclusive<u32>) -> u64 {
        let (start, end) = (u64::from(*range.start()), u64::from(*range.end()));
        start + self.below(end.saturating_sub(start) + 1)
    }

    fn index(&mut self, length: usize) -> usize {
        self.below(length.max(1) as u64) as usize
    }
}

/// A prompt prefix: its length in tokens, and the ids of its full blocks.
#[derive(Clone, Default)]
struct Prefix {
    tokens: u64,
    blocks: Vec<u64>,
}

impl Prefix {
    /// The first `tokens` of the prefix, without the id of a partial block: a branch continues it with other tokens.
    fn up_to(&self, tokens: u64, block_tokens: u64) -> Self {
        let full = usize::try_from(tokens / block_tokens).unwrap_or(usize::MAX);
        Self {
            tokens,
            blocks: self.blocks[..full.min(self.blocks.len())].to_vec(),
        }
    }
}

#[derive(Clone, Default)]
struct Conversation {
    prefix: Prefix,
    /// Tokens before each turn, the first included: the positions at which a branch may start.
    turns: Vec<u64>,
}

struct GeneratedWorkload<'a> {
    shape: &'a Shape,
    block_tokens: u64,
    random: SplitMix64,
    next_block: u64,
    system_prompts: Vec<Prefix>,
    conversations: Vec<Conversation>,
}

impl<'a> GeneratedWorkload<'a> {
    fn new(shape: &'a Shape, seed: u64) -> Self {
        let mut workload = Self {
            shape,
            block_tokens: u64::from(shape.block_tokens.max(1)),
            random: SplitMix64(seed),
            next_block: 0,
            system_prompts: Vec::new(),
            conversations: Vec::new(),
        };
        for _ in 0..shape.system_prompts {
            let tokens = workload.random.within(&shape.system_tokens);
            let mut prefix = Prefix::default();
            workload.extend(&mut prefix, tokens);
            workload.system_prompts.push(prefix);
        }
        workload
    }

    fn requests(mut self) -> Vec<TraceRequest> {
        let count = u64::from(self.shape.requests).min(REQUESTS_MAX);
        let gap_us = u64::from(self.shape.span_ms) * 1_000 / count.max(1);
        let mut timestamp_us = 0;
        (0..count)
            .map(|_| {
                let request = self.turn(timestamp_us);
                timestamp_us += self.random.below(2 * gap_us + 1);
                request
            })
            .collect()
    }

    /// Generates the next turn of a random conversation.
    fn turn(&mut self, timestamp_us: u64) -> TraceRequest {
        let live = self.shape.conversations.max(1) as usize;
        let mut place = self.random.index(live);
        if place >= self.conversations.len() {
            place = self.conversations.len();
            let conversation = self.begin();
            self.conversations.push(conversation);
        }
        let user_tokens = self.random.within(&self.shape.user_tokens);
        if self.is_over(&self.conversations[place], user_tokens) {
            self.conversations[place] = self.begin();
            if self.is_over(&self.conversations[place], user_tokens) {
                self.conversations[place] = self.at_system_prompt();
            }
        }
        let mut conversation = std::mem::take(&mut self.conversations[place]);
        conversation.turns.push(conversation.prefix.tokens);
        self.extend(&mut conversation.prefix, user_tokens);
        let request = TraceRequest {
            timestamp_us,
            input_tokens: conversation.prefix.tokens,
            output_tokens: self.random.within(&self.shape.output_tokens),
            blocks: conversation.prefix.blocks.clone(),
        };
        self.extend(&mut conversation.prefix, request.output_tokens);
        self.conversations[place] = conversation;
        request
    }

    fn is_over(&self, conversation: &Conversation, user_tokens: u64) -> bool {
        let longest = u64::from(self.shape.prompt_tokens_max);
        conversation.turns.len() as u64 >= u64::from(self.shape.turns_max)
            || conversation.prefix.tokens + user_tokens > longest
    }

    fn begin(&mut self) -> Conversation {
        let branch = self.random.below(100) < u64::from(self.shape.branch_percent);
        let place = self.random.index(self.conversations.len());
        match self.conversations.get(place) {
            Some(parent) if branch && !parent.turns.is_empty() => {
                let turn = self.random.index(parent.turns.len());
                Conversation {
                    prefix: parent.prefix.up_to(parent.turns[turn], self.block_tokens),
                    turns: parent.turns[..turn].to_vec(),
                }
            }
            _ => self.at_system_prompt(),
        }
    }

    fn at_system_prompt(&mut self) -> Conversation {
        let place = self.random.index(self.system_prompts.len());
        Conversation {
            prefix: self.system_prompts.get(place).cloned().unwrap_or_default(),
            turns: Vec::new(),
        }
    }

    /// Appends tokens that no other prefix has.
    fn extend(&mut self, prefix: &mut Prefix, tokens: u64) {
        prefix.tokens += tokens;
        let full = prefix.tokens / self.block_tokens;
        while (prefix.blocks.len() as u64) < full {
            prefix.blocks.push(self.next_block);
            self.next_block += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The first outputs for seed 1234567, as published with the reference implementation.
        let mut random = SplitMix64(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn a_seed_means_the_same_trace_everywhere() {
        let trace = generate(&Shape::default(), 7);
        assert_eq!(trace, generate(&Shape::default(), 7));
        assert_eq!(trace.name, "builtin-7");
        assert_eq!(
            trace.digest,
            "blake3:4c3041b52a2ff281b1e37bb6b322e8f3816034cc77c63a3a89147ea287a93883"
        );
        assert_ne!(trace.digest, generate(&Shape::default(), 8).digest);
    }

    #[test]
    fn the_default_shape_matches_its_documentation() {
        let trace = generate(&Shape::default(), 7);
        assert_eq!((trace.requests.len(), trace.block_tokens), (400, 16));
        let lengths: Vec<u64> = trace.requests.iter().map(|r| r.input_tokens).collect();
        let (min, max) = (lengths.iter().min(), lengths.iter().max());
        assert!(min.is_some_and(|min| (500..1_500).contains(min)), "{min:?}");
        assert!(
            max.is_some_and(|max| (6_000..=8_192).contains(max)),
            "{max:?}"
        );
        assert!(trace.requests.is_sorted_by_key(|r| r.timestamp_us));
        let last = trace.requests.last().map(|r| r.timestamp_us);
        assert!(
            last.is_some_and(|us| (15_000_000..25_000_000).contains(&us)),
            "{last:?}"
        );
        for request in &trace.requests {
            assert_eq!(request.blocks.len() as u64, request.input_tokens / 16);
        }
    }

    #[test]
    fn an_id_has_one_parent_and_prefixes_are_shared() {
        let trace = generate(&Shape::default(), 7);
        let mut parents = HashMap::new();
        let mut children: HashMap<_, HashSet<_>> = HashMap::new();
        let (mut seen, mut hits, mut all) = (HashSet::new(), 0, 0);
        for request in &trace.requests {
            let mut parent = None;
            for id in &request.blocks {
                assert_eq!(*parents.entry(*id).or_insert(parent), parent, "{id}");
                children.entry(parent).or_default().insert(*id);
                parent = Some(*id);
                all += 1;
                hits += usize::from(!seen.insert(*id));
            }
        }
        assert_eq!(children[&None].len(), 4, "every system prompt is used");
        let forks = children.values().filter(|ids| ids.len() > 1).count();
        assert!(forks > 10, "{forks}");
        assert!(hits * 2 > all && hits < all, "{hits} of {all}");
    }

    #[test]
    fn a_shape_of_nothing_is_still_a_trace() {
        let shape = Shape {
            block_tokens: 0,
            requests: 3,
            conversations: 0,
            system_prompts: 0,
            system_tokens: 0..=0,
            user_tokens: RangeInclusive::new(2, 1),
            output_tokens: 0..=0,
            prompt_tokens_max: 0,
            turns_max: 0,
            branch_percent: 1_000,
            span_ms: 0,
        };
        let trace = generate(&shape, 0);
        assert_eq!(trace.block_tokens, 1);
        assert!(
            trace
                .requests
                .iter()
                .all(|r| r.input_tokens == 2 && r.timestamp_us == 0)
        );
        let none = Shape {
            requests: 0,
            ..shape
        };
        assert!(generate(&none, 0).requests.is_empty());
    }
}
