//! `kvferry status`

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::{ConfigArguments, block_on, dirs::Dirs, say};
use crate::error::CommandError;
use crate::protocol::{Hello, Message, Role, Status, StatusAnswer, VERSION, VERSION_MIN};
use crate::transport::{Client, ClientSettings, Limits, Transport, ZmqTransport};

/// How long a leader may take to answer.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// Time between two questions to a leader that is not ready yet.
const READY_PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Print JSON: `schema/messages.json`, `status_answer`.
    #[arg(long)]
    json: bool,
    /// Count pages, pins and blocks a second way and compare.
    #[arg(long)]
    check: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let mut config = self.config;
        config.flags.log.get_or_insert_with(|| "warn".to_owned());
        let config = config.load()?;
        let dirs = Dirs::new(&config.socket_dir);
        let check = self.check;
        let answer = block_on(
            1,
            async move { ask(Arc::new(ZmqTransport), &dirs, check).await },
        )?;
        if self.json {
            say(&serde_json::to_string_pretty(&answer).map_err(CommandError::failed)?);
        } else {
            say(&table(&answer));
        }
        match answer.contradiction.is_empty() {
            true => Ok(()),
            false => Err(CommandError::Found(format!(
                "second count: {}",
                answer.contradiction
            ))),
        }
    }
}

/// Waits until lookups are served: the leader first reads what the depots hold.
pub(super) async fn until_ready(dirs: &Dirs, limit: Duration) -> Result<(), CommandError> {
    let until = Instant::now() + limit;
    loop {
        let status = ask(Arc::new(ZmqTransport), dirs, false).await?;
        if status.ready {
            return Ok(());
        }
        if Instant::now() >= until {
            let text = format!("the leader is not ready after {limit:?}");
            return Err(CommandError::Failed(text));
        }
        tokio::time::sleep(READY_PAUSE).await;
    }
}

/// A person's conversation with a leader, under the name of a command; `engine` tells those apart that ask as engines do.
pub(super) fn admin(
    transport: Arc<dyn Transport>,
    dirs: &Dirs,
    engine: [u8; 16],
    name: &str,
) -> Client {
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        role: Role::Admin,
        engine,
        rank: 0,
        replica: 0,
        name: name.to_owned(),
    };
    let settings = ClientSettings {
        address: dirs.leader_address(),
        hello,
        limits: Limits::default(),
    };
    let (client, mut incoming) = Client::start(transport, settings);
    tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    client
}

/// Asks a leader for its status.
pub(super) async fn ask(
    transport: Arc<dyn Transport>,
    dirs: &Dirs,
    check: bool,
) -> Result<StatusAnswer, CommandError> {
    let client = admin(transport, dirs, [0; 16], "status");
    let answer = client
        .ask(Message::Status(Status { check }), STATUS_LIMIT)
        .await;
    match answer {
        Ok(Message::StatusAnswer(answer)) => Ok(answer),
        Ok(other) => Err(CommandError::Failed(format!(
            "unexpected {}",
            other.kind().name()
        ))),
        Err(failure) => Err(CommandError::Failed(format!(
            "no leader answers in {}: {failure}; is `kvferry up` running with this --socket-dir?",
            dirs.root().display()
        ))),
    }
}

fn table(answer: &StatusAnswer) -> String {
    let attached = answer.ranks.iter().filter(|rank| rank.attached).count();
    let pages: u64 = answer.pages.values().sum();
    let mut lines = vec![
        format!("kvferry {}, epoch {}", answer.version, answer.epoch),
        format!(
            "ready        {} ({attached} of {} ranks attached)",
            if answer.ready { "yes" } else { "no" },
            answer.ranks.len()
        ),
        format!(
            "blocks       {} of up to {} pages of {} tokens",
            answer.blocks, answer.ratio, answer.engine_page_tokens
        ),
    ];
    let states: Vec<String> = answer
        .pages
        .iter()
        .map(|(state, pages)| format!("{pages} {state}"))
        .collect();
    lines.push(format!("arena        {pages} pages: {}", states.join(", ")));
    lines.push(format!(
        "now          {} requests, {} pins, {} copies under way",
        answer.slots, answer.pins, answer.copies_under_way
    ));
    for (name, value) in &answer.counters {
        lines.push(format!("  {name:<24}{value}"));
    }
    lines.join("\n")
}
