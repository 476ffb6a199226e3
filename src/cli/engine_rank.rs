//! `kvferry engine-rank`: one rank of the reference engine, started by `kvferry replay` and `kvferry bench move`.

use std::num::ParseIntError;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;

use crate::cli::common::block_on;
use crate::cli::program;
use crate::error::CommandError;
use kvferry_engine::rank::run;
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_engine::settings::{EngineDevice, EngineLayout, RankSettings};
use kvferry_transport::ZmqTransport;
use kvferry_types::{EngineId, Rank, Replica};
use kvferry_workload::models::{Model, units};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Arguments {
    #[arg(long)]
    pub(super) worker_dir: PathBuf,
    #[arg(long, value_parser = engine_id, value_name = "32 HEX DIGITS")]
    pub(super) engine: EngineId,
    #[arg(long)]
    pub(super) replica: u16,
    #[arg(long)]
    pub(super) rank: u16,
    #[arg(long)]
    pub(super) ranks: u16,
    #[arg(long)]
    pub(super) engine_page_tokens: u32,
    #[arg(long)]
    pub(super) device_pages: u32,
    #[arg(long)]
    pub(super) model: Model,
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: EngineDevice,
    #[arg(long)]
    pub(super) layout: EngineLayout,
    #[arg(long)]
    pub(super) start_limit_s: u64,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        crate::telemetry::start("warn")?;
        let settings = self.settings()?;
        block_on(1, async {
            let (orders, reports) = (tokio::io::stdin(), tokio::io::stdout());
            run(Arc::new(ZmqTransport), settings, orders, reports)
                .await
                .map_err(CommandError::failed)
        })
    }

    /// The settings of the rank.
    pub(super) fn settings(self) -> Result<RankSettings, CommandError> {
        let groups = self.model.groups(self.engine_page_tokens, self.ranks);
        let groups = groups.map_err(|error| CommandError::Config(error.to_string()))?;
        let (hash_tokens, hit_tokens) = units(&groups);
        let sharding = self.model.sharding(self.ranks);
        Ok(RankSettings {
            worker_dir: self.worker_dir,
            engine: self.engine,
            replica: Replica(self.replica),
            rank: Rank(self.rank),
            ranks: self.ranks,
            hash_tokens,
            hit_tokens,
            device_pages: self.device_pages,
            content: self.model.content(),
            groups,
            shard: sharding
                .map_err(|error| CommandError::Config(error.to_string()))?
                .of(Rank(self.rank)),
            device: self.device,
            layout: self.layout,
            start_limit: Duration::from_secs(self.start_limit_s),
        })
    }

    /// Starts the rank as a process, which registers by itself and ends with this one.
    pub(super) fn start(&self) -> Result<RankPipe, CommandError> {
        let layout = self.layout.to_possible_value();
        let device = self.device.to_possible_value();
        let mut child = program::command()
            .arg("engine-rank")
            .arg("--worker-dir")
            .arg(&self.worker_dir)
            .args(["--engine", &engine_text(self.engine)])
            .args(["--replica", &self.replica.to_string()])
            .args(["--rank", &self.rank.to_string()])
            .args(["--ranks", &self.ranks.to_string()])
            .args(["--engine-page-tokens", &self.engine_page_tokens.to_string()])
            .args(["--device-pages", &self.device_pages.to_string()])
            .args(["--model", &self.model.to_string()])
            .args([
                "--layout",
                layout.as_ref().map_or("", |layout| layout.get_name()),
            ])
            .args([
                "--device",
                device.as_ref().map_or("", |device| device.get_name()),
            ])
            .args(["--start-limit-s", &self.start_limit_s.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(CommandError::failed)?;
        let (Some(orders), Some(reports)) = (child.stdin.take(), child.stdout.take()) else {
            let text = "an engine rank has no pipes".to_owned();
            return Err(CommandError::Failed(text));
        };
        Ok(RankPipe {
            child,
            orders,
            reports,
        })
    }
}

fn engine_id(text: &str) -> Result<EngineId, ParseIntError> {
    let number = u128::from_str_radix(text, 16)?;
    Ok(EngineId(number.to_be_bytes()))
}

fn engine_text(engine: EngineId) -> String {
    format!("{:032x}", u128::from_be_bytes(engine.0))
}
