//! Copies between host memory and files.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvferry_memory::{Depot, page_stride_bytes};
use kvferry_types::{
    Anchor, DomainId, Edge, Epoch, Fingerprint, FragmentPair, PageList, Record, Stored, TierId,
    Time, Transfer, TransferId,
};

use super::super::format::{SetKey, segment_name};
use super::super::set::DiskSet;
use super::super::{DiskCopier, DiskCopy, DiskCopyEnd, DiskIo};
use super::sim_files::SimDisk;
use super::world::World;

pub(super) const PAGE_BYTES: u64 = 3_000_000;
pub(super) const PAGES: u32 = 8;
const WAIT: Duration = Duration::from_secs(60);

pub(super) struct Copies {
    pub(super) world: World,
    depot: Arc<Depot>,
    copier: DiskCopier,
    ends: Receiver<DiskCopyEnd>,
}

impl Copies {
    pub(super) fn new(disks: usize) -> Self {
        Self::by(disks, DiskIo::Threads)
    }

    fn by(disks: usize, io: DiskIo) -> Self {
        let mut world = World::new(disks, 256 << 20);
        let key = SetKey {
            layout: [1; 16],
            page_bytes: PAGE_BYTES,
            ratio: 32,
            shards: 1,
        };
        world.start(key).expect("a fresh disk");
        let depot = Depot::create(Depot::bytes_for(2 * PAGES, PAGE_BYTES)).expect("memory");
        depot.hold_pages_of(PAGE_BYTES).expect("writable");
        let (report, ends) = channel();
        let copier = DiskCopier::start((3, io), move |end| {
            report.send(end).expect("the test waits")
        });
        Self {
            world,
            depot: Arc::new(depot),
            copier: copier.expect("threads"),
            ends,
        }
    }

    pub(super) fn set(&self) -> Arc<DiskSet> {
        self.world.set()
    }

    fn at(&self, page: u32) -> u64 {
        self.depot.pages_at(PAGE_BYTES) + u64::from(page) * page_stride_bytes(PAGE_BYTES)
    }

    fn fill(&self, page: u32, with: u8) {
        let bytes = vec![with; PAGE_BYTES as usize];
        self.depot
            .buffer()
            .write_from(self.at(page), &bytes)
            .expect("in range");
    }

    pub(super) fn first_and_last(&self, page: u32) -> (u8, u8) {
        let mut bytes = [0; 2];
        let buffer = self.depot.buffer();
        buffer
            .read_into(self.at(page), &mut bytes[..1])
            .expect("in range");
        let last = self.at(page) + PAGE_BYTES - 1;
        buffer.read_into(last, &mut bytes[1..]).expect("in range");
        (bytes[0], bytes[1])
    }

    fn transfer(&self, id: u64, edge: Edge, src: PageList, dst: PageList) -> Transfer {
        let record = (edge.to == TierId::Disk).then(|| Record {
            anchor: Anchor(id.into()),
            domain: DomainId(3),
            block_start: dst.iter_pages().next().expect("a page"),
            first: 0,
            phase: 0,
            stored: Stored {
                epoch: Epoch(1),
                transfer: TransferId(id),
            },
            fingerprints: dst
                .iter_pages()
                .map(|page| Fingerprint(page.into()))
                .collect(),
        });
        Transfer {
            id: TransferId(id),
            edge,
            device: None,
            page_bytes: PAGE_BYTES,
            pairs: vec![FragmentPair { src, dst }],
            record,
            deadline: Time::NEVER,
        }
    }

    fn copy(&self, transfer: &Transfer) {
        self.copier.copy(DiskCopy {
            transfer: transfer.clone(),
            depot: Arc::clone(&self.depot),
            set: self.set(),
        });
    }

    fn end(&self) -> DiskCopyEnd {
        self.ends.recv_timeout(WAIT).expect("the copy ends")
    }

