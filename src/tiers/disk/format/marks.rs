//! Marks of resets: what a reset removes, kept until no header can list it any longer.
//!
//! Marks are dropped after a *sweep*: the headers of every segment of the shard were written without the pages of the marks.
//! A segment that was moved away meanwhile, and is put back later, still lists them. So sweeps have numbers. A sweep notes its
//! number here, writes it into each segment, and is over when both are durable. Only segments with the number of the last
//! sweep that is over, or of one that began after it, are used.
//!
//! ```text
//! body: 4 number of marks, then of each:
//!       1 kind: 0 everything, 1 a namespace, 2 pages of a namespace; 8 epoch and 8 id of the last store that it covers;
//!       8 namespace (kinds 1 and 2); 4 number of pages, and 16 fingerprint of each (kind 2)
//!       4 number of the last sweep that is over, 4 number of the last sweep that began. Earlier programs end before these,
//!       and read no further: 0 and 0, with which every segment is used.
//! ```

use std::io;

use kvferry_types::{Epoch, Fingerprint, NamespaceId, PageSet, Scope, Stored, TransferId};

use super::super::buffer::UNIT_BYTES;
use super::super::files::Files;
use super::FormatError;
use super::codec::{Reader, Writer, file_bytes, read, replace};

/// Name of the file.
pub(in super::super) const MARKS_NAME: &str = "marks";
const MAGIC: &[u8; 8] = b"KVFMARKS";
/// Smallest limit of the file, in bytes: that of a small cap.
pub(super) const FILE_BYTES_MIN: u64 = 4 * UNIT_BYTES;
/// Largest limit of the file, in bytes: 4 million pages that resets named.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// One reset: everything in `scope` that was stored by `through` or before is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// What the reset covers.
    pub scope: Scope,
    /// The last store that it covers.
    pub through: Stored,
}

/// Numbers of sweeps.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Sweeps {
    /// The last one that is over.
    pub(in super::super) over: u32,
    /// The last one that began.
    pub(in super::super) begun: u32,
}

impl Sweeps {
    /// Numbers for a shard whose earlier ones are not known, or do not count: its earlier segments have other numbers.
    fn random() -> io::Result<Self> {
        let mut number = [0; 4];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
        // Far from the largest number, and not 0.
        let number = u32::from_le_bytes(number) >> 1 | 1;
        Ok(Self {
            over: number,
            begun: number,
        })
    }

    /// True for a segment with this number: every sweep that is over has written its headers.
    pub(in super::super) fn include(self, number: u32) -> bool {
        self.over == 0 || (self.over..=self.begun).contains(&number)
    }
}

/// The marks of a shard.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in super::super) struct Marks(Vec<Mark>, Sweeps);

impl Marks {
    /// No marks, for a shard that has no segments: one that is put back later is not used.
    pub(in super::super) fn anew() -> io::Result<Self> {
        Ok(Self(Vec::new(), Sweeps::random()?))
    }

