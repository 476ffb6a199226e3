//! Requests of operators to running processes: the filter of the log, and drains.

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{Running, kvferry, socket_dir};
use crate::{LIMIT, status_once};

/// Runs a command of an operator. Returns whether it succeeded, its output and its errors.
fn run(sockets: &str, arguments: &[&str]) -> (bool, String, String) {
    let output = kvferry(&[arguments, &["--socket-dir", sockets]].concat());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn an_operator_changes_the_log_of_every_process_and_drains_the_leader() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--ranks", "2", "--g2", "32MiB", "--log", "warn"];
    let up = Running::start(&[&up[..], &["--socket-dir", sockets]].concat());
    let named = |status: &Value, rank: usize| status["ranks"][rank]["pid"].as_u64() > Some(0);
    status_once(sockets, |status| named(status, 0) && named(status, 1));

    let (good, _, errors) = run(sockets, &["log", "kvferry=nonsense"]);
    assert!(
        !good && errors.contains("log filter is 'kvferry=nonsense'"),
        "{errors}"
    );
    let long = "a".repeat(1025);
    let (good, _, errors) = run(sockets, &["log", &long]);
    assert!(
        !good && errors.contains("has 1025 bytes: write at most 1024"),
        "{errors}"
    );
    for (filter, before) in [("info", "warn"), ("debug", "info")] {
        let (good, text, errors) = run(sockets, &["log", filter]);
        assert!(good, "{errors}");
        let lines: Vec<&str> = text.lines().collect();
        let expected = ["leader", "worker of rank 0", "worker of rank 1"]
            .map(|process| format!("{process}: {before} before, {filter} now"));
        assert_eq!(lines, expected);
    }

    for _ in 0..2 {
        let (good, text, errors) = run(sockets, &["drain"]);
        assert!(good && text.starts_with("drained"), "{text}{errors}");
        assert!(
            text.contains("refused until kvferry drain --resume"),
            "{text}"
        );
        let status = status_once(sockets, |_| true);
        assert_eq!(status["draining"], true);
        let (_, text, _) = run(sockets, &["status"]);
        assert!(text.contains("state        drains"), "{text}");
    }
    let (good, text, errors) = run(sockets, &["drain", "--resume"]);
    assert_eq!(
        (good, text.as_str()),
        (true, "requests are taken again\n"),
        "{errors}"
    );

    up.signal(Signal::TERM);
    let (code, errors) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    let changes = errors.matches("an operator has changed the filter of the log");
    assert_eq!(
        changes.count(),
        6,
        "two changes of three processes: {errors}"
    );
    assert!(errors.contains("DEBUG"), "{errors}");
    assert!(
        !errors.contains("leader ready"),
        "that came before the change: {errors}"
    );
    assert!(
        errors.contains("leader ended"),
        "that came after it: {errors}"
    );
}

#[test]
fn a_replay_with_a_running_up_takes_no_settings_of_it_and_reports_what_it_did_itself() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--ranks", "2", "--g2", "64MiB", "--ratio", "8"];
    let up = Running::start(&[&up[..], &["--socket-dir", sockets]].concat());
    status_once(sockets, |_| true);
    for flag in [["--ratio", "8"], ["--g2", "64MiB"], ["--g2-pages", "99"]] {
        let (good, _, errors) = run(sockets, &[&["replay"], &flag[..]].concat());
        assert!(!good && errors.contains(flag[0]), "{errors}");
        assert!(
            errors.contains("has no effect with --socket-dir"),
            "{errors}"
        );
    }
    let replay = [
        "replay",
        "--sequential",
        "--requests",
        "8",
        "--g1-pages",
        "0",
    ];
    let reports = [0, 1].map(|_| {
        let json = ["--quiet", "--json", "-"];
        let (good, text, errors) = run(sockets, &[&replay[..], &json].concat());
        assert!(good, "{errors}");
        serde_json::from_str::<Value>(&text).expect("a report")
    });
    let [first, second] = &reports;
    let stored = |report: &Value| report["blocks"]["stored"].as_u64();
    assert!(stored(first) > Some(0), "{first}");
    assert_eq!(stored(second), Some(0), "all was stored before: {second}");
    // The same lookups, and more hits.
    assert_eq!(second["bytes"]["scattered"], second["bytes"]["verified"]);
    assert_eq!(second["setup"]["ratio"], 8);

    for command in [&["reset", "--all"][..], &["drain"], &["drain", "--resume"]] {
        let (good, _, errors) = run(sockets, command);
        assert!(good, "{errors}");
    }
    up.signal(Signal::TERM);
    let (code, log) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{log}");
    for (line, times) in [
        ("engine gone", 2),
        ("a reset has removed pages", 1),
        ("drains, by order of an operator", 1),
        ("takes requests again", 1),
    ] {
        assert_eq!(log.matches(line).count(), times, "{line}: {log}");
    }
}
