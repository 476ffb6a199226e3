//! `kvferry fsck`

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::common::print_line;
use crate::cli::lock_holder::lock_holder;
use crate::config::Directories;
use crate::error::CommandError;
use kvferry_tiers::disk::fsck::{Finding, FsckError, FsckReport, fsck};
use kvferry_types::ByteSize;

/// Time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// Version of the report.
const VERSION: u32 = 1;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The directories of g3_dir, all of them and in their order.
    #[arg(value_name = "DIR[,DIR...]")]
    directories: Directories,
    /// Remove what is wrong: blocks end before their first bad page, and damaged headers are written again.
    #[arg(long)]
    repair: bool,
    /// Print the report as JSON (schema/fsck.json).
    #[arg(long)]
    json: bool,
    /// Filter of the log, such as info,kvferry=debug.
    #[arg(long, value_name = "FILTER", default_value = "error")]
    log: String,
}

/// What `kvferry fsck --json` writes.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Report {
    /// Version of this report.
    version: u32,
    /// True if nothing is wrong, or the repair has removed everything that was.
    clean: bool,
    /// Shards that have a directory.
    shards: u64,
    /// Sets: pages of one layout, page size and ratio, of one shard.
    sets: u64,
    /// Files of pages.
    segments: u64,
    /// Bytes of the files of all sets.
    bytes: u64,
    /// Slots of headers that were read.
    slots: u64,
    /// Blocks that are listed.
    blocks: u64,
    /// Pages that are listed. Each was compared with its checksum.
    pages: u64,
    /// Pages whose checksum matches.
    good_pages: u64,
    /// Pages that headers list and that a reset has removed. They are not served, and are no finding.
    reset_pages: u64,
    /// Pages that headers list on a disk on which another set needed the room. They are not served, and are no finding.
    displaced_pages: u64,
    /// What is wrong: the first 1,000.
    findings: Vec<ReportedFinding>,
    /// Number of all findings.
    findings_total: u64,
    /// Findings that the repair has removed.
    repaired: u64,
    /// Files that are not kvferry's, which are left alone: the first 1,000.
    unknown: Vec<String>,
    /// Number of all of them.
    unknown_total: u64,
}

/// Something that is wrong.
#[derive(Debug, Serialize, JsonSchema)]
struct ReportedFinding {
    /// What it is about: identity, permissions, kind, version, marks, set_file, segment, unreadable, slot, overlap,
    /// no_segment, page, recent_page or index.
    kind: &'static str,
    /// Number of the directory, from 0 on.
    disk: Option<u16>,
    /// The shard.
    shard: Option<u16>,
    /// Name of the set's directory.
    set: Option<String>,
    /// Name of the file.
    file: Option<String>,
    /// The region: number of its first page / 16.
    region: Option<u32>,
    /// The slot of the region: 0 or 1.
    slot: Option<u8>,
    /// The page of the set.
    page: Option<u32>,
    /// What is wrong.
    what: String,
    /// What the repair has done about it.
    repair: Option<&'static str>,
}

impl From<Finding> for ReportedFinding {
    fn from(finding: Finding) -> Self {
        let place = finding.place;
        Self {
            kind: finding.kind.name(),
            disk: place.disk,
            shard: place.shard,
            set: place.set,
            file: place.file,
            region: place.region,
            slot: place.slot,
            page: place.page,
            what: finding.what,
            repair: finding.repair,
        }
    }
}

