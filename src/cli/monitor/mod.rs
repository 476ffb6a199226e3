//! `kvferry monitor`: metrics and health of a leader and its workers, over HTTP.
//!
//! A process of its own, which `up` starts where the setting `monitor` names an address. It connects to every process as
//! an operator, so that its answers come from the path that requests of engines take, and so that no leader or worker
//! listens on a network ([reasons](../../../docs/adr/0035-a-monitor-of-its-own.md)).

mod health;
mod http;
mod list;
mod metric;
mod once;
mod reading;
mod sources;
mod text;

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::net::TcpListener;

use crate::cli::arguments::ConfigArguments;
use crate::cli::common::{block_on, open_as_many_files_as_allowed};
use crate::cli::shutdown::{EndedBy, Ending, end_with_supervisor};
use crate::error::CommandError;
use http::Page;
pub use list::{METRICS, metrics_catalogue};
pub use metric::{LABELS, LEADER_SERIES_MAX, Label, Metric, MetricKind, WORKER_SERIES_MAX};
use once::OnceASecond;
use reading::Deployment;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Standard output is the listening socket of a supervisor, which stays open while this process starts again.
    #[arg(long, hide = true)]
    inherits_socket: bool,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    supervised: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let config = self.config.load()?;
        end_with_supervisor(self.supervised)?;
        open_as_many_files_as_allowed();
        block_on(1, async move {
            let mut ending = Ending::listen(EndedBy::child(self.supervised))?;
            let listener = match (self.inherits_socket, config.monitor.0) {
                (true, _) => inherited().map_err(CommandError::failed)?,
                (false, Some(address)) => listen(address, std::net::TcpListener::bind)?,
                (false, None) => {
                    let text = "monitor is off: give --monitor ADDRESS, such as --monitor 9464";
                    return Err(CommandError::Config(text.to_owned()));
                }
            };
            let listener = TcpListener::from_std(listener).map_err(CommandError::failed)?;
            let address = listener.local_addr().map_err(CommandError::failed)?;
            let pages = Arc::new(Pages {
                deployment: Deployment::connect(&config, self.supervised),
                metrics: OnceASecond::new(),
                started: OnceASecond::new(),
                live: OnceASecond::new(),
                ready: OnceASecond::new(),
            });
            tracing::info!(%address, "monitor ready");
            tokio::select! {
                () = ending.requested() => {}
                () = http::serve(listener, move |path| {
                    let pages = Arc::clone(&pages);
                    async move { pages.page(&path).await }
                }) => {}
            }
            tracing::info!("monitor ended");
            Ok(())
        })
    }
}

/// Listens on an address of the settings, with a socket that `bind` makes.
pub(super) fn listen(
    address: SocketAddr,
    bind: impl FnOnce(SocketAddr) -> std::io::Result<std::net::TcpListener>,
) -> Result<std::net::TcpListener, CommandError> {
    let failed = |error: std::io::Error| {
        CommandError::Config(format!(
            "monitor is {address}: {error}; name an address of this host and a port that no other process uses"
        ))
    };
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "metrics and health can be read from other hosts, without authentication");
    }
    let listener = bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// The socket of a supervisor, passed as standard output, because standard input tells when to end.
fn inherited() -> std::io::Result<std::net::TcpListener> {
    let socket = std::io::stdout().as_fd().try_clone_to_owned()?;
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

const PAGES: &str = "kvferry: /metrics, /startupz, /livez and /readyz\n";

/// The pages that are served, each made at most once a second.
struct Pages {
    deployment: Deployment,
    metrics: OnceASecond<String>,
    started: OnceASecond<health::Health>,
    live: OnceASecond<health::Health>,
    ready: OnceASecond<health::Health>,
}

impl Pages {
    async fn page(&self, path: &str) -> Page {
        match path {
            "/" => Page::plain(StatusCode::OK, PAGES),
            "/metrics" => {
                let read = async {
                    let text = text::text(self.deployment.read().await);
                    text.unwrap_or_else(|error| format!("# {error}\n"))
                };
                let (_, text) = self.metrics.get(read).await;
                Page {
                    status: StatusCode::OK,
                    content_type: text::CONTENT_TYPE,
                    text: text.as_ref().clone(),
                }
            }
            "/startupz" => of_health(self.started.get(health::started(&self.deployment)).await),
            "/livez" => of_health(self.live.get(health::live(&self.deployment)).await),
            "/readyz" => of_health(self.ready.get(health::ready(&self.deployment)).await),
            _ => Page::plain(StatusCode::NOT_FOUND, PAGES),
        }
    }
}

fn of_health((age, health): (Duration, Arc<health::Health>)) -> Page {
    let status = match health.is_good() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    Page::plain(
        status,
        format!("{health}checked {} ms ago\n", age.as_millis()),
    )
}