    /// Writes host pages `0..PAGES`, filled with their numbers, to disk pages from `to` on.
    pub(super) fn write(&self, id: u64, to: u32) -> DiskCopyEnd {
        (0..PAGES).for_each(|page| self.fill(page, page as u8 + 1));
        let transfer = self.transfer(id, WRITE, PageList::run(0, PAGES), PageList::run(to, PAGES));
        self.set().unlist(kvferry_types::PageRun {
            start: to,
            count: PAGES,
        });
        self.copy(&transfer);
        let end = self.end();
        if end.ended.complete {
            self.set()
                .list(transfer.record.as_ref().expect("a write"))
                .expect("listed");
        }
        end
    }

    /// Reads disk pages from `from` on into host pages `PAGES..`.
    pub(super) fn read(&self, id: u64, from: u32) -> DiskCopyEnd {
        (PAGES..2 * PAGES).for_each(|page| self.fill(page, 0xff));
        let transfer = self.transfer(
            id,
            READ,
            PageList::run(from, PAGES),
            PageList::run(PAGES, PAGES),
        );
        self.copy(&transfer);
        self.end()
    }
}

const WRITE: Edge = Edge {
    from: TierId::Host,
    to: TierId::Disk,
};
const READ: Edge = Edge {
    from: TierId::Disk,
    to: TierId::Host,
};

#[test]
fn pages_come_back_as_they_were_written() {
    for disks in [1, 2] {
        let copies = Copies::new(disks);
        let end = copies.write(1, 28);
        assert!(end.ended.complete, "{end:?}");
        assert_eq!(end.ended.bytes, u64::from(PAGES) * PAGE_BYTES);
        let end = copies.read(2, 28);
        assert!(end.ended.complete, "{end:?}");
        for page in 0..PAGES {
            let byte = page as u8 + 1;
            assert_eq!(copies.first_and_last(PAGES + page), (byte, byte));
        }
    }
}

#[test]
fn a_page_that_fails_its_checksum_ends_the_read_before_it() {
    let copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    let geometry = *copies.set().geometry();
    let at = geometry.table_bytes() + 5 * geometry.stride + PAGE_BYTES - 1;
    copies.world.disks[0].flip_bit(&segment_name(0), at, 2);
    let end = copies.read(2, 0);
    assert_eq!((end.ended.complete, end.ended.complete_pages), (false, 5));
    assert!(end.ended.bad_source && end.error.is_none(), "{end:?}");
}

/// The leader ordered other pages than the disk has there, as it may after the disk was exchanged.
#[test]
fn pages_of_another_content_or_domain_than_ordered_are_not_read() {
    let copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    let written = copies.transfer(1, WRITE, PageList::run(0, PAGES), PageList::run(0, PAGES));
    let written = written.record.expect("a write");
    let mut other_page = written.clone();
    other_page.fingerprints[5] = Fingerprint(999);
    let mut other_domain = written.clone();
    other_domain.domain = DomainId(written.domain.0 + 1);
    for (record, pages) in [(written, PAGES), (other_page, 5), (other_domain, 0)] {
        let mut read = copies.transfer(
            2,
            READ,
            PageList::run(0, PAGES),
            PageList::run(PAGES, PAGES),
        );
        read.record = Some(record);
        copies.copy(&read);
        let ended = copies.end().ended;
        assert_eq!(ended.complete_pages, pages);
        assert_eq!(ended.bad_source, pages < PAGES);
        assert_eq!(ended.faulty_page, None, "the place is none the worse");
    }
}

#[test]
fn a_page_that_is_not_listed_is_not_read() {
    let copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    let end = copies.read(2, 4);
    assert_eq!(end.ended.complete_pages, 4);
    assert!(end.ended.bad_source);
}

