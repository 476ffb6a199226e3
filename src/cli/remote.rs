//! Options for leaders and workers on different machines: addresses, and the credentials that they need.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::cli::socket_paths::SocketPaths;
use crate::error::CommandError;
use kvferry_transport::{
    Address, CertificateHolder, Credentials, Limits, Listener, TlsTransport, Transport,
    TransportError, ZmqTransport,
};

/// Longest wait for a connection before the first request, which waits on its own.
const TRUST_LIMIT: Duration = Duration::from_millis(250);

/// The address at which a leader listens for other machines.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ListenArguments {
    /// Listen at this address for workers and commands of other machines, too. Needs --credentials.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Credentials of the leader, a file that `kvferry keygen` wrote.
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
}

/// A listener for other machines, which cannot be made without credentials.
pub(super) struct RemoteListener {
    at: SocketAddr,
    transport: TlsTransport,
}

impl ListenArguments {
    pub(super) fn load(&self) -> Result<Option<RemoteListener>, CommandError> {
        let (at, file) = match (self.listen, &self.credentials) {
            (None, None) => return Ok(None),
            (Some(at), Some(file)) => (at, file),
            (Some(at), None) => return Err(without_credentials("listen", &at.to_string())),
            (None, Some(file)) => return Err(without_address("listen", file)),
        };
        let leader = |holder| holder == CertificateHolder::Leader;
        let transport = load(file, "the leader", leader)?;
        Ok(Some(RemoteListener { at, transport }))
    }
}

/// Listens in the leader's directory and, with `remote`, at an address for other machines.
pub(super) async fn listen(
    local: &Address,
    remote: Option<RemoteListener>,
    limits: Limits,
) -> Result<Listener, TransportError> {
    let Some(RemoteListener { at, transport }) = remote else {
        return ZmqTransport.listen(local, limits).await;
    };
    let listener = transport.listen_beside(local, at, limits).await?;
    tracing::info!(%at, "listens for other machines");
    Ok(listener)
}

/// The address of a leader on another machine.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct LeaderArguments {
    /// The leader is on another machine: the address that it was started with (--listen). Needs --credentials.
    #[arg(long, value_name = "HOST:PORT")]
    leader: Option<String>,
    /// Credentials of this process, a file that `kvferry keygen` wrote.
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
}

impl LeaderArguments {
    /// The place of the leader: at the address, or below the socket directory. `wanted` are the processes whose
    /// credentials fit, as `description` names them.
    pub(super) fn load(
        &self,
        socket_paths: &SocketPaths,
        description: &str,
        wanted: impl Fn(CertificateHolder) -> bool,
    ) -> Result<LeaderPlace, CommandError> {
        let (at, file) = match (&self.leader, &self.credentials) {
            (None, None) => return Ok(LeaderPlace::below(socket_paths)),
            (Some(at), Some(file)) => (at, file),
            (Some(at), None) => return Err(without_credentials("leader", at)),
            (None, Some(file)) => return Err(without_address("leader", file)),
        };
        place_at(at, file, description, wanted)
    }

    /// Whether an address of another machine is given.
    pub(super) fn is_given(&self) -> bool {
        self.leader.is_some() || self.credentials.is_some()
    }
}

/// The place of a leader on another machine. See [`LeaderArguments::load`].
pub(super) fn place_at(
    at: &str,
    file: &Path,
    description: &str,
    wanted: impl Fn(CertificateHolder) -> bool,
) -> Result<LeaderPlace, CommandError> {
    let valid = at.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if !valid {
        return Err(CommandError::Config(format!(
            "leader is {at:?}: give HOST:PORT, such as 10.0.0.1:7400"
        )));
    }
    let transport = load(file, description, wanted)?;
    Ok(LeaderPlace {
        transport: Arc::new(transport),
        address: Address::Tcp(at.to_owned()),
    })
}

/// How a leader is reached.
#[derive(Clone)]
pub(super) struct LeaderPlace {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: Address,
}

impl LeaderPlace {
    /// Fails if the certificates of both sides do not fit: no later attempt would succeed either.
    pub(super) async fn check_trust(&self) -> Result<(), CommandError> {
        if !matches!(self.address, Address::Tcp(_)) {
            return Ok(());
        }
        let connecting = self
            .transport
            .connect(&self.address, Limits::default(), TRUST_LIMIT);
        match connecting.await {
            Err(error @ TransportError::Untrusted { .. }) => Err(CommandError::failed(error)),
            // Whether it answers shows when it is asked.
            _ => Ok(()),
        }
    }

    /// The leader of this machine.
    pub(super) fn below(socket_paths: &SocketPaths) -> Self {
        Self {
            transport: Arc::new(ZmqTransport),
            address: socket_paths.leader_address(),
        }
    }
}

fn load(
    file: &Path,
    description: &str,
    wanted: impl Fn(CertificateHolder) -> bool,
) -> Result<TlsTransport, CommandError> {
    let credentials =
        Credentials::load(file).map_err(|error| CommandError::Config(error.to_string()))?;
    let claims = credentials.claims();
    if !wanted(claims.holder) {
        return Err(CommandError::Config(format!(
            "credentials {} are of {claims}: give those of {description}, which `kvferry keygen` wrote",
            file.display()
        )));
    }
    Ok(TlsTransport::new(credentials))
}

fn without_credentials(setting: &str, value: &str) -> CommandError {
    CommandError::Config(format!(
        "{setting} is {value}, without credentials: add --credentials FILE, a file that `kvferry keygen DIR` wrote"
    ))
}

fn without_address(setting: &str, file: &Path) -> CommandError {
    CommandError::Config(format!(
        "credentials is {}, without {setting}: add --{setting}, or leave --credentials out",
        file.display()
    ))
}
