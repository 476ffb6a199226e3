//! The frames of a recording: their bytes, order and checksums. `docs/recording.md` describes them.

use std::io::{self, Read};

use flate2::Crc;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use kvferry_protocol::limits::DEPTH_MAX;

/// First bytes of a recording.
const MAGIC: [u8; 8] = *b"KVFCALLS";
/// The only version of the format.
pub const FORMAT: u32 = 1;
/// Longest frame, without its head.
const FRAME_BYTES_MAX: u32 = 16 << 20;
/// Bytes of a frame before its body.
const HEAD_BYTES: usize = 25;
/// Bytes of a file before its first frame.
const START_BYTES: u64 = 12;

/// Why a file cannot be read as a recording.
#[derive(Debug, thiserror::Error)]
pub enum CallsError {
    /// The file cannot be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// The file is something else.
    #[error("no recording of calls: it does not begin with KVFCALLS")]
    Foreign,
    /// The file has another version of the format.
    #[error(
        "version {0} of the format, this program reads {FORMAT}: use the kvferry that recorded it"
    )]
    Version(u32),
    /// Bytes of the file were changed, or it was not written by kvferry.
    #[error("frame {frame}, at byte {offset}, is damaged: {why}")]
    Damaged {
        /// Number of the frame.
        frame: u64,
        /// Where the frame begins.
        offset: u64,
        /// What is wrong with it.
        why: String,
    },
    /// More than a replay keeps in memory.
    #[error(
        "frame {frame}: the recording has more than {max} {what}, which no replay keeps in memory: record less"
    )]
    TooMany {
        /// Number of the frame.
        frame: u64,
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        max: u64,
    },
    /// The recording ends before its first request can be replayed.
    #[error("the recording has no header: its engine ended at once")]
    Empty,
}

/// How a recording ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// With an end mark.
    Marked(EndReason, String),
    /// After a whole frame, without an end mark: the engine was killed, or still runs.
    Unmarked,
    /// Within a frame, of which so many bytes are there.
    Cut(u64),
}

/// The reason in an end mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The engine ended.
    Closed,
    /// The file had its largest size.
    Full,
    /// The disk was slower than the engine.
    Slow,
    /// The disk failed.
    Disk,
    /// Something could not be recorded.
    Fault,
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Marked(EndReason::Closed, _) => f.write_str("with the engine"),
            Self::Marked(reason, text) => {
                let reason = match reason {
                    EndReason::Closed | EndReason::Fault => "fault",
                    EndReason::Full => "full",
                    EndReason::Slow => "too slow",
                    EndReason::Disk => "disk",
                };
                write!(f, "early ({reason}: {text})")
            }
            Self::Unmarked => {
                f.write_str("without an end mark: the engine was killed, or still runs")
            }
            Self::Cut(bytes) => write!(
                f,
                "within a frame, of which {bytes} bytes are there: the file was cut"
            ),
        }
    }
}

/// Kinds of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Sizes and settings of the engine.
    Header,
    /// The engine calls a hook.
    Call,
    /// A hook returns.
    Return,
    /// A request to the leader.
    Request,
    /// The answer of a request.
    Answer,
    /// A request has no answer.
    Failure,
    /// Sizes of a leader.
    Leader,
}

/// A frame.
#[derive(Debug)]
pub struct Frame<'a> {
    /// Frames before this one.
    pub number: u64,
    /// Its kind.
    pub kind: FrameKind,
    offset: u64,
    body: &'a [u8],
}

impl Frame<'_> {
    /// Decodes the fields.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, CallsError> {
        let mut reader = rmp_serde::Deserializer::new(self.body);
        reader.set_max_depth(DEPTH_MAX);
        let fields =
            T::deserialize(&mut reader).map_err(|error| self.damaged(error.to_string()))?;
        match reader.get_ref().len() {
            0 => Ok(fields),
            more => Err(self.damaged(format!("{more} bytes follow its fields"))),
        }
    }

    /// An error about this frame.
    pub fn damaged(&self, why: impl Into<String>) -> CallsError {
        CallsError::Damaged {
            frame: self.number,
            offset: self.offset,
            why: why.into(),
        }
    }
}

/// Reads the frames of a recording one after another, and keeps one at a time.
pub struct Frames<R> {
    source: R,
    next: u64,
    offset: u64,
    at_us: u64,
    body: Vec<u8>,
    ending: Option<Ending>,
}

