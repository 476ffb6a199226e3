//! `kvferry drain`

use std::time::Duration;

use tokio::time::Instant;

use crate::cli::arguments::LocalArguments;
use crate::cli::common::{block_on, print_line, say_progress};
use crate::cli::status;
use crate::error::CommandError;
use kvferry_client::AdminClient;
use kvferry_protocol::DrainAnswer;

/// Time limit of an answer of the leader.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    client: LocalArguments,
    /// Take requests again.
    #[arg(long)]
    resume: bool,
    /// Seconds to wait for what runs; the leader goes on draining afterwards.
    #[arg(long, default_value = "60", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let socket_paths = self.client.load()?;
        let (resume, limit) = (self.resume, Duration::from_secs(self.timeout));
        block_on(1, async move {
            // Fails sooner, and with a better error, when no leader runs.
            status::request(&socket_paths, false).await?;
            let leader = status::admin(&socket_paths, "drain");
            let until = Instant::now() + limit;
            let mut said = String::new();
            let answer = leader.drain(resume, ANSWER_LIMIT).await;
            let mut runs = answer.map_err(CommandError::failed)?;
            if resume {
                print_line("requests are taken again");
                return Ok(());
            }
            loop {
                if runs.drained {
                    print_line(
                        "drained: lookups, loads and stores are refused until kvferry drain --resume",
                    );
                    return Ok(());
                }
                let now = what(runs);
                if Instant::now() >= until {
                    return Err(CommandError::Failed(format!(
                        "not drained after {limit:?}: {now}; the leader goes on draining, and kvferry drain --resume ends that"
                    )));
                }
                if said != now {
                    say_progress(&format!("draining: {now}"));
                    said = now;
                }
                tokio::time::sleep(PAUSE).await;
                runs = what_runs(&leader).await?;
            }
        })
    }
}

/// Looks again, without ordering the drain again: another operator may have ended it.
async fn what_runs(leader: &AdminClient) -> Result<DrainAnswer, CommandError> {
    let status = leader.status(false, ANSWER_LIMIT).await;
    let status = status.map_err(CommandError::failed)?;
    let measured = leader.measure(ANSWER_LIMIT).await;
    if !measured.map_err(CommandError::failed)?.draining {
        return Err(CommandError::Failed(
            "the leader takes requests again: another operator has resumed it, or it has started again".to_owned(),
        ));
    }
    let (loads, stores) = (status.requests.open_loads, status.requests.open_stores);
    let loads = loads + status.requests.parked_requests;
    let transfers = status.copies_under_way;
    Ok(DrainAnswer {
        drained: loads + stores + transfers == 0,
        loads,
        stores,
        transfers,
    })
}

fn what(runs: DrainAnswer) -> String {
    let DrainAnswer {
        loads,
        stores,
        transfers,
        ..
    } = runs;
    format!("{loads} loads, {stores} stores and {transfers} transfers run")
}
