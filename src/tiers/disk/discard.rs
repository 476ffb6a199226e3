//! The places of pages that are not listed are given back to the disk.

use std::io;

use super::set::DiskSet;

impl DiskSet {
    /// Tells the disk that the places of pages that are not listed hold nothing of value, so that it can use them as spare
    /// room. Returns the bytes. The room stays reserved for the set's files.
    ///
    /// No copy may use the set meanwhile: a page would be lost that is written and not listed yet. Everything that is
    /// listed is made durable first: otherwise a start could find a header of pages that are gone, and count them as
    /// damaged.
    ///
    /// # Errors
    ///
    /// The error of the file system; [`io::ErrorKind::Unsupported`] from one that cannot discard.
    pub fn discard_free(&self) -> io::Result<u64> {
        self.flush()?;
        let mut bytes = 0;
        let geometry = *self.geometry();
        for run in self.table().free(self.capacity_pages()) {
            for extent in geometry.extents(run.start, run.count) {
                if let Some(file) = self.existing_segment(extent.disk, extent.segment) {
                    let of_extent = u64::from(extent.pages) * geometry.stride;
                    file.discard(extent.at, of_extent)?;
                    bytes += of_extent;
                }
            }
        }
        Ok(bytes)
    }
}
