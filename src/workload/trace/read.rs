//! Reads a trace from a file: JSON lines, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::error::BlockCount;
use super::limits::{
    BLOCKS_MAX, DECODED_BYTES_MAX, LINE_BYTES_MAX, REQUESTS_MAX, SUGGESTED_TOKENS_MAX,
    ZSTD_WINDOW_LOG_MAX,
};
use super::line::{self, Line};
use super::{LineError, Trace, TraceError, TraceRequest};

const BUFFER_BYTES: usize = 256 << 10;
const MAGIC_BYTES: u64 = 4;

/// Reads a trace whose hash ids stand for `block_tokens` tokens each.
///
/// The file holds one JSON object a line with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and
/// `hash_ids`, one for each block of the prompt; the last may stand for a partial block, which is left out because it
/// cannot be cached. Unknown fields and blank lines are skipped. Compression (zstd, gzip) is recognised by content.
///
/// The whole file is read and checked before `limit` keeps only the first requests in order of time.
///
/// # Errors
///
/// See [`TraceError`]. A file with an invalid line is rejected as a whole.
pub fn read(path: &Path, block_tokens: u32, limit: Option<usize>) -> Result<Trace, TraceError> {
    if block_tokens == 0 {
        return Err(TraceError::ZeroBlock);
    }
    if limit == Some(0) {
        return Err(TraceError::LimitZero {
            path: path.to_owned(),
        });
    }
    let file = File::open(path).map_err(|cause| TraceError::Open {
        path: path.to_owned(),
        cause,
    })?;
    let (source, format) = decoder(file).map_err(|cause| TraceError::Read {
        path: path.to_owned(),
        line: 0,
        cause,
    })?;
    let mut reader = Reader {
        path,
        format,
        lines: source,
        line: 0,
        bytes: 0,
        blocks: 0,
    };
    let mut requests = reader.requests(block_tokens)?;
    requests.sort_by_key(|request| request.timestamp_us);
    requests.truncate(limit.unwrap_or(usize::MAX));
    Ok(Trace::new(name_of(path), block_tokens, requests))
}

/// The file name without the endings `.zst`, `.gz`, `.jsonl` and `.json`: `chat.jsonl.zst` is `chat`.
fn name_of(path: &Path) -> String {
    let mut name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned();
    for ending in [".zst", ".gz", ".jsonl", ".json"] {
        if let Some(stem) = name.strip_suffix(ending).filter(|stem| !stem.is_empty()) {
            name.truncate(stem.len());
        }
    }
    name
}

type Source = Box<dyn BufRead>;

/// Returns the decompressed bytes, and the name of the compression; `None` for a plain file.
fn decoder(mut file: File) -> io::Result<(Source, Option<&'static str>)> {
    let mut magic = Vec::new();
    file.by_ref().take(MAGIC_BYTES).read_to_end(&mut magic)?;
    let is_zstd = match magic.as_slice() {
        [0x28, 0xb5, 0x2f, 0xfd] => true,
        [first, 0x2a, 0x4d, 0x18] => first & 0xf0 == 0x50,
        _ => false,
    };
    let is_gzip = magic.starts_with(&[0x1f, 0x8b]);
    let whole = io::Cursor::new(magic).chain(file);
    if is_zstd {
        let mut decoder = zstd::stream::read::Decoder::new(whole)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        Ok((buffered(decoder), Some("zstd")))
    } else if is_gzip {
        let decoder = MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, whole));
        Ok((buffered(decoder), Some("gzip")))
    } else {
        Ok((buffered(whole), None))
    }
}

fn buffered(source: impl Read + 'static) -> Source {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, source))
}

struct Reader<'a> {
    path: &'a Path,
    format: Option<&'static str>,
    lines: Source,
    line: u64,
    bytes: u64,
    blocks: u64,
}

