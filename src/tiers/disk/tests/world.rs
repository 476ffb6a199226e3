//! A shard's tier on a simulated disk, with a model of what it must serve.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use kvferry_types::{
    Anchor, DomainId, Epoch, Fingerprint, NamespaceId, PageRecord, PageRun, Record, Scope, Stored,
    TransferId,
};

use super::super::buffer::AlignedBuffer;
use super::super::format::{BlockHeader, HeaderPage, PageSum, SetKey};
use super::super::set::DiskSet;
use super::super::tier::DiskTier;
use super::super::{DiskDirectories, DiskError, Recovered};
use super::sim_files::SimDisk;

pub(super) const PAGE_BYTES: u64 = 5000;
pub(super) const RATIO: u32 = 20;

/// The bytes of a page, which follow from its domain and its fingerprint.
pub(super) fn contents(domain: DomainId, fingerprint: Fingerprint) -> Vec<u8> {
    let seed = (domain.0 ^ domain.0 >> 64 << 32 ^ fingerprint.0) as u64;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; PAGE_BYTES as usize];
    rng.fill(&mut bytes);
    bytes
}

/// A set's key; sets differ in their layout.
pub(super) fn key(layout: u8) -> SetKey {
    SetKey {
        layout: [layout; 16],
        page_bytes: PAGE_BYTES,
        ratio: RATIO,
        shards: 1,
    }
}

/// A page that the tier lists, and its bytes are there.
pub(super) type Served = BTreeMap<u32, PageRecord>;

/// A shard's tier.
#[derive(Debug)]
pub(super) struct World {
    pub(super) disks: Vec<SimDisk>,
    pub(super) cap: u64,
    pub(super) tier: Option<DiskTier>,
    pub(super) transfers: u64,
}

impl World {
    pub(super) fn new(disks: usize, cap: u64) -> Self {
        Self {
            disks: (0..disks).map(|_| SimDisk::new()).collect(),
            cap,
            tier: None,
            transfers: 0,
        }
    }

    /// Starts a process, which opens a set.
    pub(super) fn start(&mut self, key: SetKey) -> Result<Recovered, String> {
        self.start_shard(0, key)
    }

