//! `kvferry bench disk-recovery`: the start of a disk tier with many blocks, with its index and from the headers alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::cli::common::print_line;
use crate::error::CommandError;
use kvferry_memory::Depot;
use kvferry_tiers::disk::format::INDEX_NAME;
use kvferry_tiers::disk::{DiskCopier, DiskCopy, DiskDirectories, DiskIo, DiskTier, SetKey};
use kvferry_types::{Record, TransferId};

use super::disk_blocks::{BlockPlace, block_move};
use super::spread;

/// Bytes of a page: the smallest that a disk stores without padding.
const PAGE_BYTES: u64 = 4096;
/// Copies in flight, which have pages of their own in host memory.
const COPIES: u32 = 256;
/// Longest wait for one copy.
const COPY_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// An empty directory on the disk. What is written there is removed.
    directory: PathBuf,
    /// Blocks on the disk.
    #[arg(long, default_value = "100000", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    blocks: u32,
    /// Pages of 4 KiB in each block.
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u32).range(1..=256))]
    block_pages: u32,
    /// Starts of each kind.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let directory = self.directory.join("kvferry-bench");
        let result = self.measure(&directory);
        if let Err(error) = std::fs::remove_dir_all(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "not removed");
        }
        result
    }

    fn key(&self) -> SetKey {
        SetKey {
            layout: [0; 16],
            page_bytes: PAGE_BYTES,
            ratio: self.block_pages,
            shards: 1,
        }
    }

    fn cap(&self) -> u64 {
        // Headers take up to half as much as such small pages.
        u64::from(self.blocks * self.block_pages) * PAGE_BYTES * 2 + (64 << 20)
    }

    fn take(&self, directory: &Path) -> Result<DiskTier, CommandError> {
        let directories =
            DiskDirectories::open(&[directory.to_owned()]).map_err(CommandError::failed)?;
        let tier = DiskTier::take(&directories, 0, self.cap()).map_err(CommandError::failed)?;
        tier.ok_or_else(|| CommandError::Failed("the directory is in use".to_owned()))
    }

    fn measure(&self, directory: &Path) -> Result<(), CommandError> {
        self.fill(&self.take(directory)?)?;
        let index = directory.join("shard-0").join(self.key().name());
        let index = index.join(INDEX_NAME);
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            with.push(self.start(directory)?);
            std::fs::remove_file(&index).map_err(CommandError::failed)?;
            without.push(self.start(directory)?);
        }
        print_line(&format!(
            "{} blocks of {} pages of 4 KiB, {} rounds",
            self.blocks, self.block_pages, self.rounds
        ));
        for (what, seconds) in [("with the index", with), ("from the headers", without)] {
            let (least, median, most) = spread(seconds);
            print_line(&format!(
                "{what:<17} {median:>7.3} s (median; {least:.3} to {most:.3})"
            ));
        }
        Ok(())
    }

    /// Opens the set, checks that every block is found, and ends cleanly. Returns the seconds until the set is open.
    fn start(&self, directory: &Path) -> Result<f64, CommandError> {
        let begun = Instant::now();
        let tier = self.take(directory)?;
        let opened = tier.open(self.key(), &|_, _| {});
        let (set, _) = opened.map_err(CommandError::failed)?;
        let seconds = begun.elapsed().as_secs_f64();
        let found = set.listed();
        let blocks = u64::from(self.blocks);
        if found != (blocks, blocks * u64::from(self.block_pages)) {
            let (blocks, pages) = found;
            return Err(CommandError::Failed(format!(
                "found {blocks} blocks and {pages} pages"
            )));
        }
        drop(set);
        tier.close().map_err(CommandError::failed)?;
        Ok(seconds)
    }

    /// Writes and lists all blocks, and ends cleanly.
    fn fill(&self, tier: &DiskTier) -> Result<(), CommandError> {
        let (set, _) = tier
            .open(self.key(), &|_, _| {})
            .map_err(CommandError::failed)?;
        let pages = COPIES * self.block_pages;
        let depot = Depot::create(Depot::bytes_for(pages, PAGE_BYTES));
        let depot = Arc::new(depot.map_err(CommandError::failed)?);
        depot
            .hold_pages_of(PAGE_BYTES)
            .map_err(CommandError::failed)?;
        let (report, ends) = channel();
        let copier = DiskCopier::start((32, DiskIo::Auto), move |end| {
            if report.send(end).is_err() {
                tracing::debug!("a copy ended after the measurement");
            }
        });
        let copier = copier.map_err(CommandError::failed)?;
        let mut records: BTreeMap<TransferId, Record> = BTreeMap::new();
        let mut next = 0;
        while next < self.blocks || !records.is_empty() {
            while next < self.blocks && records.len() < COPIES as usize {
                let place = BlockPlace {
                    host: next % COPIES * self.block_pages,
                    disk: next * self.block_pages,
                    pages: self.block_pages,
                };
                let transfer = block_move(u64::from(next) + 1, true, place, PAGE_BYTES);
                records.extend(transfer.record.clone().map(|record| (transfer.id, record)));
                copier.copy(DiskCopy {
                    transfer,
                    depot: Arc::clone(&depot),
                    set: Arc::clone(&set),
                });
                next += 1;
            }
            let end = ends
                .recv_timeout(COPY_LIMIT)
                .map_err(CommandError::failed)?;
            let record = records.remove(&end.ended.transfer);
            let (true, Some(record)) = (end.ended.complete, record) else {
                return Err(CommandError::Failed(format!(
                    "a copy failed: {:?}",
                    end.error
                )));
            };
            set.list(&record).map_err(CommandError::failed)?;
        }
        drop(copier);
        drop(set);
        tier.close().map_err(CommandError::failed)
    }
}
