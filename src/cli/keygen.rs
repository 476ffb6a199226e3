//! `kvferry keygen`

use std::path::PathBuf;

use crate::cli::common::print_line;
use crate::config::{RANKS_MAX, REPLICAS_MAX};
use crate::error::CommandError;
use kvferry_transport::{CertificateHolder, LEAF_DAYS, ROOT_DAYS, Root, Written};
use kvferry_types::{Rank, Replica, WorkerId};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Directory of the keys, created if it is missing. It stays with the operator.
    directory: PathBuf,
    /// Name of the deployment, which all certificates hold: 1 to 63 of a-z, 0-9 and -. Without it, that of the directory's
    /// root, and kvferry for a new one.
    #[arg(long, value_name = "NAME")]
    deployment: Option<String>,
    /// Ranks of an engine: one file for each worker.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(RANKS_MAX)))]
    ranks: u16,
    /// Engines of the leader.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(REPLICAS_MAX)))]
    replicas: u16,
    /// Days for which new certificates are valid.
    #[arg(long, value_name = "DAYS", default_value_t = LEAF_DAYS, value_parser = clap::value_parser!(u32).range(1..=i64::from(ROOT_DAYS)))]
    days: u32,
    /// Make new certificates and keys in place of those that are there. The root stays.
    #[arg(long)]
    renew: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let root = Root::open_or_make(&self.directory, self.deployment.as_deref())
            .map_err(CommandError::failed)?;
        let workers = (0..self.replicas).flat_map(|replica| {
            (0..self.ranks).map(move |rank| {
                CertificateHolder::Worker(WorkerId {
                    replica: Replica(replica),
                    rank: Rank(rank),
                })
            })
        });
        let others = [
            CertificateHolder::Leader,
            CertificateHolder::Admin,
            CertificateHolder::Monitor,
        ];
        for holder in others.into_iter().chain(workers) {
            let written = root
                .write(holder, self.days, self.renew)
                .map_err(CommandError::failed)?;
            print_line(&match written {
                Written::New(path) => {
                    format!("{} for {holder}, {} days", path.display(), self.days)
                }
                Written::Kept(path) => format!("{} kept", path.display()),
            });
        }
        print_line(&format!(
            "copy each file to the machine of its process, with mode 600; keep {} here",
            self.directory.join("root.key").display()
        ));
        Ok(())
    }
}