    /// Names of the directories.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let name = |disk: usize| PathBuf::from(format!("/disk-{disk}"));
        (0..self.disks.len()).map(name).collect()
    }

    /// Opens the directories.
    pub(super) fn directories(&self) -> Result<DiskDirectories, DiskError> {
        let roots = self.disks.iter().map(SimDisk::root).collect();
        let (paths, disks) = (self.paths(), self.disks.clone());
        let named = paths.clone();
        DiskDirectories::of(&paths, roots, move |path| {
            let number = named.iter().position(|named| named == path);
            disks[number.expect("a path of the tier")].mounted()
        })
    }

    /// Starts the process of a shard, which opens a set. That of another shard has ended.
    pub(super) fn start_shard(&mut self, shard: u16, key: SetKey) -> Result<Recovered, String> {
        let directories = self.directories().map_err(text)?;
        let tier = DiskTier::take(&directories, shard, self.cap).map_err(text)?;
        let tier = tier.ok_or("locked")?;
        let opened = tier.open(key, &|_, _| {});
        self.tier = Some(tier);
        opened
            .map(|(_, found)| found)
            .map_err(|error| error.to_string())
    }

    pub(super) fn tier(&self) -> &DiskTier {
        self.tier.as_ref().expect("it was started")
    }

    pub(super) fn set(&self) -> Arc<DiskSet> {
        self.tier().open_set().expect("a set is open")
    }

    /// The next store.
    pub(super) fn stored(&mut self) -> Stored {
        self.transfers += 1;
        Stored {
            epoch: Epoch(1),
            transfer: TransferId(self.transfers),
        }
    }

    /// A record of `count` pages that follow `first` others of their block.
    pub(super) fn record(
        &mut self,
        start: u32,
        (first, count): (u16, u32),
        namespace: u64,
    ) -> Record {
        let page = |index: u32| Fingerprint(u128::from(start) << 40 | u128::from(index) << 8 | 1);
        let from = u32::from(first);
        Record {
            anchor: Anchor(u128::from(start) << 64 | 77),
            domain: DomainId(u128::from(namespace) << 64 | 5),
            block_start: start,
            first,
            phase: 0,
            stored: self.stored(),
            fingerprints: (from..from + count).map(page).collect(),
        }
    }

    /// Stores pages as a copy does: unlists what they overwrite, writes that, then the bytes, and lists them.
    pub(super) fn store(&self, record: &Record) -> std::io::Result<()> {
        let set = self.set();
        let start = record.block_start + u32::from(record.first);
        let count = record.fingerprints.len() as u32;
        let run = PageRun { start, count };
        set.table().unlist(run);
        set.write_removals(run)?;
        let stride = set.geometry().stride as usize;
        let mut buffer = AlignedBuffer::new(stride * count as usize);
        let pages = buffer.bytes_mut().chunks_exact_mut(stride);
        for (page, fingerprint) in pages.zip(&record.fingerprints) {
            page[..PAGE_BYTES as usize].copy_from_slice(&contents(record.domain, *fingerprint));
        }
        write_pages(&set, start, buffer.bytes())?;
        let listed = set.table().list(record, &sums(&set, record));
        listed.map_err(std::io::Error::other)
    }

    /// Removes pages of a namespace.
    pub(super) fn reset(&self, namespace: Option<u64>) -> std::io::Result<Stored> {
        let through = Stored {
            epoch: Epoch(1),
            transfer: TransferId(self.transfers),
        };
        let scope = match namespace {
            Some(namespace) => Scope::Namespace(NamespaceId(namespace)),
            None => Scope::Everything,
        };
        self.tier().reset(&scope, through)?;
        Ok(through)
    }

    /// The pages that the tier lists, after a check of their bytes. A page whose bytes do not match is a miss, and one
    /// whose checksum matches wrong bytes a failure of the test.
    pub(super) fn served(&self) -> Served {
        let set = self.set();
        let records = set.table().records(0..u32::MAX);
        let matching = records.into_iter().filter(|record| {
            let mut page = AlignedBuffer::new(set.geometry().stride as usize);
            if read_pages(&set, record.page, page.bytes_mut()).is_err() {
                return false;
            }
            let bytes = &page.bytes()[..PAGE_BYTES as usize];
            let whole = {
                let table = set.table();
                let (block, index) = table.find(record.page).expect("listed");
                let listed = &block.pages[usize::from(index)];
                set.keys.page_sum(&block.place(index, listed), bytes) == listed.sum
            };
            let expected = contents(record.domain, record.fingerprint);
            assert!(
                !whole || bytes == expected,
                "wrong bytes are served: {record:?}"
            );
            whole
        });
        matching.map(|record| (record.page, record)).collect()
    }
}

fn text(error: DiskError) -> String {
    error.to_string()
}

/// The checksums of a record's pages.
pub(super) fn sums(set: &DiskSet, record: &Record) -> Vec<PageSum> {
    let block = BlockHeader {
        anchor: record.anchor,
        domain: record.domain,
        phase: record.phase,
        pages: Vec::new(),
    };
    let pages = (record.first..).zip(&record.fingerprints);
    let sums = pages.map(|(index, fingerprint)| {
        let page = HeaderPage {
            fingerprint: *fingerprint,
            stored: record.stored,
            sum: PageSum::default(),
        };
        let bytes = contents(record.domain, *fingerprint);
        set.keys.page_sum(&block.place(index, &page), &bytes)
    });
    sums.collect()
}

/// Writes `pages` pages, that is the bytes of `buffer`, which holds each at a multiple of the stride.
fn write_pages(set: &DiskSet, start: u32, buffer: &[u8]) -> std::io::Result<()> {
    let mut rest = buffer;
    let stride = set.geometry().stride as usize;
    let pages = u32::try_from(buffer.len() / stride).unwrap_or(u32::MAX);
    for extent in set.geometry().extents(start, pages) {
        let (now, later) = rest.split_at(extent.pages as usize * stride);
        set.segment(extent.disk, extent.segment)?
            .write(now, extent.at)?;
        rest = later;
    }
    Ok(())
}

/// Reads as many pages as `buffer` has room for at multiples of the stride.
fn read_pages(set: &DiskSet, start: u32, buffer: &mut [u8]) -> std::io::Result<()> {
    let mut rest = buffer;
    let stride = set.geometry().stride as usize;
    let pages = u32::try_from(rest.len() / stride).unwrap_or(u32::MAX);
    for extent in set.geometry().extents(start, pages) {
        let (now, later) = rest.split_at_mut(extent.pages as usize * stride);
        set.segment(extent.disk, extent.segment)?
            .read(now, extent.at)?;
        rest = later;
    }
    Ok(())
}
