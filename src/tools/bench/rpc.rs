//! `kvferry-tools bench rpc`

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvferry::cli::bench::{percentiles, rig};
use kvferry::cli::{block_on, print_line};
use kvferry::error::CommandError;
use kvferry_protocol::{ErrorCode, Lookup, Role};
use kvferry_transport::Client;

use super::rpc_hit;

/// Sizes of the page hashes in a request, in bytes.
const HASH_BYTES: [usize; 3] = [160, 4 << 10, 64 << 10];
/// Bytes of a bare request besides its hashes, and of an answer: about the size of header and fields.
const FRAME_BYTES: usize = 96;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Round trips of each kind.
    #[arg(long, default_value = "2000", value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One row of the result, in microseconds.
#[derive(Debug, serde::Serialize)]
struct RpcRow {
    hash_bytes: usize,
    socket_p50_us: f64,
    socket_p99_us: f64,
    leader_p50_us: f64,
    leader_p99_us: f64,
    leader_to_socket: f64,
}

#[derive(Debug, serde::Serialize)]
struct RpcReport {
    refused: Vec<RpcRow>,
    found: Vec<rpc_hit::HitRow>,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let report = block_on(1, self.measure_all())?;
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(
            "A lookup that a leader without ranks refuses at once, beside the same bytes over a bare socket.",
        );
        print_line("request    socket p50  p99      leader p50  p99      leader/socket");
        for row in report.refused {
            print_line(&format!(
                "{:>6} B  {:>8.1} us {:>6.1}  {:>8.1} us {:>6.1}  {:>13.2}",
                row.hash_bytes,
                row.socket_p50_us,
                row.socket_p99_us,
                row.leader_p50_us,
                row.leader_p99_us,
                row.leader_to_socket
            ));
        }
        print_line(
            "A lookup that a leader answers, beside a server that is busy as long as the core's step takes in the leader.",
        );
        print_line(rpc_hit::HitRow::heading());
        for row in report.found {
            print_line(&row.text());
        }
        Ok(())
    }

    async fn measure_all(&self) -> Result<RpcReport, CommandError> {
        let folder = rig::folder()?;
        let leader = [
            "kvferry",
            "leader",
            "--supervised",
            "--log",
            "warn",
            "--socket-dir",
        ];
        let mut leader = rig::process(&leader, folder.path())?;
        let (client, mut incoming) =
            rig::client(rpc_hit::leader_address(folder.path()), Role::Engine);
        tokio::spawn(async move { while incoming.recv().await.is_some() {} });
        let mut rows = Vec::new();
        for hash_bytes in HASH_BYTES {
            rows.push(self.measure(&client, hash_bytes).await?);
        }
        let busy = folder.path().join("busy");
        let found = rpc_hit::measure(&client, folder.path(), &busy, self.rounds).await?;
        leader.kill().await.map_err(CommandError::failed)?;
        Ok(RpcReport {
            refused: rows,
            found,
        })
    }

    /// Measures both sides in turn, one round trip each.
    async fn measure(&self, client: &Client, hash_bytes: usize) -> Result<RpcRow, CommandError> {
        let (mut near, far) = UnixStream::pair().map_err(CommandError::failed)?;
        let echo = std::thread::spawn(move || echo(far, hash_bytes + FRAME_BYTES));
        let (mut socket, mut leader) = (Vec::new(), Vec::new());
        let warm_up = self.rounds / 10;
        for round in 0..self.rounds + warm_up {
            let begun = Instant::now();
            bare(&mut near, hash_bytes).map_err(CommandError::failed)?;
            let bare_us = begun.elapsed().as_secs_f64() * 1e6;
            let begun = Instant::now();
            refused_lookup(client, hash_bytes).await?;
            if round >= warm_up {
                socket.push(bare_us);
                leader.push(begun.elapsed().as_secs_f64() * 1e6);
            }
        }
        drop(near);
        if echo.join().is_err() {
            return Err(CommandError::Failed("the echo thread panicked".to_owned()));
        }
        let (socket_p50_us, socket_p99_us) = percentiles(socket);
        let (leader_p50_us, leader_p99_us) = percentiles(leader);
        let leader_to_socket = leader_p50_us / socket_p50_us;
        Ok(RpcRow {
            hash_bytes,
            socket_p50_us,
            socket_p99_us,
            leader_p50_us,
            leader_p99_us,
            leader_to_socket,
        })
    }
}

/// A lookup with this many bytes of hashes.
pub(super) fn lookup(hash_bytes: usize) -> Lookup {
    Lookup {
        slot: 1,
        namespace: Vec::new(),
        hash_bytes: 16,
        hashes: vec![1; hash_bytes],
        have_pages: 0,
        limit_pages: None,
    }
}

pub(super) async fn refused_lookup(client: &Client, hash_bytes: usize) -> Result<(), CommandError> {
    match client
        .call(lookup(hash_bytes), Duration::from_secs(10))
        .await
    {
        Err(failure) if failure.code == ErrorCode::NotReady => Ok(()),
        Err(failure) => Err(CommandError::failed(failure)),
        Ok(answer) => Err(CommandError::Failed(format!("unexpected {answer:?}"))),
    }
}

fn bare(stream: &mut UnixStream, hash_bytes: usize) -> std::io::Result<()> {
    stream.write_all(&vec![1; hash_bytes + FRAME_BYTES])?;
    stream.read_exact(&mut [0; FRAME_BYTES])
}

fn echo(mut stream: UnixStream, request_bytes: usize) {
    let mut request = vec![0; request_bytes];
    while stream.read_exact(&mut request).is_ok() {
        if stream.write_all(&[2; FRAME_BYTES]).is_err() {
            return;
        }
    }
}
