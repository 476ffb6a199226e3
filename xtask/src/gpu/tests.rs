//! The script of the pack, run with fake programs.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// A pack whose programs are scripts. Removed when dropped.
struct Pack(PathBuf);

impl Pack {
    fn new(name: &str, program: &str, tests: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("tests")).expect("a folder");
        for (name, text) in SCRIPTS {
            fs::write(folder.join(name), text).expect("written");
        }
        for (name, text) in [
            ("kvferry", program),
            ("tests/library", tests),
            ("tests/cluster", tests),
        ] {
            let path = folder.join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        }
        Self(folder)
    }

    /// Runs the script. Returns its exit code, and the lines of the table.
    fn run(&self, arguments: &[&str]) -> (Option<i32>, Vec<String>) {
        self.run_with(arguments, &[])
    }

    fn run_with(
        &self,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> (Option<i32>, Vec<String>) {
        let mut script = Command::new("bash");
        script.arg(self.0.join("run.sh")).args(arguments);
        script.envs(variables.iter().copied());
        let output = script.output().expect("bash");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let (_, table) = said.rsplit_once("\nstep ").unwrap_or_else(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            panic!("no table in {said}{errors}")
        });
        let rows = table.lines().skip(1).map(str::to_owned).collect();
        (output.status.code(), rows)
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("removed");
    }
}

/// The first words of the row of a step.
fn row<'a>(rows: &'a [String], step: &str) -> Vec<&'a str> {
    let rows = rows
        .iter()
        .map(|row| row.split_whitespace().collect::<Vec<_>>());
    let mut found = rows.filter(|row| row.first() == Some(&step));
    found.next().unwrap_or_else(|| panic!("no row of {step}"))
}

const LISTS_AND_PASSES: &str = r#"case "$*" in
    *--list*) echo "some: test" ;;
    *) echo "test result: ok. 3 passed; 0 failed; 0 ignored" ;;
esac"#;

#[test]
fn a_step_that_fails_ends_no_other() {
    let program = r#"case "$*" in
        *"--mib 8 "*) echo "no driver" >&2; exit 7 ;;
        *) echo "2048 KiB  store       24.10 ( 23.90.. 24.30)  20.00 ( 19.00.. 21.00)  -  0.83" ;;
    esac"#;
    let pack = Pack::new("fails", program, LISTS_AND_PASSES);
    let (code, rows) = pack.run(&["--driver-for-tests"]);
    assert_eq!(code, Some(1), "{rows:?}");
    assert_eq!(row(&rows, "smoke")[2], "7");
    assert_eq!(row(&rows, "ipc")[2..], ["0", "3", "passed;", "0", "failed"]);
    for step in ["engine", "chunks", "copies", "death", "small", "batches"] {
        assert_eq!(row(&rows, step)[2], "0", "{step}");
    }
    let link = row(&rows, "link").join(" ");
    assert!(
        link.ends_with("0 2048 KiB store: one copy 24.10, async 20.00, batch - GB/s"),
        "{link}"
    );
    row(&rows, "near");
}

#[test]
fn missing_tests_are_a_failure() {
    let nothing = r#"echo "test result: ok. 0 passed; 0 failed; 0 ignored""#;
    let pack = Pack::new("nothing", "true", nothing);
    let (code, rows) = pack.run(&["--driver-for-tests", "--more"]);
    assert_eq!(code, Some(1));
    for step in ["processes", "seeds"] {
        assert_eq!(row(&rows, step)[2], "4", "{step}");
    }
    assert_eq!(row(&rows, "replay")[2], "0");
    row(&rows, "vllm");
}

/// A `python3` that finds everything that is imported, and fails for one of the models.
const PYTHON: &str = r#"#!/bin/sh
case "$*" in
    *current_platform*) exit 0 ;;
    *gemma3) echo "vllm check gemma3"; echo "vllm FAILED: a rule"; exit 1 ;;
    *) [ -d "$PYTHONPATH" ] && [ -x "$3" ] && echo "vllm check $5" ;;
esac"#;

#[test]
fn one_model_that_fails_fails_the_step_and_leaves_out_no_other() {
    let pack = Pack::new("with vllm", "true", LISTS_AND_PASSES);
    let folder = pack.0.join("python");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("python3"), PYTHON).expect("written");
    fs::set_permissions(folder.join("python3"), fs::Permissions::from_mode(0o755))
        .expect("a program");
    let path = std::env::var("PATH").expect("a path");
    let path = format!("{}:{path}", folder.display());
    let (code, rows) = pack.run_with(&["--more"], &[("PATH", &path), ("PYTHONPATH", "")]);
    assert_eq!(code, Some(1), "{rows:?}");
    assert_eq!(
        row(&rows, "vllm")[2..],
        ["1", "vllm", "check", "llama"],
        "{rows:?}"
    );
    let at = rows.iter().position(|row| row.starts_with("vllm "));
    let more = &rows[at.expect("the step's row") + 1..];
    assert!(more[0].ends_with("vllm check gemma3"), "{rows:?}");
    assert!(more[1].ends_with("vllm FAILED: a rule"), "{rows:?}");
    assert_eq!(row(&rows, "processes")[2], "0");
}

#[test]
fn the_package_is_copied_with_its_folders() {
    let to = std::env::temp_dir().join(format!("kvferry-modules-{}", std::process::id()));
    copy_modules(&root().join(PACKAGE), &to).expect("copied");
    for module in ["__init__.py", "rank.py", "vllm/__init__.py"] {
        assert!(to.join(module).is_file(), "{module}");
    }
    assert!(!to.join("py.typed").exists(), "only modules are copied");
    fs::remove_dir_all(to).expect("removed");
}

#[test]
fn the_limits_of_a_run_end_before_its_total() {
    let script = include_str!("../../gpu/run.sh");
    for run in ["first_run", "second_run"] {
        let (_, body) = script.split_once(&format!("{run}() {{")).expect(run);
        let (body, _) = body.split_once("\n}").expect("an end");
        let limits = body.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let step = words.next() == Some("step");
            step.then(|| words.nth(1).and_then(|limit| limit.parse::<u32>().ok()))
        });
        let limits: Vec<u32> = limits.map(|limit| limit.expect("a limit")).collect();
        assert!(limits.len() > 5, "{limits:?}");
        assert!(limits.iter().sum::<u32>() < 600, "{run}: {limits:?}");
    }
}

#[test]
fn a_name_without_a_known_compression_is_refused_before_anything_is_built() {
    let refused = run(&["--pack".to_owned(), "pack.zip".to_owned()]).expect_err("zip");
    assert!(
        refused.contains("pack.zip") && refused.contains(".tar.gz"),
        "{refused}"
    );
    let refused = run(&["--park".to_owned()]).expect_err("a typing error");
    assert!(refused.contains("--pack FILE"), "{refused}");
}
