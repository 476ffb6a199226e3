//! Traces that keep both directions busy: most prompts begin with the start of an earlier one, about half of their
//! length, and continue with new blocks. All prompts together exceed the host memory.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::json;

/// Prompts of one replay.
const PROMPTS: u64 = 100;
/// Blocks of the longest prompt.
const BLOCKS_MAX: usize = 64;
/// Number of earlier prompts whose start new prompts can share.
const RECENT: usize = 24;
/// Hash ids of one replay. Replays share no ids.
const IDS: u64 = PROMPTS * BLOCKS_MAX as u64;

/// Writes the trace of the replay with this number. Each hash id stands for `block_tokens` tokens.
pub(super) fn write(path: &Path, number: u64, block_tokens: u64) -> Result<(), String> {
    let text = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = BufWriter::new(File::create(path).map_err(text)?);
    let mut rng = fastrand::Rng::with_seed(number);
    let mut ids = number * IDS..;
    let mut recent: Vec<Vec<u64>> = Vec::new();
    for _ in 0..PROMPTS {
        let length = rng.usize(BLOCKS_MAX / 8..=BLOCKS_MAX);
        let mut prompt = match recent.is_empty() || rng.u8(0..10) < 2 {
            true => Vec::new(),
            false => recent[rng.usize(0..recent.len())].clone(),
        };
        prompt.truncate(rng.usize(length / 4..=length));
        prompt.extend(ids.by_ref().take(length - prompt.len()));
        let line = json!({
            "timestamp": 0,
            "input_length": length as u64 * block_tokens,
            "output_length": 1,
            "hash_ids": prompt,
        });
        writeln!(file, "{line}").map_err(text)?;
        if recent.len() == RECENT {
            recent.swap_remove(rng.usize(0..RECENT));
        }
        recent.push(prompt);
    }
    file.flush().map_err(text)
}