impl From<FsckReport> for Report {
    fn from(found: FsckReport) -> Self {
        Self {
            version: VERSION,
            clean: found.findings_total == found.repaired,
            shards: found.shards,
            sets: found.sets,
            segments: found.segments,
            bytes: found.bytes,
            slots: found.slots,
            blocks: found.blocks,
            pages: found.pages,
            good_pages: found.good_pages,
            reset_pages: found.reset_pages,
            displaced_pages: found.displaced_pages,
            findings: found.findings.into_iter().map(From::from).collect(),
            findings_total: found.findings_total,
            repaired: found.repaired,
            unknown: found.unknown.iter().map(ToString::to_string).collect(),
            unknown_total: found.unknown_total,
        }
    }
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        crate::telemetry::start(&self.log)?;
        if self.directories.0.is_empty() {
            let text = "no directory is named: name those of g3_dir".to_owned();
            return Err(CommandError::Config(text));
        }
        let shown = Cell::new(None);
        let terminal = std::io::stderr().is_terminal();
        let progress = |done: u64, all: u64| {
            let due = shown
                .get()
                .is_none_or(|at: Instant| at.elapsed() >= PROGRESS_EVERY);
            if terminal && (due || done == all) {
                shown.set(Some(Instant::now()));
                let line = format!("\r{} of {} checked   ", ByteSize(done), ByteSize(all));
                std::io::stderr().write_all(line.as_bytes()).ok();
            }
        };
        let checked = fsck(&self.directories.0, self.repair, &progress);
        if shown.get().is_some() {
            std::io::stderr().write_all(b"\n").ok();
        }
        let found = checked.map_err(|error| with_holder(error, &self.directories.0))?;
        let (total, repaired) = (found.findings_total, found.repaired);
        let text = match self.json {
            true => {
                let report = Report::from(found);
                serde_json::to_string_pretty(&report).map_err(CommandError::failed)?
            }
            false => table(&found),
        };
        print_line(&text);
        match (total - repaired, self.repair) {
            (0, _) => Ok(()),
            (left, false) => Err(CommandError::Found(format!(
                "{left} findings: kvferry fsck --repair removes what is wrong"
            ))),
            (left, true) => Err(CommandError::Found(format!(
                "{left} findings are not repaired: kvferry does not change these files"
            ))),
        }
    }
}

/// Names the process that uses the tier.
fn with_holder(error: FsckError, paths: &[PathBuf]) -> CommandError {
    let locked = match &error {
        FsckError::Leader(directory) => Some(directory.join("leader")),
        FsckError::InUse { shard, .. } => paths
            .iter()
            .map(|path| path.join(format!("shard-{shard}")))
            .find(|path| path.is_dir()),
        _ => None,
    };
    match locked.and_then(|path| lock_holder(&path)) {
        Some(pid) => CommandError::Failed(format!("{error} (process {pid})")),
        None => CommandError::failed(error),
    }
}

/// The report for people.
fn table(found: &FsckReport) -> String {
    let mut text = String::new();
    let bytes = ByteSize(found.bytes);
    let rows = [
        (
            "files",
            format!(
                "{} shards, {} sets, {} segments, {bytes}",
                found.shards, found.sets, found.segments
            ),
        ),
        ("headers", format!("{} slots", found.slots)),
        (
            "pages",
            format!(
                "{} in {} blocks, {} good",
                found.pages, found.blocks, found.good_pages
            ),
        ),
        (
            "removed",
            format!(
                "{} pages by resets, {} for other sets",
                found.reset_pages, found.displaced_pages
            ),
        ),
        (
            "findings",
            format!("{}, {} repaired", found.findings_total, found.repaired),
        ),
    ];
    for (name, row) in rows {
        writeln!(text, "{name:<10} {row}").ok();
    }
    for finding in &found.findings {
        let repair = finding
            .repair
            .map_or_else(String::new, |repair| format!(" ({repair})"));
        let (kind, place, what) = (finding.kind.name(), &finding.place, &finding.what);
        writeln!(text, "  {kind:<12} {place}: {what}{repair}").ok();
    }
    let listed = found.findings.len() as u64;
    if found.findings_total > listed {
        writeln!(text, "  and {} more", found.findings_total - listed).ok();
    }
    if found.unknown_total > 0 {
        writeln!(
            text,
            "{:<10} {} files are not kvferry's",
            "unknown", found.unknown_total
        )
        .ok();
    }
    for place in &found.unknown {
        writeln!(text, "  {place}").ok();
    }
    text.truncate(text.trim_end().len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_tiers::disk::fsck::{FindingKind, Place};

    #[test]
    fn the_table_names_each_finding_with_its_place_and_repair() {
        let finding = Finding {
            kind: FindingKind::Page,
            place: Place {
                disk: Some(1),
                shard: Some(0),
                page: Some(77),
                ..Place::default()
            },
            what: "the checksum does not match".to_owned(),
            repair: Some("removed from the page on"),
        };
        let found = FsckReport {
            findings: vec![finding],
            findings_total: 1200,
            repaired: 1200,
            ..FsckReport::default()
        };
        let text = table(&found);
        for words in [
            "page         disk 1, shard 0, page 77: the checksum does not match (removed from the page on)",
            "and 1199 more",
            "findings   1200, 1200 repaired",
        ] {
            assert!(text.contains(words), "{text}");
        }
        assert!(Report::from(found).clean);
    }
}
