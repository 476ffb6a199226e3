//! `kvferry status`

mod absent;
mod table;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::arguments::ClientArguments;
use crate::cli::common::{block_on, print_line, say_progress};
use crate::cli::{remote::LeaderPlace, socket_paths::SocketPaths};
use crate::error::CommandError;
use kvferry_client::{AdminClient, Failure};
use kvferry_protocol::{DiskHealth, ErrorCode, RankStatus, StatusAnswer};
use kvferry_transport::Address;
use kvferry_types::{ByteSize, Rank, Replica, WorkerId};

/// Time limit of a leader's answer.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two status requests to a leader that is not ready yet.
const READY_PAUSE: Duration = Duration::from_millis(5);
/// The pause where the waiting time is not measured.
const WAIT_PAUSE: Duration = Duration::from_millis(200);
/// Time between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Time after which a replay says what it waits for.
const QUIET: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    client: ClientArguments,
    /// Wait until every rank of every engine is ready, at most this many seconds, and print the progress of each.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    wait_s: Option<u64>,
    /// Print JSON: `schema/messages.json`, `status_answer`.
    #[arg(long)]
    json: bool,
    /// Recount pages, pins and blocks independently and compare.
    #[arg(long)]
    check: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let (_, place) = self.client.load()?;
        let (check, wait) = (self.check, self.wait_s.map(Duration::from_secs));
        let answer = block_on(1, async move {
            if let Some(limit) = wait {
                let mut said: Option<(Instant, String)> = None;
                let mut progress = |now: &str| {
                    let due = said
                        .as_ref()
                        .is_none_or(|(at, text)| text != now && at.elapsed() >= PROGRESS_EVERY);
                    if due {
                        say_progress(now);
                        said = Some((Instant::now(), now.to_owned()));
                    }
                };
                wait_until(&place, limit, WAIT_PAUSE, all_ready, &mut progress).await?;
            }
            request_at(&place, check).await
        })?;
        if self.json {
            let json = with_zeros(&answer).map_err(CommandError::failed)?;
            print_line(&serde_json::to_string_pretty(&json).map_err(CommandError::failed)?);
        } else {
            print_line(&table::table(&answer));
        }
        match answer.contradiction.as_deref() {
            None | Some("") => Ok(()),
            Some(found) => Err(CommandError::Found(format!("second count: {found}"))),
        }
    }
}

/// The answer as JSON, with the counters that messages leave out at 0.
fn with_zeros(answer: &StatusAnswer) -> serde_json::Result<serde_json::Value> {
    let mut json = serde_json::to_value(answer)?;
    let zero = |object: Option<&mut serde_json::Value>, name: &str| {
        if let Some(fields) = object.and_then(serde_json::Value::as_object_mut) {
            fields.entry(name).or_insert(0.into());
        }
    };
    zero(json.get_mut("moves"), "gone");
    let ranks = json.get_mut("ranks").and_then(|ranks| ranks.as_array_mut());
    for rank in ranks.into_iter().flatten() {
        zero(rank.get_mut("disk"), "bad_reads");
    }
    Ok(json)
}

/// Waits until lookups are served: every rank of one engine is attached, and the leader has read the inventories.
pub(super) async fn until_ready(
    socket_paths: &SocketPaths,
    limit: Duration,
) -> Result<(), CommandError> {
    let served = |status: &StatusAnswer| status.ready;
    let place = LeaderPlace::below(socket_paths);
    wait_until(&place, limit, READY_PAUSE, served, &mut |_| ()).await
}

/// Waits until lookups are served from every tier.
pub(super) async fn until_tiers_serve(
    socket_paths: &SocketPaths,
    limit: Duration,
) -> Result<(), CommandError> {
    let served =
        |status: &StatusAnswer| status.ready && status.tiers.iter().all(|tier| tier.pages > 0);
    let begun = Instant::now();
    let mut told = String::new();
    let mut progress = |now: &str| {
        if begun.elapsed() > QUIET && told != now {
            tracing::warn!(waiting_for = now, "not ready yet");
            now.clone_into(&mut told);
        }
    };
    let place = LeaderPlace::below(socket_paths);
    wait_until(&place, limit, READY_PAUSE, served, &mut progress).await
}

/// Whether every rank of every engine has an attached worker, and lookups are served.
fn all_ready(status: &StatusAnswer) -> bool {
    status.ready && status.ranks.iter().all(|rank| rank.attached)
}

