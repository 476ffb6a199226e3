//! Why a trace could not be read. Each error names the file, the line and what to do.

use std::fmt;
use std::path::PathBuf;

use super::line::{TIMESTAMP_MS_MAX, TOKENS_MAX};
#[cfg(doc)]
use super::read::ZSTD_WINDOW_LOG_MAX;
use super::read::{BLOCKS_MAX, DECODED_BYTES_MAX, LINE_BYTES_MAX, REQUESTS_MAX};

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file is missing, or it may not be opened.
    #[error("{}: cannot open this trace: {cause}", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// Reading or decompressing failed midway.
    #[error("{}: cannot read on after line {line}: {cause}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Lines that were read before.
        line: u64,
        /// What the system or the decompressor said.
        cause: std::io::Error,
    },
    /// The compressed stream is damaged, or needs a zstd window above [`ZSTD_WINDOW_LOG_MAX`].
    #[error(
        "{}: cannot decompress this {format} stream after line {line}: {cause}",
        path.display()
    )]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// Lines that were read before.
        line: u64,
        /// `zstd` or `gzip`.
        format: &'static str,
        /// What the decompressor said.
        cause: std::io::Error,
    },
    /// The compressed stream ends before its end mark: an incomplete download, say.
    #[error("{}: the {format} stream ends too early, after line {line}: fetch the file again", path.display())]
    Truncated {
        /// Which file.
        path: PathBuf,
        /// Lines that were read before.
        line: u64,
        /// `zstd` or `gzip`.
        format: &'static str,
    },
    /// One line is no request.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: LineError,
    },
    /// The trace holds more than is taken.
    #[error(
        "{}, line {line}: this trace is too large: at most {REQUESTS_MAX} requests, {BLOCKS_MAX} \
         hash ids and {DECODED_BYTES_MAX} bytes are read",
        path.display()
    )]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// The line that was too much, from 1.
        line: u64,
    },
    /// Not one request.
    #[error("{}: this trace has no request", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// The caller asked for no request at all.
    #[error("{}: the limit is 0 requests: ask for at least one, or for no limit", path.display())]
    LimitZero {
        /// Which file.
        path: PathBuf,
    },
    /// The caller gave no size of a block.
    #[error("--trace-block-tokens is 0: a block holds at least one token; traces use 16 to 512")]
    ZeroBlock,
}

/// What is wrong with one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It is longer than [`LINE_BYTES_MAX`].
    #[error("longer than {LINE_BYTES_MAX} bytes: one request a line, ended by a line feed")]
    TooLong,
    /// It is not text.
    #[error("not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// It is not JSON.
    #[error("not JSON: {reason} at column {column}")]
    NotJson {
        /// Where, in bytes from 1.
        column: usize,
        /// What the parser said.
        reason: String,
    },
    /// It is JSON, but no object of the expected fields and types.
    #[error("{0}")]
    Field(String),
    /// The time lies beyond [`TIMESTAMP_MS_MAX`].
    #[error("'timestamp' is {0}: at most {TIMESTAMP_MS_MAX} ms are taken")]
    TooLate(String),
    /// A length lies beyond [`TOKENS_MAX`].
    #[error("'{field}' is {tokens}: at most {TOKENS_MAX} tokens are taken")]
    TooManyTokens {
        /// Which field.
        field: &'static str,
        /// Its value.
        tokens: u64,
    },
    /// The number of hash ids does not follow from the length of the prompt.
    #[error("{0}")]
    BlockCount(BlockCount),
}

/// A number of hash ids that does not follow from the length of the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCount {
    /// Hash ids on the line.
    pub found: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of a block, as the caller gave them.
    pub block_tokens: u32,
    /// The smallest power of two that fits every line of the file, if there is one.
    pub suggestion: Option<u32>,
}

impl fmt::Display for BlockCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = u64::from(self.block_tokens.max(1));
        let (floor, ceil) = (self.input_tokens / block, self.input_tokens.div_ceil(block));
        write!(f, "'hash_ids' has {} ids, expected {floor}", self.found)?;
        if ceil != floor {
            write!(f, " or {ceil}")?;
        }
        write!(
            f,
            " for 'input_length' {} at {} tokens a block",
            self.input_tokens, self.block_tokens
        )?;
        match self.suggestion {
            Some(tokens) => write!(f, ": --trace-block-tokens {tokens} fits every line"),
            None => {
                f.write_str(": one id stands for one block, the last one also for a part of it")
            }
        }
    }
}
