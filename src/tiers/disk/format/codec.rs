//! Numbers in and out of bytes, and the envelope that small files share.
//!
//! ```text
//! offset  bytes  field
//!      0      8  magic
//!      8      4  version of the format
//!     12      4  reserved, 0
//!     16      8  bytes of the body
//!     24      8  checksum of the body and of the bytes before this field
//!     32         body, then zeros up to a multiple of 4 KiB
//! ```

use super::super::buffer::{AlignedBuffer, UNIT_BYTES};
use super::super::files::{DiskFile, Files};
use super::{FORMAT_VERSION, FormatError};
use std::hash::Hasher as _;
use std::io;

use twox_hash::XxHash3_64;

const ENVELOPE_BYTES: usize = 32;
const SUM_AT: usize = 24;

/// Appends numbers to bytes.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u128(&mut self, value: u128) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
}

/// Takes numbers from bytes.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(FormatError::Short)?;
        self.0 = rest;
        Ok(*field)
    }

    pub(super) fn u16(&mut self) -> Result<u16, FormatError> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FormatError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FormatError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self) -> Result<u128, FormatError> {
        self.take().map(u128::from_le_bytes)
    }
}

/// A checksum of several parts, in order.
pub(super) fn checksum(seed: u64, parts: &[&[u8]]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(seed);
    parts.iter().for_each(|part| hasher.write(part));
    hasher.finish()
}

/// Bytes of a file with a body of this many bytes.
pub(super) const fn file_bytes(body: u64) -> u64 {
    (body + ENVELOPE_BYTES as u64).next_multiple_of(UNIT_BYTES)
}

/// Puts a body into its envelope.
fn seal(magic: &[u8; 8], body: &[u8]) -> AlignedBuffer {
    let mut sealed = AlignedBuffer::new(file_bytes(body.len() as u64) as usize);
    let bytes = sealed.bytes_mut();
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    let sum = checksum(0, &[&bytes[..SUM_AT], body]);
    bytes[SUM_AT..ENVELOPE_BYTES].copy_from_slice(&sum.to_le_bytes());
    bytes[ENVELOPE_BYTES..ENVELOPE_BYTES + body.len()].copy_from_slice(body);
    sealed
}

/// The body of a sealed file.
fn open<'a>(magic: &[u8; 8], kind: &'static str, bytes: &'a [u8]) -> Result<&'a [u8], FormatError> {
    let mut reader = Reader(bytes);
    if reader.take::<8>()? != *magic {
        return Err(FormatError::Magic(kind));
    }
    let found = reader.u32()?;
    reader.u32()?;
    let len = reader.u64()?;
    let sum = reader.u64()?;
    let len = usize::try_from(len).map_err(|_| FormatError::Short)?;
    let body = reader.0.get(..len).ok_or(FormatError::Short)?;
    // Every version has this envelope. A damaged number is no other version.
    if checksum(0, &[&bytes[..SUM_AT], body]) != sum {
        return Err(FormatError::Checksum);
    }
    match found == FORMAT_VERSION {
        true => Ok(body),
        false => Err(FormatError::Version { found }),
    }
}

/// Replaces a sealed file. The new contents are durable when the call returns, and a crash leaves the old or the new
/// file.
pub(super) fn replace(
    files: &dyn Files,
    name: &str,
    magic: &[u8; 8],
    body: &[u8],
) -> io::Result<()> {
    let fresh = format!("{name}.new");
    if files.open(&fresh)?.is_some() {
        files.remove(&fresh)?;
    }
    let file = files.create(&fresh)?;
    file.write(seal(magic, body).bytes(), 0)?;
    file.sync()?;
    files.rename(&fresh, name)?;
    files.sync()
}

/// Reads a sealed file of at most `max` bytes; `None` if there is none.
pub(super) fn read(
    files: &dyn Files,
    name: &str,
    (magic, kind): (&[u8; 8], &'static str),
    max: u64,
) -> io::Result<Option<Result<Vec<u8>, FormatError>>> {
    let Some(file) = files.open(name)? else {
        return Ok(None);
    };
    let bytes = read_whole(file.as_ref(), max)?;
    Ok(Some(open(magic, kind, bytes.bytes()).map(<[u8]>::to_vec)))
}

/// Reads the whole units of a file, at most `max` bytes.
pub(super) fn read_whole(file: &dyn DiskFile, max: u64) -> io::Result<AlignedBuffer> {
    let len = file.bytes()?.min(max);
    let len = len - len % UNIT_BYTES;
    let mut bytes = AlignedBuffer::new(len as usize);
    file.read(bytes.bytes_mut(), 0)?;
    Ok(bytes)
}
