//! The replay of recorded calls: `kvferry up`, an engine in this process, and the requests of a recording.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use super::processes::{END_LIMIT, START_LIMIT, Up, UpSettings};
use super::{ArenaPages, Arguments, DEFAULT_G2, DEFAULT_RATIO};
use crate::cli::common::{block_on, print_line, random};
use crate::cli::shutdown::{EndedBy, Ending};
use crate::cli::socket_paths::SocketPaths;
use crate::cli::status;
use crate::error::CommandError;
use kvferry_engine::calls::{
    CallsError, CallsReport, PAGE_BYTES, Plan, PlayError, PlaySettings, Player, rank_bytes,
};
use kvferry_memory::{Depot, MemoryAvailable};
use kvferry_types::{ByteSize, EngineId, Rank, Ratio, Replica, TierId, WorkerId};

/// Bytes of the buffer of a recording.
const BUFFER_BYTES: usize = 1 << 20;

pub(super) fn run(arguments: &Arguments, path: &Path) -> Result<(), CommandError> {
    arguments.check_sizes()?;
    let refuse = |why: &dyn std::fmt::Display| {
        CommandError::Data(format!("--calls {}: {why}", path.display()))
    };
    let open = || {
        // Before it is opened: a pipe without a writer would block.
        match std::fs::metadata(path) {
            Ok(found) if found.is_file() => {}
            Ok(_) => return Err(refuse(&"is no file, and a recording is read twice")),
            Err(error) => return Err(refuse(&error)),
        }
        let file = File::open(path).map_err(|error| refuse(&error))?;
        Ok(BufReader::with_capacity(BUFFER_BYTES, file))
    };
    let plan = Plan::read(open()?).map_err(|error| refuse(&error))?;
    let sizes = Sizes::of(arguments, &plan)?;
    let with = match &arguments.socket_dir {
        None => {
            sizes.check_memory(&plan)?;
            format!(
                "{} pages of host memory, ratio {}",
                sizes.g2_pages, sizes.ratio
            )
        }
        Some(directory) => format!("the kvferry up of {}", directory.display()),
    };
    if !arguments.quiet {
        // The disk of a kvferry up that runs already is its own.
        let has_disk = arguments.uses_disk() || arguments.socket_dir.is_some();
        print_line(&about(&plan, &with, has_disk));
    }
    let source = open()?;
    let report = block_on(2, async {
        let mut ending = Ending::listen(EndedBy::Signals)?;
        let mut up = Up::start(&UpSettings {
            ranks: plan.header.ranks,
            shards: plan.header.ranks,
            replicas: 1,
            ratio: sizes.ratio,
            g2_bytes: sizes.g2_bytes,
            arguments,
        })
        .await?;
        let socket_paths = up.socket_paths();
        let played = tokio::select! {
            played = play(arguments, &plan, &socket_paths, sizes.g2_pages, source) => played,
            () = ending.requested() => Err(CommandError::Failed("interrupted".to_owned())),
            error = up.ended_early() => Err(error),
        };
        let ended = up.end().await;
        // The first error is the one that counts.
        let report = played?;
        ended.map(|()| report)
    })?;
    if !arguments.quiet {
        print_line(&table(&report));
    }
    verdict(&report)
}

/// The sizes of the leader.
struct Sizes {
    ratio: Ratio,
    g2_pages: u32,
    g2_bytes: u64,
}

impl Sizes {
    fn of(arguments: &Arguments, plan: &Plan) -> Result<Self, CommandError> {
        let recorded = plan.leader.as_ref();
        let ratio = arguments.ratio.or(recorded.map(|leader| leader.ratio));
        let ratio = Ratio::new(ratio.unwrap_or(DEFAULT_RATIO))
            .map_err(|error| CommandError::Config(error.to_string()))?;
        let host = recorded.and_then(|leader| {
            let mut tiers = leader.tiers.iter();
            tiers.find(|(tier, ..)| *tier == TierId::Host.number())
        });
        let shards = u64::from(plan.header.ranks);
        let pages_in = |bytes: u64| Depot::pages_in(bytes / shards, PAGE_BYTES);
        let g2_pages = match (arguments.g2_pages, arguments.g2, host) {
            (Some(ArenaPages::Unlimited), ..) => {
                let text = "--g2-pages unlimited needs --mode offline: live memory is limited";
                return Err(CommandError::Config(text.to_owned()));
            }
            (Some(ArenaPages::Count(pages)), ..) => pages,
            (None, Some(bytes), _) => pages_in(bytes.0),
            (None, None, Some((_, pages, _))) => u32::try_from(*pages).map_err(|_| {
                CommandError::Config(format!(
                    "the recorded leader has {pages} pages: give --g2-pages"
                ))
            })?,
            (None, None, None) => pages_in(DEFAULT_G2.0),
        };
        if g2_pages > 0 && g2_pages < ratio.pages() {
            return Err(CommandError::Config(format!(
                "G2 has room for {g2_pages} pages on each rank, one block takes {ratio}: use --g2-pages {ratio} at \
                 least, or a lower --ratio"
            )));
        }
        Ok(Self {
            ratio,
            g2_pages,
            g2_bytes: match g2_pages {
                0 => 0,
                pages => shards * Depot::bytes_for(pages, PAGE_BYTES),
            },
        })
    }

