//! Metrics and health of running processes, also of stopped and killed ones.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvferry::cli::monitor::METRICS;
use kvferry_protocol::ErrorCode;
use rustix::process::Signal;

use super::beside::on_two_threads;
use super::disturbed::LIMIT;
use super::engine::{PROMPT_PAGES, World};
use super::processes::{child_named, signal, stop};
use crate::support::kvferry;

/// Longest time between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// A port that was free just now.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Requests a page. Returns the status and the text; `None` if nothing listens, or the connection broke.
pub fn request(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(LIMIT)).expect("above 0");
    let request = format!("GET {path} HTTP/1.1\r\nhost: kvferry\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, text) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, text.to_owned()))
}

/// Requests a page on a thread of its own, until its answer is as expected.
async fn until(port: u16, path: &'static str, expected: impl Fn(u16, &str) -> bool) -> String {
    let begun = Instant::now();
    loop {
        let asked = tokio::task::spawn_blocking(move || request(port, path));
        let answer = asked.await.expect("no panic");
        if let Some((status, text)) = &answer
            && expected(*status, text)
        {
            return text.clone();
        }
        assert!(begun.elapsed() < LIMIT, "{path}: {answer:?}");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn is_ready(port: u16) {
    let text = until(port, "/readyz", |status, _| status == 200).await;
    for line in [
        "leader: ok, a page was looked up in 1 tiers",
        "worker-0-0: ok, 4096 bytes copied",
    ] {
        assert!(text.lines().any(|one| one == line), "{text}");
    }
}

/// Waits until `up` has started a process again.
async fn is_replaced(world: &World, command: &str, before: u64) {
    let begun = Instant::now();
    while child_named(world.up(), command) == before {
        assert!(begun.elapsed() < LIMIT, "{command} is not started again");
        tokio::time::sleep(PAUSE).await;
    }
}

/// A leader, a worker and an engine, with a monitor on a port.
async fn start() -> (World, u16) {
    let port = free_port();
    let world = World::start_with(&["--monitor", &port.to_string()]).await;
    (world, port)
}

/// The value of a series.
fn value(text: &str, series: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    let value = line.and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("{series} in {text}"))
}

#[test]
fn what_is_exposed_is_what_is_listed_and_what_the_status_says_at_rest() {
    on_two_threads(async {
        let (mut world, port) = start().await;
        for prompt in 0..2 {
            world.store(prompt).await;
            assert_eq!(world.found(prompt).await, PROMPT_PAGES);
        }
        let status = world.status(false).await.expect("a status");
        let lookups = status.counters["lookups"];
        let is_fresh =
            |_, text: &str| text.contains(&format!("\nkvferry_lookups_total {lookups}\n"));
        let text = until(port, "/metrics", is_fresh).await;
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let exposed: BTreeSet<String> = types.map(str::to_owned).collect();
        let listed = METRICS
            .iter()
            .map(|metric| format!("{} {}", metric.name, metric.kind.name()));
        assert_eq!(exposed, listed.collect::<BTreeSet<_>>());
        let counters = [
            ("kvferry_lookups_total", "lookups"),
            ("kvferry_lookup_pages_total", "lookup_pages"),
            ("kvferry_hit_pages_total", "hit_pages"),
            ("kvferry_hit_tokens_total", "hit_tokens"),
            (
                "kvferry_group_hit_tokens_total{tier=\"g2\",group=\"0\"}",
                "hit_tokens",
            ),
            ("kvferry_stores_total{end=\"done\"}", "stores_done"),
            ("kvferry_published_pages_total", "published_pages"),
            ("kvferry_stored_blocks_total", "blocks_stored"),
            ("kvferry_gathered_bytes_total", "gathered_bytes"),
            (
                "kvferry_copied_bytes_total{process=\"worker-0-0\",from=\"g1\",to=\"g2\"}",
                "gathered_bytes",
            ),
            ("kvferry_expired_total{what=\"holds\"}", "expired_holds"),
            (
                "kvferry_refusals_total{request=\"loads\",reason=\"busy\"}",
                "refused_loads_busy",
            ),
        ];
        for (series, counter) in counters {
            assert_eq!(value(&text, series), status.counters[counter], "{series}");
        }
        assert!(status.counters["gathered_bytes"] > 0);
        let copies =
            "kvferry_copies_total{process=\"worker-0-0\",from=\"g1\",to=\"g2\",end=\"complete\"}";
        let timed = "kvferry_copy_seconds_count{process=\"worker-0-0\",from=\"g1\",to=\"g2\"}";
        assert!(value(&text, copies) > 0);
        assert_eq!(value(&text, copies), value(&text, timed));
        let pages = "kvferry_tier_pages{tier=\"g2\",state=\"ready\"}";
        assert_eq!(value(&text, pages), u64::from(2 * PROMPT_PAGES));
        for series in [
            "kvferry_up{process=\"leader\"}",
            "kvferry_up{process=\"worker-0-0\"}",
            "kvferry_ready",
            "kvferry_worker_attached{process=\"worker-0-0\"}",
            "kvferry_connected_peers{process=\"leader\",role=\"engine\"}",
            "kvferry_connected_peers{process=\"leader\",role=\"worker\"}",
            "kvferry_connected_peers{process=\"worker-0-0\",role=\"rank\"}",
            "kvferry_connected_peers{process=\"worker-0-0\",role=\"admin\"}",
        ] {
            assert_eq!(value(&text, series), 1, "{series}");
        }
    });
}

#[test]
fn health_fails_and_names_the_process_while_it_stands_still_or_is_dead() {
    on_two_threads(async {
        let (world, port) = start().await;
        is_ready(port).await;
        until(port, "/livez", |status, text| {
            status == 200 && text.contains("leader: ok")
        })
        .await;

        let worker = child_named(world.up(), "worker");
        stop(worker);
        until(port, "/readyz", |status, text| {
            status == 503 && text.contains("worker-0-0: failed: ") && text.contains("leader: ok")
        })
        .await;
        until(port, "/livez", |status, _| status == 200).await;
        signal(worker, Signal::CONT);
        is_ready(port).await;

        let leader = child_named(world.up(), "leader");
        stop(leader);
        for path in ["/livez", "/readyz"] {
            until(port, path, |status, text| {
                status == 503 && text.contains("leader: failed: ")
            })
            .await;
        }
        until(port, "/metrics", |status, text| {
            status == 200 && text.contains("\nkvferry_up{process=\"leader\"} 0\n")
        })
        .await;
        signal(leader, Signal::CONT);
        is_ready(port).await;

        // The connections of engine and monitor outlive the socket.
        let socket = world.sockets().join("leader/kvferry.sock");
        std::fs::remove_file(socket).expect("removed");
        for path in ["/livez", "/startupz"] {
            until(port, path, |status, text| {
                status == 503 && text.contains("leader: failed: the socket in ")
            })
            .await;
        }
    });
}

#[test]
fn health_fails_for_a_worker_without_its_engine_and_recovers_after_kills() {
    on_two_threads(async {
        let (mut world, port) = start().await;
        is_ready(port).await;

        // A new worker has no engine until the rank registers again.
        let (worker, rank) = (child_named(world.up(), "worker"), world.rank_pid());
        stop(rank);
        signal(worker, Signal::KILL);
        until(port, "/readyz", |status, text| {
            status == 503 && text.contains("worker-0-0: failed: not attached: waits for its engine")
        })
        .await;
        is_replaced(&world, "worker", worker).await;
        signal(rank, Signal::CONT);
        is_ready(port).await;

        let leader = child_named(world.up(), "leader");
        signal(leader, Signal::KILL);
        is_replaced(&world, "leader", leader).await;
        is_ready(port).await;

        // The socket of the monitor outlives it.
        let monitor = child_named(world.up(), "monitor");
        signal(monitor, Signal::KILL);
        is_replaced(&world, "monitor", monitor).await;
        is_ready(port).await;

        world.end_rank().await;
        until(port, "/readyz", |status, text| {
            status == 503
                && text.contains("worker-0-0: failed: not attached: waits for its engine")
                && text.contains("leader: failed: no engine is served")
        })
        .await;
        until(port, "/livez", |status, _| status == 200).await;
        // What an engine may wait for before it starts.
        until(port, "/startupz", |status, text| {
            status == 200 && text.contains("worker-0-0: ok, ")
        })
        .await;
        let worker = child_named(world.up(), "worker");
        stop(worker);
        until(port, "/startupz", |status, text| {
            status == 503 && text.contains("worker-0-0: failed: ") && text.contains("leader: ok")
        })
        .await;
        signal(worker, Signal::CONT);
        until(port, "/startupz", |status, _| status == 200).await;
    });
}

/// Runs `kvferry drain`. Returns whether it succeeded, its output and its errors.
async fn drain(world: &World, arguments: &'static [&str]) -> (bool, String, String) {
    let sockets = world.sockets().to_str().expect("UTF-8").to_owned();
    let run = move || kvferry(&[&["drain", "--socket-dir", &sockets], arguments].concat());
    let output = tokio::task::spawn_blocking(run).await.expect("no panic");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn a_drained_leader_refuses_lookups_and_is_not_ready_until_it_resumes() {
    on_two_threads(async {
        let (mut world, port) = start().await;
        world.store(0).await;
        is_ready(port).await;
        // A store is awaited until its engine has written its pages.
        let store = world.begin_store(1).await;
        let (good, _, errors) = drain(&world, &["--timeout", "1"]).await;
        assert!(!good, "a store runs");
        for text in ["draining: 0 loads, 1 stores and ", "not drained after 1s"] {
            assert!(errors.contains(text), "{errors}");
        }
        world.end_store(store).await;
        let (good, text, errors) = drain(&world, &[]).await;
        assert!(good && text.starts_with("drained"), "{text}{errors}");

        assert_eq!(world.refused(0).await, ErrorCode::Draining);
        until(port, "/readyz", |status, text| {
            status == 503 && text.contains("leader: failed: draining")
        })
        .await;
        until(port, "/livez", |status, _| status == 200).await;
        until(port, "/metrics", |_, text| {
            text.contains("\nkvferry_draining 1\n")
        })
        .await;
        let (good, text, errors) = drain(&world, &["--resume"]).await;
        assert_eq!(
            (good, text.as_str()),
            (true, "requests are taken again\n"),
            "{errors}"
        );
        is_ready(port).await;
        assert_eq!(world.found(0).await, PROMPT_PAGES);
    });
}
