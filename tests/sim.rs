//! The `sim` command: the meaning of a seed does not depend on the process that runs it.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

use std::process::Command;

fn run(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry-tools"))
        .arg("sim")
        .args(arguments)
        .output()
        .expect("the program runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    (output.status.success(), text)
}

/// The output without the lines that give a duration.
fn story(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.ends_with(" s")).collect()
}

#[test]
fn the_same_seeds_give_the_same_runs_in_every_process_and_in_any_order() {
    let (good, first) = run(&["--seeds", "0..24", "--steps", "1500", "--jobs", "1"]);
    assert!(good, "{first}");
    let (good, second) = run(&["--seeds", "0..24", "--steps", "1500", "--jobs", "2"]);
    assert!(good, "{second}");
    assert_eq!(story(&first), story(&second));
    let (_, other) = run(&["--seeds", "24..48", "--steps", "1500"]);
    assert_ne!(story(&first)[0], story(&other)[0]);
}

#[test]
fn invalid_seed_ranges_are_refused() {
    for seeds in ["5..5", "7..3", "a..b", "3"] {
        let (good, _) = run(&["--seeds", seeds]);
        assert!(!good, "{seeds}");
    }
}