#[test]
fn a_failed_write_lists_nothing_and_names_its_error() {
    let copies = Copies::new(1);
    copies.world.disks[0].fail_writes(Some(io::ErrorKind::StorageFull));
    let end = copies.write(1, 0);
    assert!(!end.ended.complete && !end.ended.bad_source);
    let kind = end.error.map(|error| error.kind());
    assert_eq!(kind, Some(io::ErrorKind::StorageFull));
    copies.world.disks[0].fail_writes(None);
    assert!(copies.write(2, 0).ended.complete);
    assert!(copies.read(3, 0).ended.complete);
}

#[test]
fn a_stopped_read_ends_while_the_disk_is_silent_and_writes_nothing_later() {
    let copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    let silence = copies.world.disks[0].silence();
    (PAGES..2 * PAGES).for_each(|page| copies.fill(page, 0xff));
    let transfer = copies.transfer(
        2,
        READ,
        PageList::run(0, PAGES),
        PageList::run(PAGES, PAGES),
    );
    copies.copy(&transfer);
    copies.copier.stop(TransferId(2));
    let end = copies.end();
    assert!(!end.ended.complete && !end.ended.bad_source, "{end:?}");
    drop(silence);
    // The threads end what was in flight before they end.
    let Copies {
        world,
        depot,
        copier,
        ends,
    } = copies;
    drop(copier);
    let copies = Copies::new(1);
    let copies = Copies {
        world,
        depot,
        ends,
        ..copies
    };
    for page in PAGES..2 * PAGES {
        assert_eq!(copies.first_and_last(page), (0xff, 0xff), "page {page}");
    }
}

#[test]
fn a_stopped_write_ends_when_what_is_in_flight_has_ended() {
    let copies = Copies::new(1);
    let silence = copies.world.disks[0].silence();
    let transfer = copies.transfer(1, WRITE, PageList::run(0, PAGES), PageList::run(0, PAGES));
    copies.copy(&transfer);
    copies.world.disks[0].await_write();
    copies.copier.stop(TransferId(1));
    let early = copies.ends.recv_timeout(Duration::from_millis(50));
    assert!(early.is_err(), "{early:?}: a write is in flight");
    drop(silence);
    assert!(!copies.end().ended.complete);
}

/// Copies in files of a directory.
pub(super) fn in_files(directory: &std::path::Path, disks: usize, io: DiskIo) -> Copies {
    let mut copies = Copies::by(1, io);
    let paths: Vec<_> = (0..disks)
        .map(|disk| directory.join(format!("disk-{disk}")))
        .collect();
    let directories = super::super::DiskDirectories::open(&paths).expect("opened");
    let tier = super::super::DiskTier::take(&directories, 0, 256 << 20);
    let tier = tier.expect("usable").expect("not locked");
    let second = super::super::DiskTier::take(&directories, 0, 256 << 20).expect("usable");
    assert!(second.is_none(), "the shard is in use");
    tier.open(copies.set().file.key, &|_, _| {})
        .expect("opened");
    copies.world.tier = Some(tier);
    copies
}

#[test]
fn threads_and_io_uring_carry_out_the_same_copies_in_files() {
    for (io, disks) in [(DiskIo::Threads, 1), (DiskIo::Auto, 1), (DiskIo::Auto, 2)] {
        let directory = tempfile::tempdir().expect("a directory");
        let copies = in_files(directory.path(), disks, io);
        assert!(copies.write(1, 28).ended.complete);
        assert!(copies.write(2, 48).ended.complete);
        copies.world.tier().flush().expect("flushed");
        let end = copies.read(3, 28);
        assert!(end.ended.complete, "{end:?}");
        for page in 0..PAGES {
            let byte = page as u8 + 1;
            assert_eq!(copies.first_and_last(PAGES + page), (byte, byte));
        }
        // Pages of which no byte was written.
        let end = copies.read(4, 80);
        assert!(
            end.ended.bad_source && end.ended.complete_pages == 0,
            "{end:?}"
        );
    }
}

/// Keeps the simulated disk silent until dropped.
pub(super) struct Silence(pub(super) SimDisk);

impl Drop for Silence {
    fn drop(&mut self) {
        self.0.speak();
    }
}