    /// Refuses a replay that needs more memory than this machine has, before anything starts.
    fn check_memory(&self, plan: &Plan) -> Result<(), CommandError> {
        let g1 = ByteSize(rank_bytes(plan.device_pages) * u64::from(plan.header.ranks));
        let g2 = ByteSize(self.g2_bytes);
        let available = MemoryAvailable::now();
        if g1.0.saturating_add(g2.0) <= available.bytes {
            return Ok(());
        }
        Err(CommandError::Config(format!(
            "this replay takes {g1} for the engine ({} pages on each of {} ranks) and {g2} for G2 ({} pages), but only \
             {} of memory are available: use a smaller --g2-pages",
            plan.device_pages,
            plan.header.ranks,
            self.g2_pages,
            ByteSize(available.bytes)
        )))
    }
}

async fn play(
    arguments: &Arguments,
    plan: &Plan,
    socket_paths: &SocketPaths,
    g2_pages: u32,
    source: BufReader<File>,
) -> Result<CallsReport, CommandError> {
    let mut engine = [0; 16];
    random(&mut engine)?;
    let worker = |rank| WorkerId {
        replica: Replica(0),
        rank: Rank(rank),
    };
    let settings = PlaySettings {
        leader: socket_paths.leader_address(),
        workers: (0..plan.header.ranks)
            .map(|rank| socket_paths.worker(worker(rank)))
            .collect(),
        engine: EngineId(engine),
        start_limit: START_LIMIT.max(END_LIMIT),
        timeout: arguments.request_timeout(),
        has_disk: arguments.uses_disk(),
        // The sizes of a kvferry up that runs already are its own.
        host_pages: arguments.socket_dir.is_none().then_some(g2_pages),
    };
    let mut player = Player::start(plan, settings).map_err(failed)?;
    player.wait_until_ready().await.map_err(failed)?;
    match arguments.uses_disk() {
        true => status::until_tiers_serve(socket_paths, START_LIMIT).await?,
        false => status::until_ready(socket_paths, START_LIMIT).await?,
    }
    let bar = progress(arguments, plan);
    let played = player.play(source, |frame| bar.set_position(frame)).await;
    bar.finish_and_clear();
    played.map_err(failed)
}

fn failed(error: PlayError) -> CommandError {
    match error {
        PlayError::Calls(CallsError::Read(error)) => CommandError::failed(error),
        PlayError::Calls(_) | PlayError::Layers(_) | PlayError::Changed => {
            CommandError::Data(error.to_string())
        }
        _ => CommandError::failed(error),
    }
}