impl<R: Read> Frames<R> {
    /// Reads the first bytes.
    pub fn new(mut source: R) -> Result<Self, CallsError> {
        let mut start = [0; START_BYTES as usize];
        if fill(&mut source, &mut start)? < start.len() || start[..8] != MAGIC {
            return Err(CallsError::Foreign);
        }
        let [.., a, b, c, d] = start;
        match u32::from_be_bytes([a, b, c, d]) {
            FORMAT => Ok(Self {
                source,
                next: 0,
                offset: START_BYTES,
                at_us: 0,
                body: Vec::new(),
                ending: None,
            }),
            other => Err(CallsError::Version(other)),
        }
    }

    /// How the recording ends, once [`Self::next`] has returned `None`.
    pub fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    /// Microseconds from the start of the recording to the last frame.
    pub fn at_us(&self) -> u64 {
        self.at_us
    }

    /// Reads the next frame; `None` at the end of the recording.
    pub fn next(&mut self) -> Result<Option<Frame<'_>>, CallsError> {
        if self.ending.is_some() {
            return Ok(None);
        }
        let mut head = [0; HEAD_BYTES];
        let there = fill(&mut self.source, &mut head)?;
        if there < head.len() {
            self.ending = Some(match there {
                0 => Ending::Unmarked,
                bytes => Ending::Cut(bytes as u64),
            });
            return Ok(None);
        }
        let (number, offset) = (self.next, self.offset);
        let damaged = |why: String| CallsError::Damaged {
            frame: number,
            offset,
            why,
        };
        let length = u32::from_be_bytes(part(&head, 0));
        if length > FRAME_BYTES_MAX {
            return Err(damaged(format!(
                "{length} bytes, a frame has at most {FRAME_BYTES_MAX}"
            )));
        }
        self.body.clear();
        let got = (&mut self.source)
            .take(length.into())
            .read_to_end(&mut self.body)?;
        if (got as u64) < u64::from(length) {
            self.ending = Some(Ending::Cut((HEAD_BYTES + got) as u64));
            return Ok(None);
        }
        let mut checksum = Crc::new();
        checksum.update(&head[..4]);
        checksum.update(&head[8..]);
        checksum.update(&self.body);
        if checksum.sum() != u32::from_be_bytes(part(&head, 4)) {
            return Err(damaged("its checksum is wrong".to_owned()));
        }
        let found = u64::from_be_bytes(part(&head, 8));
        if found != number {
            return Err(damaged(format!(
                "its number is {found}: frames are missing, or out of order"
            )));
        }
        self.at_us = u64::from_be_bytes(part(&head, 16));
        self.next += 1;
        self.offset += (HEAD_BYTES as u64) + u64::from(length);
        let kind = match head[24] {
            0 => FrameKind::Header,
            1 => FrameKind::Call,
            2 => FrameKind::Return,
            3 => FrameKind::Request,
            4 => FrameKind::Answer,
            5 => FrameKind::Failure,
            6 => FrameKind::Leader,
            7 => {
                self.end(number, offset)?;
                return Ok(None);
            }
            kind => return Err(damaged(format!("kind {kind} is unknown"))),
        };
        if (kind == FrameKind::Header) != (number == 0) {
            return Err(damaged(format!("{kind:?} is no kind of frame {number}")));
        }
        Ok(Some(Frame {
            number,
            kind,
            offset,
            body: &self.body,
        }))
    }

    fn end(&mut self, number: u64, offset: u64) -> Result<(), CallsError> {
        #[derive(Deserialize)]
        struct End(u8, String);
        let frame = Frame {
            number,
            kind: FrameKind::Call,
            offset,
            body: &self.body,
        };
        let End(reason, text) = frame.read()?;
        let reason = match reason {
            0 => EndReason::Closed,
            1 => EndReason::Full,
            2 => EndReason::Slow,
            3 => EndReason::Disk,
            4 => EndReason::Fault,
            other => return Err(frame.damaged(format!("reason {other} of an end mark is unknown"))),
        };
        if fill(&mut self.source, &mut [0])? > 0 {
            return Err(frame.damaged("bytes follow the end mark"));
        }
        self.ending = Some(Ending::Marked(reason, text));
        Ok(())
    }
}

/// Reads until the buffer is full or the source ends; returns the bytes that were read.
fn fill(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut there = 0;
    while there < buffer.len() {
        match source.read(&mut buffer[there..]) {
            Ok(0) => break,
            Ok(more) => there += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(there)
}

/// The bytes of a number in a head. Panics if they lie outside, as a slice does.
fn part<const N: usize>(head: &[u8; HEAD_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&head[at..at + N]);
    bytes
}
