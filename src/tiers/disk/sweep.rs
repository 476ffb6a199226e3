//! Sweeps: a segment that lists no page of a reset says so in its first region, by the number of the sweep. See
//! `format::marks`.

use std::io;

use super::buffer::AlignedBuffer;
use super::files::DiskFile;
use super::format::{Numbers, REGION_PAGES, Region, SetFile, Sweeps};

/// The first region of a segment of a disk.
pub(super) fn first_region(file: &SetFile, (disk, segment): (usize, u32)) -> u32 {
    let page = file.geometry.page_of(disk, segment, 0);
    u32::try_from(page).unwrap_or(u32::MAX) / REGION_PAGES
}

/// True for a segment that every sweep has written which is over: one of the two slots of its first region says so.
///
/// # Errors
///
/// The error of a disk that reads neither slot, nor the last one of the table: that tells nothing of the segment.
pub(super) fn is_swept(
    file: &SetFile,
    place: (usize, u32),
    segment: &dyn DiskFile,
    sweeps: Sweeps,
) -> io::Result<bool> {
    if sweeps.include(0) {
        return Ok(true);
    }
    let id = file.region_id(first_region(file, place));
    let mut slot = AlignedBuffer::new(file.geometry.slot_bytes as usize);
    let (mut read, mut failed) = (false, None);
    for number in 0..2 {
        let at = number * file.geometry.slot_bytes;
        match segment.read(slot.bytes_mut(), at) {
            Ok(()) => read = true,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => continue,
            Err(error) => {
                failed = Some(error);
                continue;
            }
        }
        if let Ok(Some(region)) = Region::decode(id, slot.bytes())
            && sweeps.include(region.numbers.sweep)
        {
            return Ok(true);
        }
    }
    let last = file.geometry.table_bytes() - file.geometry.slot_bytes;
    match failed.filter(|_| !read) {
        Some(error) if segment.read(slot.bytes_mut(), last).is_err() => Err(error),
        _ => Ok(false),
    }
}

/// Writes the number of a sweep into a segment without headers.
pub(super) fn write_sweep(
    file: &SetFile,
    place: (usize, u32),
    segment: &dyn DiskFile,
    sweep: u32,
) -> io::Result<()> {
    let id = file.region_id(first_region(file, place));
    let mut slots = AlignedBuffer::new(2 * file.geometry.slot_bytes as usize);
    // Any later write of the region counts more.
    let numbers = Numbers {
        sweep,
        ..Numbers::default()
    };
    for slot in slots
        .bytes_mut()
        .chunks_exact_mut(file.geometry.slot_bytes as usize)
    {
        Region::encode(id, numbers, std::iter::empty(), slot).map_err(io::Error::other)?;
    }
    segment.write(slots.bytes(), 0)
}