fn progress(arguments: &Arguments, plan: &Plan) -> ProgressBar {
    if arguments.quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(u64::from(plan.frames));
    match ProgressStyle::with_template("{bar:40} {pos}/{len} frames, {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// What is replayed, and with which sizes.
fn about(plan: &Plan, with: &str, has_disk: bool) -> String {
    let header = &plan.header;
    let mut lines = vec![
        row(
            "recording",
            &format!(
                "{} frames, {} calls, {} requests in {:.1} s",
                plan.frames,
                plan.calls,
                plan.ends.len(),
                plan.us as f64 / 1e6
            ),
        ),
        row("ends", &plan.ending.to_string()),
        row(
            "engine",
            &format!(
                "{} ranks, {} groups, {} pages",
                header.ranks,
                header.groups.len(),
                plan.device_pages
            ),
        ),
        row("replayed with", with),
    ];
    let mut warn = |text: String| lines.push(row("note", &text));
    match &plan.leader {
        None => warn(
            "the recording has no sizes of its leader: --g2-pages and --ratio may differ from them"
                .to_owned(),
        ),
        Some(leader) => {
            if plan.used_pages > 0 {
                let pages = plan.used_pages;
                warn(format!(
                    "the leader had {pages} pages already, which the replay does not have"
                ));
            }
            if plan.leaders > 1 {
                warn(format!(
                    "the leader was started again, {} in all, and here it is not",
                    plan.leaders
                ));
            }
            let disk =
                |(tier, pages, _): &&(u8, u64, u64)| *tier > TierId::Host.number() && *pages > 0;
            if let Some((_, pages, _)) = leader.tiers.iter().find(disk)
                && !has_disk
            {
                warn(format!(
                    "the leader had a disk of {pages} pages, and here is none: give --g3 and --g3-dir"
                ));
            }
            if leader.replicas > 1 {
                warn(format!(
                    "the leader served up to {} engines, and the replay has one",
                    leader.replicas
                ));
            }
        }
    }
    lines.join("\n")
}

fn table(report: &CallsReport) -> String {
    let mut lines: Vec<String> = [
        ("requests sent", report.sent),
        ("never sent", report.unsent),
        ("not served", report.not_served),
        ("without an end", report.unanswered),
        ("compared", report.compared),
        ("equal", report.equal),
        ("not comparable", report.incomparable_ends()),
        ("different", report.different),
        ("let go early", report.early),
        ("bytes verified", report.verified_bytes),
        ("bytes wrong", report.mismatched_bytes),
    ]
    .into_iter()
    .map(|(name, value)| row(name, &value.to_string()))
    .collect();
    let reasons = report.incomparable.iter();
    lines.extend(reasons.map(|(reason, count)| row("of these", &format!("{count} {reason}"))));
    lines.extend(
        report
            .incomparable_differences
            .iter()
            .map(|text| row("incomparable", text)),
    );
    lines.extend(
        report
            .differences
            .iter()
            .map(|text| row("difference", text)),
    );
    lines.push(row("result", &result(report)));
    lines.join("\n")
}

/// What the comparison shows, and what it does not.
fn result(report: &CallsReport) -> String {
    let CallsReport {
        compared,
        equal,
        different,
        ..
    } = report;
    match (different, report.incomparable_ends()) {
        (0, 0) => format!("all {compared} answers are equal"),
        (0, others) => {
            format!("{equal} of {compared} answers are equal, {others} cannot be compared")
        }
        (_, others) => format!(
            "{different} of {compared} answers differ, {equal} are equal, {others} cannot be compared"
        ),
    }
}

fn row(name: &str, text: &str) -> String {
    format!("{name:<16} {}", printable(text))
}

/// A text without control characters. Texts of a recording may contain anything, and must not control the terminal.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// What the report means for the exit code.
fn verdict(report: &CallsReport) -> Result<(), CommandError> {
    if report.mismatched_bytes > 0 {
        return Err(CommandError::Found(format!(
            "{} loaded bytes are wrong: {}",
            report.mismatched_bytes, report.complaint
        )));
    }
    if report.compared == 0 {
        let text = "nothing was compared: the recording has no request with an end";
        return Err(CommandError::Data(text.to_owned()));
    }
    match report.differences.first() {
        None if report.equal == 0 => Err(CommandError::Found(format!(
            "none of {} answers is equal: all differ, and none can be compared",
            report.compared
        ))),
        None => Ok(()),
        Some(first) => Err(CommandError::Found(format!(
            "{} of {} answers differ, the first: {}",
            report.different,
            report.compared,
            printable(first)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::calls::Reason;

    #[test]
    fn a_replay_that_shows_nothing_fails() {
        let report = |compared, equal, different| CallsReport {
            compared,
            equal,
            different,
            incomparable: [(Reason::Time, compared - equal - different)].into(),
            differences: vec!["why".to_owned(); different as usize],
            ..CallsReport::default()
        };
        assert!(verdict(&report(3, 1, 0)).is_ok());
        assert!(matches!(
            verdict(&report(0, 0, 0)),
            Err(CommandError::Data(_))
        ));
        for other in [report(3, 0, 0), report(3, 2, 1)] {
            assert!(matches!(verdict(&other), Err(CommandError::Found(_))));
        }
    }

    #[test]
    fn a_result_claims_equality_only_of_what_was_compared() {
        let mut report = CallsReport {
            compared: 3,
            equal: 3,
            ..CallsReport::default()
        };
        assert_eq!(result(&report), "all 3 answers are equal");
        report.equal = 1;
        report.incomparable = [(Reason::Engines, 2)].into();
        let text = "1 of 3 answers are equal, 2 cannot be compared";
        assert_eq!(result(&report), text);
        let lines = table(&report);
        let why = row("of these", &format!("2 {}", Reason::Engines));
        assert!(lines.contains(&why), "{lines}");
        assert!(lines.ends_with(text), "{lines}");
        (report.equal, report.different) = (0, 1);
        assert_eq!(
            result(&report),
            "1 of 3 answers differ, 0 are equal, 2 cannot be compared"
        );
    }

    #[test]
    fn texts_of_a_recording_control_no_terminal() {
        let report = CallsReport {
            compared: 1,
            different: 1,
            differences: vec!["\u{1b}[2J".to_owned()],
            ..CallsReport::default()
        };
        let error = verdict(&report).expect_err("a difference").to_string();
        assert!(error.ends_with("\u{fffd}[2J"), "{error}");
        assert_eq!(
            row("a", "\u{1b}[2J b\n"),
            format!("{:<16} \u{fffd}[2J b\u{fffd}", "a")
        );
    }
}
