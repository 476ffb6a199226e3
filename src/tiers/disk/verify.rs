//! Reads listed pages and compares them with the checksums of their headers.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::buffer::AlignedBuffer;
use super::files::DiskFile;
use super::format::{BlockHeader, SetFile, SetKeys};
use super::set::Segments;

/// Bytes of one read, unless a page is larger.
const READ_BYTES: u64 = 4 << 20;

/// Why a page cannot be served.
#[derive(Debug)]
pub(super) enum PageFault {
    /// The disk does not read it.
    Unreadable(io::Error),
    /// Its bytes are not those that its header describes.
    Checksum,
}

/// Finds the file of a segment of a disk.
pub(super) type SegmentOf<'a> = dyn Fn(usize, u32) -> io::Result<Arc<dyn DiskFile>> + 'a;

/// The file of a segment that is open.
pub(super) fn segment_of(
    segments: &[Segments],
    disk: usize,
    segment: u32,
) -> io::Result<Arc<dyn DiskFile>> {
    let of_disk = segments.get(disk);
    let place = of_disk.and_then(|of_disk| of_disk.get(segment as usize));
    let file = place.and_then(Clone::clone);
    file.ok_or_else(|| io::Error::other(format!("there is no segment {segment}")))
}

/// Verifies the pages of one set.
#[derive(Debug)]
pub(super) struct Verifier {
    file: SetFile,
    keys: SetKeys,
    buffer: AlignedBuffer,
}

impl Verifier {
    pub(super) fn new(file: &SetFile) -> Self {
        Self {
            file: *file,
            keys: SetKeys::new(file.set, file.shard),
            buffer: AlignedBuffer::new(0),
        }
    }

    /// Verifies the pages of a block whose indices are in `pages`. Calls `bad` with the index of each one that cannot be
    /// served, in order.
    pub(super) fn verify(
        &mut self,
        segment_of: &SegmentOf<'_>,
        (start, block): (u32, &BlockHeader),
        pages: Range<usize>,
        bad: &mut dyn FnMut(usize, PageFault),
    ) {
        let geometry = self.file.geometry;
        let stride = geometry.stride as usize;
        let most = (READ_BYTES / geometry.stride).max(1);
        let mut index = pages.start;
        let (first, count) = (start + pages.start as u32, pages.len() as u32);
        for extent in geometry.extents(first, count) {
            let (mut at, mut left) = (extent.at, u64::from(extent.pages));
            while left > 0 {
                let now = left.min(most) as usize;
                let mut bytes = std::mem::replace(&mut self.buffer, AlignedBuffer::new(0));
                if bytes.bytes().len() < now * stride {
                    bytes = AlignedBuffer::new(now * stride);
                }
                let part = &mut bytes.bytes_mut()[..now * stride];
                let file = segment_of(extent.disk, extent.segment);
                let whole = file.as_ref().is_ok_and(|file| file.read(part, at).is_ok());
                for page in part.chunks_exact_mut(stride) {
                    // One page that the disk does not read must not hide the others.
                    let read = match (&file, whole) {
                        (_, true) => Ok(()),
                        (Ok(file), false) => file.read(page, at),
                        (Err(error), false) => Err(io::Error::other(error.to_string())),
                    };
                    match read {
                        Err(error) => bad(index, PageFault::Unreadable(error)),
                        Ok(()) if !self.matches(block, index, page) => {
                            bad(index, PageFault::Checksum);
                        }
                        Ok(()) => {}
                    }
                    index += 1;
                    at += geometry.stride;
                }
                left -= now as u64;
                self.buffer = bytes;
            }
        }
    }

    fn matches(&self, block: &BlockHeader, index: usize, page: &[u8]) -> bool {
        let (Some(listed), Ok(place)) = (block.pages.get(index), u16::try_from(index)) else {
            return false;
        };
        let bytes = &page[..self.file.geometry.page_bytes as usize];
        self.keys.page_sum(&block.place(place, listed), bytes) == listed.sum
    }
}
