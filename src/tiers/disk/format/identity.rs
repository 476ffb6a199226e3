//! The file that says which disk of which tier a directory is.
//!
//! ```text
//! body: 16 id of the tier, random; 2 number of this disk, from 0 on; 2 number of disks
//! ```

use std::io;

use super::super::buffer::UNIT_BYTES;
use super::super::files::Files;
use super::FormatError;
use super::codec::{Reader, Writer, read, replace};

/// Name of the file.
pub const IDENTITY_NAME: &str = "disk";
const MAGIC: &[u8; 8] = b"KVFDISK\0";

/// Which disk of which tier a directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskIdentity {
    /// Random id of the tier, the same on all of its disks.
    pub tier: u128,
    /// Number of this disk.
    pub disk: u16,
    /// Number of disks.
    pub disks: u16,
}

impl DiskIdentity {
    /// Reads the file; `None` in a directory without one.
    ///
    /// # Errors
    ///
    /// The error of the file system, or what is wrong with the file.
    pub fn read(files: &dyn Files) -> io::Result<Option<Result<Self, FormatError>>> {
        let body = read(files, IDENTITY_NAME, (MAGIC, "disk identity"), UNIT_BYTES)?;
        Ok(body.map(|body| {
            let body = body?;
            let mut from = Reader(&body);
            Ok(Self {
                tier: from.u128()?,
                disk: from.u16()?,
                disks: from.u16()?,
            })
        }))
    }

    /// Writes the file. Durable when the call returns.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub fn write(&self, files: &dyn Files) -> io::Result<()> {
        let mut body = Writer::default();
        body.u128(self.tier);
        body.u16(self.disk);
        body.u16(self.disks);
        replace(files, IDENTITY_NAME, MAGIC, &body.0)
    }
}
