//! `kvferry engine-rank`: one rank of the reference engine, started by `kvferry replay`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cli::block_on;
use crate::engine::layout::EngineLayout;
use crate::engine::models::Model;
use crate::engine::rank::{RankSettings, run};
use crate::error::CommandError;
use crate::transport::ZmqTransport;
use crate::types::{EngineId, Rank, Replica};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[arg(long)]
    worker_dir: PathBuf,
    /// 32 hexadecimal digits.
    #[arg(long)]
    engine: String,
    #[arg(long)]
    replica: u16,
    #[arg(long)]
    rank: u16,
    #[arg(long)]
    ranks: u16,
    #[arg(long)]
    engine_page_tokens: u32,
    #[arg(long)]
    device_pages: u32,
    #[arg(long)]
    model: Model,
    #[arg(long)]
    layout: EngineLayout,
    #[arg(long)]
    start_limit_s: u64,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        crate::telemetry::start("warn").map_err(CommandError::Config)?;
        let engine = u128::from_str_radix(&self.engine, 16).map_err(|_| {
            CommandError::Config(format!(
                "engine is '{}': 32 hexadecimal digits",
                self.engine
            ))
        })?;
        let geometry = self.model.geometry(self.engine_page_tokens, self.ranks);
        let sharding = self.model.sharding(self.ranks);
        let settings = RankSettings {
            worker_dir: self.worker_dir,
            engine: EngineId(engine.to_be_bytes()),
            replica: Replica(self.replica),
            rank: Rank(self.rank),
            ranks: self.ranks,
            engine_page_tokens: self.engine_page_tokens,
            device_pages: self.device_pages,
            geometry: geometry.map_err(|error| CommandError::Config(error.to_string()))?,
            shard: sharding
                .map_err(|error| CommandError::Config(error.to_string()))?
                .of(Rank(self.rank)),
            layout: self.layout,
            start_limit: Duration::from_secs(self.start_limit_s),
        };
        block_on(1, async {
            let (orders, reports) = (tokio::io::stdin(), tokio::io::stdout());
            run(Arc::new(ZmqTransport), settings, orders, reports)
                .await
                .map_err(CommandError::Failed)
        })
    }
}
