//! Pages whose place on the disk failed.

use std::io;
use std::sync::Arc;

use super::super::super::faults::is_of_a_place;
use super::{Job, Operation, Part};

impl Job {
    /// Reads or writes the pages of a part again, one by one, up to the first one that fails: its place is noted, and the
    /// others of the part are none the worse. Returns the number of pages before it, and its error.
    pub(super) fn page_by_page(&self, part: Part, buffer: &mut [u8]) -> (u32, Option<io::Error>) {
        let set = &self.copy.set;
        let stride = set.geometry().stride;
        let mut done = 0;
        let mut pages = buffer.chunks_exact_mut(stride as usize);
        for extent in set.geometry().extents(part.disk, part.pages) {
            let file = match set.segment(extent.disk, extent.segment) {
                Ok(file) => file,
                Err(error) => return (done, Some(error)),
            };
            for index in 0..u64::from(extent.pages) {
                let operation = Operation {
                    file: Arc::clone(&file),
                    at: extent.at + index * stride,
                    bytes: 0..stride as usize,
                };
                let page = pages.next().unwrap_or_default();
                if let Err(error) = operation.carry_out(self.write, page) {
                    if is_of_a_place(&error) {
                        self.place_failed(part.first + done as usize, part.disk + done);
                    }
                    return (done, Some(error));
                }
                done += 1;
            }
        }
        (done, None)
    }

    /// Notes that the place of a page failed.
    pub(super) fn place_failed(&self, index: usize, page: u32) {
        self.copy.set.faulty.note(page);
        let mut progress = self.progress();
        progress.faulty = Some(progress.faulty.map_or(index, |first| first.min(index)));
    }
}
