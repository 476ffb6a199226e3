//! What a check finds, and where.

use std::fmt;

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingKind {
    /// The identity of a directory.
    Identity,
    /// Permissions of a file or directory.
    Permissions,
    /// A name that stands for another kind of file.
    Kind,
    /// Another version of the format.
    Version,
    /// The marks of resets.
    Marks,
    /// The file that says what the pages of a set are.
    SetFile,
    /// A file of pages that is too short.
    Segment,
    /// A part of a file that the disk does not read.
    Unreadable,
    /// A slot of a region: damaged, torn, or of another region, set or shard.
    Slot,
    /// Pages that two blocks list.
    Overlap,
    /// Pages that a block lists and that no file has.
    NoSegment,
    /// A page whose bytes are not those that its header describes.
    Page,
    /// The same of a page that was written shortly before an unclean end: it may not have reached the disk.
    RecentPage,
    /// The index: damaged, or different from the headers.
    Index,
}

impl FindingKind {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Permissions => "permissions",
            Self::Kind => "kind",
            Self::Version => "version",
            Self::Marks => "marks",
            Self::SetFile => "set_file",
            Self::Segment => "segment",
            Self::Unreadable => "unreadable",
            Self::Slot => "slot",
            Self::Overlap => "overlap",
            Self::NoSegment => "no_segment",
            Self::Page => "page",
            Self::RecentPage => "recent_page",
            Self::Index => "index",
        }
    }
}

/// Where something is, as far as that is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Number of the directory, from 0 on.
    pub disk: Option<u16>,
    /// The shard.
    pub shard: Option<u16>,
    /// Name of the set.
    pub set: Option<String>,
    /// Name of the file in its directory.
    pub file: Option<String>,
    /// The region.
    pub region: Option<u32>,
    /// The slot of the region: 0 or 1.
    pub slot: Option<u8>,
    /// The page of the set.
    pub page: Option<u32>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.disk.map(|disk| format!("disk {disk}")));
        parts.extend(self.shard.map(|shard| format!("shard {shard}")));
        parts.extend(self.set.as_ref().map(|set| format!("set {set}")));
        parts.extend(self.file.clone());
        parts.extend(self.region.map(|region| format!("region {region}")));
        parts.extend(self.slot.map(|slot| format!("slot {slot}")));
        parts.extend(self.page.map(|page| format!("page {page}")));
        f.write_str(&parts.join(", "))
    }
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is about.
    pub kind: FindingKind,
    /// Where it is.
    pub place: Place,
    /// What is wrong.
    pub what: String,
    /// What the repair has done about it; `None` without a repair, and if there is none.
    pub repair: Option<&'static str>,
}
