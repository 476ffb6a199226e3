//! Arguments that several commands have: where the settings come from, and where the leader is.

use std::path::PathBuf;

use super::remote::{LeaderArguments, LeaderPlace};
use super::socket_paths::SocketPaths;
use crate::config::{Config, Flags};
use crate::error::CommandError;
use kvferry_transport::CertificateHolder;

/// Sources of the settings.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ConfigArguments {
    /// A TOML file with settings; the environment (KVFERRY_RATIO=32) and flags override it.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    #[command(flatten)]
    pub(super) flags: Flags,
}

impl ConfigArguments {
    /// Loads and checks the settings, and starts logging with them.
    pub(super) fn load(mut self) -> Result<Config, CommandError> {
        let paths = [&mut self.flags.socket_dir, &mut self.flags.namespaces];
        // `absolute` refuses an empty path, which means none.
        for path in paths.into_iter().flatten() {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        let config = Config::load(self.config.as_deref(), &self.flags)?;
        crate::telemetry::start(&config.log)?;
        Ok(config)
    }
}

/// Settings of a command that only connects to a running leader of this machine.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct LocalArguments {
    /// A TOML file with settings, that of `kvferry up`; the environment (KVFERRY_SOCKET_DIR=/run/kvf) and flags
    /// override it.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Directory of the sockets, that of `kvferry up`.
    #[arg(long, value_name = "DIR")]
    pub(super) socket_dir: Option<PathBuf>,
}

impl LocalArguments {
    /// Loads and checks the settings, starts logging of warnings, and returns the paths of the sockets.
    pub(super) fn load(self) -> Result<SocketPaths, CommandError> {
        let flags = Flags {
            socket_dir: self.socket_dir,
            log: Some("warn".to_owned()),
            ..Flags::default()
        };
        let config = self.config;
        let config = ConfigArguments { config, flags }.load()?;
        Ok(SocketPaths::new(&config.socket_dir))
    }
}

/// Settings of a command that only connects to a running leader.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ClientArguments {
    /// A TOML file with settings, that of `kvferry up`; the environment (KVFERRY_SOCKET_DIR=/run/kvf) and flags
    /// override it.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Directory of the sockets, that of `kvferry up`.
    #[arg(long, value_name = "DIR")]
    pub(super) socket_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(super) leader: LeaderArguments,
    /// Filter of the log, such as info,kvferry=debug.
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    pub(super) log: String,
}

impl ClientArguments {
    /// Loads and checks the settings, starts logging, and returns the paths of the sockets and the place of the leader.
    pub(super) fn load(self) -> Result<(SocketPaths, LeaderPlace), CommandError> {
        let flags = Flags {
            socket_dir: self.socket_dir,
            log: Some(self.log),
            ..Flags::default()
        };
        let config = self.config;
        let config = ConfigArguments { config, flags }.load()?;
        let socket_paths = SocketPaths::new(&config.socket_dir);
        let wanted = |holder| {
            matches!(
                holder,
                CertificateHolder::Admin | CertificateHolder::Monitor
            )
        };
        let place = self
            .leader
            .load(&socket_paths, "an admin or a monitor", wanted)?;
        Ok((socket_paths, place))
    }
}
