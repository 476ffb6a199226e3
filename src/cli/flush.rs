//! `kvferry flush`

use std::time::Duration;

use crate::cli::arguments::ClientArguments;
use crate::cli::common::{block_on, print_line};
use crate::cli::status;
use crate::error::CommandError;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    client: ClientArguments,
    /// Seconds after which the command gives up; the leader goes on moving pages.
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=120))]
    timeout: u64,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let (_, place) = self.client.load()?;
        let limit = Duration::from_secs(self.timeout);
        let pages = block_on(1, async move {
            // Fails sooner, and with a better error, when no leader runs.
            status::request_at(&place, false).await?;
            let flushed = status::admin_at(&place, "flush").flush(limit).await;
            flushed.map_err(CommandError::failed)
        })?;
        print_line(&format!("{pages} pages are durable on the disk"));
        Ok(())
    }
}