impl Reader<'_> {
    /// Returns all requests in the order of the file, or the first error.
    fn requests(&mut self, block_tokens: u32) -> Result<Vec<TraceRequest>, TraceError> {
        let mut requests = Vec::new();
        let mut buffer = Vec::new();
        let mut sizes = Sizes::default();
        while let Some(line) = self.next_line(&mut buffer)? {
            let line = line::parse(line).map_err(|reason| self.bad_line(reason))?;
            let found = line.hash_ids.len() as u64;
            sizes.see(line.input_tokens, found);
            if !fits(line.input_tokens, found, block_tokens) {
                return Err(self.wrong_count(&line, block_tokens, sizes, &mut buffer));
            }
            self.blocks += found;
            if requests.len() as u64 >= REQUESTS_MAX || self.blocks > BLOCKS_MAX {
                return Err(self.too_large());
            }
            requests.push(request(line, block_tokens));
        }
        if requests.is_empty() {
            return Err(TraceError::Empty {
                path: self.path.to_owned(),
            });
        }
        Ok(requests)
    }

    /// The next line that is not blank, without its line feed; `None` at the end of the file.
    fn next_line<'b>(&mut self, buffer: &'b mut Vec<u8>) -> Result<Option<&'b [u8]>, TraceError> {
        loop {
            buffer.clear();
            let most = LINE_BYTES_MAX as u64 + 1;
            let taken = match self.lines.by_ref().take(most).read_until(b'\n', buffer) {
                Ok(0) => return Ok(None),
                Ok(taken) => taken as u64,
                Err(cause) => return Err(self.bad_stream(cause)),
            };
            self.line += 1;
            self.bytes += taken;
            if self.bytes > DECODED_BYTES_MAX {
                return Err(self.too_large());
            }
            if buffer.last() == Some(&b'\n') {
                buffer.pop();
            } else if taken == most {
                return Err(self.bad_line(LineError::TooLong));
            }
            if !buffer.iter().all(u8::is_ascii_whitespace) {
                return Ok(Some(buffer));
            }
        }
    }

    /// The error for a wrong number of hash ids. Reads on to the end of the file, to suggest a size that fits every
    /// line.
    fn wrong_count(
        &mut self,
        line: &Line,
        block_tokens: u32,
        mut sizes: Sizes,
        buffer: &mut Vec<u8>,
    ) -> TraceError {
        let error = |suggestion| {
            LineError::BlockCount(BlockCount {
                found: line.hash_ids.len() as u64,
                input_tokens: line.input_tokens,
                block_tokens,
                suggestion,
            })
        };
        let at = self.line;
        let mut readable = true;
        while sizes.any() && readable {
            match self.next_line(buffer).map(|next| next.map(line::parse)) {
                Ok(Some(Ok(next))) => sizes.see(next.input_tokens, next.hash_ids.len() as u64),
                Ok(None) => break,
                Ok(Some(Err(_))) | Err(_) => readable = false,
            }
        }
        TraceError::Line {
            path: self.path.to_owned(),
            line: at,
            reason: error(sizes.smallest().filter(|_| readable)),
        }
    }

    fn bad_line(&self, reason: LineError) -> TraceError {
        TraceError::Line {
            path: self.path.to_owned(),
            line: self.line,
            reason,
        }
    }

    fn too_large(&self) -> TraceError {
        TraceError::TooLarge {
            path: self.path.to_owned(),
            line: self.line,
        }
    }

    fn bad_stream(&self, cause: io::Error) -> TraceError {
        let (path, line) = (self.path.to_owned(), self.line);
        match self.format {
            None => TraceError::Read { path, line, cause },
            Some(format) if cause.kind() == io::ErrorKind::UnexpectedEof => {
                TraceError::Truncated { path, line, format }
            }
            Some(format) => TraceError::Damaged {
                path,
                line,
                format,
                cause,
            },
        }
    }
}

fn request(line: Line, block_tokens: u32) -> TraceRequest {
    let mut blocks = line.hash_ids;
    let full = line.input_tokens / u64::from(block_tokens);
    blocks.truncate(usize::try_from(full).unwrap_or(usize::MAX));
    blocks.shrink_to_fit();
    TraceRequest {
        timestamp_us: line.timestamp_us,
        input_tokens: line.input_tokens,
        output_tokens: line.output_tokens,
        blocks,
    }
}

/// Whether `ids` counts the full blocks of a prompt, with or without a final partial one.
fn fits(input_tokens: u64, ids: u64, block_tokens: u32) -> bool {
    let block = u64::from(block_tokens);
    (input_tokens / block..=input_tokens.div_ceil(block)).contains(&ids)
}

/// The powers of two, up to [`SUGGESTED_TOKENS_MAX`], that fit every line so far, as bits.
#[derive(Debug, Clone, Copy)]
struct Sizes(u32);

impl Default for Sizes {
    fn default() -> Self {
        Self((SUGGESTED_TOKENS_MAX << 1) - 1)
    }
}

impl Sizes {
    fn see(&mut self, input_tokens: u64, ids: u64) {
        for log in 0..=SUGGESTED_TOKENS_MAX.ilog2() {
            if !fits(input_tokens, ids, 1 << log) {
                self.0 &= !(1 << log);
            }
        }
    }

    fn any(self) -> bool {
        self.0 != 0
    }

    fn smallest(self) -> Option<u32> {
        self.any().then(|| 1 << self.0.trailing_zeros())
    }
}

#[cfg(test)]
mod tests;