/// Waits until `is_true` holds for a leader's status. Calls `progress` with the state of the ranks at each look.
async fn wait_until(
    place: &LeaderPlace,
    limit: Duration,
    pause: Duration,
    is_true: fn(&StatusAnswer) -> bool,
    progress: &mut dyn FnMut(&str),
) -> Result<(), CommandError> {
    place.check_trust().await?;
    let until = Instant::now() + limit;
    let client = admin_at(place, "status");
    loop {
        let now = match status_by(&client, until, place, false).await {
            Ok(status) if is_true(&status) => return Ok(()),
            Ok(status) => unready(&status),
            Err(error) => error.to_string(),
        };
        progress(&now);
        if Instant::now() >= until {
            let text = format!("not ready after {limit:?}: {now}");
            return Err(CommandError::Failed(text));
        }
        tokio::time::sleep(pause).await;
    }
}

/// Lists the ranks that are not ready, and their stages.
fn unready(status: &StatusAnswer) -> String {
    let missing: Vec<String> = status
        .ranks
        .iter()
        .filter(|rank| !rank.attached || !rank.problem.is_empty())
        .map(|rank| format!("{}: {}", name(rank), stage(rank)))
        .collect();
    if !missing.is_empty() {
        return missing.join("; ");
    }
    let closed = status.ranks.iter().filter_map(|rank| {
        let disk = rank.disk.as_ref()?;
        let text = format!(
            "{}: the disk serves nothing: {}",
            name(rank),
            printable(&disk.reason)
        );
        (disk.health == DiskHealth::Off).then_some(text)
    });
    let closed: Vec<String> = closed.collect();
    match closed.is_empty() {
        true => "the leader reads the inventories of the depots".to_owned(),
        false => closed.join("; "),
    }
}

fn name(rank: &RankStatus) -> String {
    let (replica, rank) = (Replica(rank.replica), Rank(rank.rank));
    WorkerId { replica, rank }.to_string()
}

/// A text that a worker has sent, without characters that would begin another line or change the terminal.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    shown
}

/// The startup stage of a rank.
pub(super) fn stage(rank: &RankStatus) -> String {
    if !rank.problem.is_empty() {
        return printable(&rank.problem);
    }
    if rank.attached {
        return "ready".to_owned();
    }
    if rank.pid == 0 && rank.host_bytes == 0 {
        return "no worker yet".to_owned();
    }
    match (rank.pid, rank.connected) {
        (0, Some(false)) => "its worker has ended".to_owned(),
        // The leader sees no process of another machine, and its connection.
        (0, Some(true)) => format!(
            "{}; its worker is on another machine, or in another PID namespace",
            preparation(rank)
        ),
        // A leader of an earlier version does not tell whether it is connected.
        (0, None) => {
            "its worker has ended, or is on another machine and waits for its engine".to_owned()
        }
        (pid, Some(false)) => format!(
            "its worker, process {pid}, runs and has no connection to the leader: run kill -CONT {pid} if it is stopped \
             (state T), and end it if it hangs"
        ),
        _ => preparation(rank),
    }
}

/// What a worker without its engine's memory does.
fn preparation(rank: &RankStatus) -> String {
    let (ready, bytes) = (ByteSize(rank.host_ready_bytes), ByteSize(rank.host_bytes));
    if rank.host_bytes == 0 || ready < bytes {
        return format!("{ready} of {bytes} host memory are ready");
    }
    match rank.host_pinned_bytes {
        Some(pinned) if pinned < rank.host_bytes => {
            let pinned = ByteSize(pinned);
            format!("{pinned} of {bytes} host memory are pinned for its GPU")
        }
        _ => "waits for its engine to register its memory".to_owned(),
    }
}

/// Connects to a leader as an operator, under the name of a command.
pub(super) fn admin_at(place: &LeaderPlace, name: &str) -> AdminClient {
    AdminClient::start(Arc::clone(&place.transport), place.address.clone(), name)
}

/// Connects to the leader below a socket directory, under the name of a command.
pub(super) fn admin(socket_paths: &SocketPaths, name: &str) -> AdminClient {
    admin_at(&LeaderPlace::below(socket_paths), name)
}

/// Requests the status of a leader.
pub(super) async fn request_at(
    place: &LeaderPlace,
    check: bool,
) -> Result<StatusAnswer, CommandError> {
    place.check_trust().await?;
    let client = admin_at(place, "status");
    status_by(&client, Instant::now() + STATUS_LIMIT, place, check).await
}

