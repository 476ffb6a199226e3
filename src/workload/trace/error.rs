//! Errors of reading a trace. Each names the file, the line and the remedy.

use std::fmt;
use std::path::PathBuf;

#[cfg(doc)]
use super::limits::ZSTD_WINDOW_LOG_MAX;
use super::limits::{
    BLOCKS_MAX, DECODED_BYTES_MAX, LINE_BYTES_MAX, REQUESTS_MAX, TIMESTAMP_MS_MAX, TOKENS_MAX,
};

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file is missing or cannot be opened.
    #[error("{}: cannot open this trace: {cause}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// Reading or decompressing failed midway.
    #[error("{}: cannot read on after line {line}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Number of lines that were read before.
        line: u64,
        /// The error of the system or the decompressor.
        cause: std::io::Error,
    },
    /// The compressed stream is damaged, or needs a zstd window above [`ZSTD_WINDOW_LOG_MAX`].
    #[error(
        "{}: cannot decompress this {format} stream after line {line}: {cause}",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Number of lines that were read before.
        line: u64,
        /// `zstd` or `gzip`.
        format: &'static str,
        /// The decompressor's error.
        cause: std::io::Error,
    },
    /// The compressed stream ends before its end mark, for example after an incomplete download.
    #[error("{}: the {format} stream ends too early, after line {line}: fetch the file again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Number of lines that were read before.
        line: u64,
        /// `zstd` or `gzip`.
        format: &'static str,
    },
    /// A line is not a valid request.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: u64,
        /// The defect of the line.
        reason: LineError,
    },
    /// The trace exceeds [`REQUESTS_MAX`], [`BLOCKS_MAX`] or [`DECODED_BYTES_MAX`].
    #[error(
        "{}, line {line}: this trace is too large: at most {REQUESTS_MAX} requests, {BLOCKS_MAX} \
         hash ids and {DECODED_BYTES_MAX} bytes are read",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The line that exceeded the limit, from 1.
        line: u64,
    },
    /// The file contains no request.
    #[error("{}: this trace has no request", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The caller set a limit of 0 requests.
    #[error("{}: the limit is 0 requests: set at least one, or no limit", path.display())]
    LimitZero {
        /// The file.
        path: PathBuf,
    },
    /// The caller gave a block size of 0 tokens.
    #[error("--trace-block-tokens is 0: a block holds at least one token; traces use 16 to 512")]
    ZeroBlock,
}

/// The defect of one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line is longer than [`LINE_BYTES_MAX`].
    #[error("longer than {LINE_BYTES_MAX} bytes: one request a line, ended by a line feed")]
    TooLong,
    /// The line is not UTF-8. The value is the first invalid byte, from 1.
    #[error("not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// The line is not JSON.
    #[error("not JSON: {reason} at column {column}")]
    NotJson {
        /// The position of the error, in bytes from 1.
        column: usize,
        /// The parser's message.
        reason: String,
    },
    /// The line is JSON, but not an object of the expected fields and types.
    #[error("{0}")]
    Field(String),
    /// The time exceeds [`TIMESTAMP_MS_MAX`].
    #[error("'timestamp' is {0}: at most {TIMESTAMP_MS_MAX} ms are accepted")]
    TooLate(String),
    /// A length exceeds [`TOKENS_MAX`].
    #[error("'{field}' is {tokens}: at most {TOKENS_MAX} tokens are accepted")]
    TooManyTokens {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        tokens: u64,
    },
    /// The number of hash ids does not match the length of the prompt.
    #[error("{0}")]
    BlockCount(BlockCount),
}

/// A number of hash ids that does not match the length of the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCount {
    /// Hash ids on the line.
    pub found: u64,
    /// Length of the prompt, in tokens.
    pub input_tokens: u64,
    /// Tokens of a block, as given by the caller.
    pub block_tokens: u32,
    /// The smallest power of two, in tokens, that fits every line of the file; `None` if there is none, or if the file
    /// could not be read to its end.
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