    /// True if there is no mark.
    pub(in super::super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All marks.
    pub(in super::super) fn iter(&self) -> impl Iterator<Item = &Mark> {
        self.0.iter()
    }

    /// The sweeps.
    pub(in super::super) fn sweeps(&self) -> Sweeps {
        self.1
    }

    /// These marks, while another sweep runs: no number is used twice, because a sweep that is interrupted has written its
    /// number into some segments.
    pub(in super::super) fn with_sweep(mut self) -> io::Result<Self> {
        match self.1.begun {
            0 => self.1.begun = Sweeps::random()?.begun,
            begun => self.1.begun = begun.saturating_add(1),
        }
        Ok(self)
    }

    /// No marks, after the sweep that began last.
    pub(in super::super) fn swept(&self) -> Self {
        let begun = self.1.begun;
        Self(Vec::new(), Sweeps { over: begun, begun })
    }

    /// Adds a mark. Marks that would exceed `file_max` bytes are widened: the pages of a namespace to the namespace, then
    /// all to everything. A wider mark removes more, which costs hits and is never wrong.
    pub(in super::super) fn add(&mut self, mark: Mark, file_max: u64) {
        if !self.0.contains(&mark) {
            self.0.push(mark);
        }
        if self.file_bytes() <= file_max {
            return;
        }
        let namespaces = std::mem::take(&mut self.0).into_iter().map(|mark| Mark {
            scope: match mark.scope {
                Scope::Pages(namespace, _) => Scope::Namespace(namespace),
                wide => wide,
            },
            through: mark.through,
        });
        for mark in namespaces {
            match self.0.iter_mut().find(|held| held.scope == mark.scope) {
                Some(held) => held.through = held.through.max(mark.through),
                None => self.0.push(mark),
            }
        }
        if self.file_bytes() > file_max {
            let through = self.0.iter().map(|mark| mark.through).max();
            self.0 = vec![Mark {
                scope: Scope::Everything,
                through: through.unwrap_or_default(),
            }];
        }
    }

    fn file_bytes(&self) -> u64 {
        let each = self
            .0
            .iter()
            .map(|mark| 29 + 16 * mark.scope.named_pages() as u64);
        file_bytes(4 + each.sum::<u64>() + 8)
    }

    /// Reads the file. A missing file means no marks.
    pub(in super::super) fn read(files: &dyn Files) -> io::Result<Result<Self, FormatError>> {
        let body = read(files, MARKS_NAME, (MAGIC, "marks"), FILE_BYTES_MAX)?;
        Ok(body.map_or(Ok(Self::default()), |body| Self::decode(&body?)))
    }

    fn decode(body: &[u8]) -> Result<Self, FormatError> {
        let mut from = Reader(body);
        let count = from.u32()?;
        let mut marks = Vec::new();
        for _ in 0..count {
            let [kind] = from.take::<1>()?;
            let (epoch, transfer) = (Epoch(from.u64()?), TransferId(from.u64()?));
            let namespace = NamespaceId(from.u64()?);
            let pages = from.u32()?;
            let scope = match kind {
                0 => Scope::Everything,
                1 => Scope::Namespace(namespace),
                2 => {
                    let pages = (0..pages).map(|_| from.u128().map(Fingerprint));
                    Scope::Pages(namespace, pages.collect::<Result<PageSet, _>>()?)
                }
                kind => {
                    return Err(FormatError::Field {
                        field: "kind of a mark",
                        value: kind.into(),
                    });
                }
            };
            marks.push(Mark {
                scope,
                through: Stored { epoch, transfer },
            });
        }
        let sweeps = match from.0.is_empty() {
            true => Sweeps::default(),
            false => Sweeps {
                over: from.u32()?,
                begun: from.u32()?,
            },
        };
        Ok(Self(marks, sweeps))
    }

    /// Replaces the file. Durable when the call returns.
    pub(in super::super) fn write(&self, files: &dyn Files) -> io::Result<()> {
        let mut body = Writer::default();
        body.u32(u32::try_from(self.0.len()).unwrap_or(u32::MAX));
        for mark in &self.0 {
            let (kind, namespace, pages): (u8, _, &[Fingerprint]) = match &mark.scope {
                Scope::Everything => (0, NamespaceId::default(), &[]),
                Scope::Namespace(namespace) => (1, *namespace, &[]),
                Scope::Pages(namespace, pages) => (2, *namespace, pages.as_slice()),
            };
            body.bytes(&[kind]);
            body.u64(mark.through.epoch.0);
            body.u64(mark.through.transfer.0);
            body.u64(namespace.0);
            body.u32(u32::try_from(pages.len()).unwrap_or(u32::MAX));
            pages.iter().for_each(|page| body.u128(page.0));
        }
        body.u32(self.1.over);
        body.u32(self.1.begun);
        replace(files, MARKS_NAME, MAGIC, &body.0)
    }
}