/// Requests the status of the leader below a socket directory.
pub(super) async fn request(
    socket_paths: &SocketPaths,
    check: bool,
) -> Result<StatusAnswer, CommandError> {
    request_at(&LeaderPlace::below(socket_paths), check).await
}

/// Requests the status until `until`. With `check` the leader may be busy, because it makes one second count per second
/// for all clients; the request is then repeated.
async fn request_status(
    client: &AdminClient,
    until: Instant,
    check: bool,
) -> Result<StatusAnswer, Failure> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // With `check` the last attempt gets the full limit too: an answer that the leader is busy, and until when, is
        // worth more than a timeout.
        let limit = match check {
            true => STATUS_LIMIT,
            false => left.clamp(READY_PAUSE, STATUS_LIMIT),
        };
        let answer = client.status(check, limit).await;
        match &answer {
            Err(failure) if check && failure.code == ErrorCode::Busy && !left.is_zero() => {
                tokio::time::sleep(WAIT_PAUSE).await;
            }
            _ => return answer,
        }
    }
}

async fn status_by(
    client: &AdminClient,
    until: Instant,
    place: &LeaderPlace,
    check: bool,
) -> Result<StatusAnswer, CommandError> {
    let failure = tokio::select! {
        biased;
        answer = request_status(client, until, check) => match answer {
            Ok(answer) => return Ok(answer),
            Err(failure) => failure,
        },
        why = absent::hopeless(place) => return Err(CommandError::Failed(why)),
    };
    Err(CommandError::Failed(match &place.address {
        Address::Directory(_) if failure.code != ErrorCode::Deadline => failure.to_string(),
        Address::Directory(leader) => absent::silent(leader, &failure).await,
        address => format!(
            "no leader answers at {address}: {failure}; is `kvferry leader` running with this --listen, and are both files of one directory of `kvferry keygen`?"
        ),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_of_a_rank_has_a_text() {
        let mut rank = RankStatus {
            rank: 1,
            ..RankStatus::default()
        };
        assert_eq!(stage(&rank), "no worker yet");
        rank.pid = 7;
        rank.host_bytes = 8 << 30;
        rank.host_ready_bytes = 1 << 30;
        assert_eq!(stage(&rank), "1 GiB of 8 GiB host memory are ready");
        rank.host_ready_bytes = 8 << 30;
        assert_eq!(stage(&rank), "waits for its engine to register its memory");
        rank.host_pinned_bytes = Some(3 << 30);
        assert_eq!(
            stage(&rank),
            "3 GiB of 8 GiB host memory are pinned for its GPU"
        );
        rank.host_pinned_bytes = Some(8 << 30);
        assert_eq!(stage(&rank), "waits for its engine to register its memory");
        rank.connected = Some(false);
        let text = stage(&rank);
        assert!(text.contains("process 7, runs and has no"), "{text}");
        rank.connected = None;
        rank.attached = true;
        assert_eq!(stage(&rank), "ready");
        rank.attached = false;
        rank.pid = 0;
        assert!(stage(&rank).starts_with("its worker has ended, or is on another machine"));
        rank.connected = Some(false);
        assert_eq!(stage(&rank), "its worker has ended");
        rank.connected = Some(true);
        let text = stage(&rank);
        assert!(text.contains("waits for its engine"), "{text}");
        assert!(text.contains("another machine"), "{text}");
        rank.problem = "no memory".to_owned();
        let status = StatusAnswer {
            ranks: vec![rank],
            ..StatusAnswer::default()
        };
        assert_eq!(unready(&status), "rank 1: no memory");
    }

    #[test]
    fn the_json_has_counters_at_0_that_messages_leave_out() {
        let answer = StatusAnswer {
            ranks: vec![RankStatus {
                disk: Some(Box::default()),
                ..RankStatus::default()
            }],
            moves: Some(Box::default()),
            ..StatusAnswer::default()
        };
        let json = with_zeros(&answer).expect("JSON");
        assert_eq!(json["moves"]["gone"], 0);
        assert_eq!(json["ranks"][0]["disk"]["bad_reads"], 0);
    }

    #[test]
    fn a_text_of_a_worker_begins_no_line_and_changes_no_terminal() {
        let rank = RankStatus {
            problem: "x\u{1b}[31m\nstate  serves \u{e9}".to_owned(),
            ..RankStatus::default()
        };
        assert_eq!(stage(&rank), "x\\u{1b}[31m\\nstate  serves \u{e9}");
    }
}
