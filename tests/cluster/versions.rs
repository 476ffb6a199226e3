//! Processes of two versions of the protocol side by side: `wire_max = 1` makes this program speak like an older one.

use super::disturbed::LIMIT;
use super::recovery::status_of;
use crate::support::{Running, number, replay, socket_dir};

/// The versions of the leader, and of the workers of two ranks.
const FLEETS: [(u16, [u16; 2]); 4] = [(1, [2, 2]), (2, [1, 1]), (2, [1, 2]), (1, [1, 1])];

#[test]
fn a_fleet_of_two_versions_stores_and_loads_every_byte() {
    for (leader, workers) in FLEETS {
        let folder = socket_dir();
        let sockets = folder.path().to_str().expect("UTF-8");
        let log = "info,kvferry_session=debug";
        let common = [
            "--ranks",
            "2",
            "--g2",
            "64MiB",
            "--socket-dir",
            sockets,
            "--log",
            log,
        ];
        let started = |arguments: &[&str], version: u16| {
            let version = version.to_string();
            Running::start(&[arguments, &["--wire-max", &version], &common].concat())
        };
        let mut processes = vec![(leader, started(&["leader"], leader))];
        for (rank, version) in workers.iter().enumerate() {
            let rank = rank.to_string();
            processes.push((*version, started(&["worker", "--rank", &rank], *version)));
        }
        status_of(sockets, |status| {
            let ranks = status["ranks"].as_array();
            ranks.is_some_and(|ranks| ranks.iter().all(|rank| rank["pid"] != 0))
        });
        // Without pages of the device, everything that was computed before is loaded.
        let arguments = ["--requests", "30", "--g1-pages", "0"];
        let report = replay(&[&arguments[..], &["--ranks", "2", "--socket-dir", sockets]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        assert!(number(&report, "/tokens/hit_g2") > 0, "nothing was loaded");

        for (number, (own, process)) in processes.into_iter().enumerate() {
            process.terminate();
            let (status, log) = process.end(LIMIT);
            assert_eq!(status, Some(0), "{log}");
            // A leader is asked by the engine and by both workers, a worker by its rank.
            let mut agreed: Vec<String> = Vec::new();
            for line in log.lines().filter(|line| line.contains("welcomed")) {
                agreed.extend(
                    line.split_whitespace()
                        .filter(|word| word.starts_with("version="))
                        .map(str::to_owned),
                );
            }
            let of_workers = workers.map(|worker| format!("version={}", own.min(worker)));
            match number {
                0 => {
                    for version in of_workers {
                        assert!(agreed.contains(&version), "{leader} {workers:?}: {log}");
                    }
                }
                _ => {
                    let version = format!("version={own}");
                    assert!(
                        !agreed.is_empty() && agreed.iter().all(|each| *each == version),
                        "{log}"
                    );
                }
            }
        }
    }
}
