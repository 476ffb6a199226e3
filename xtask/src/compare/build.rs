//! The first command of a user: the build of the program from nothing but downloaded sources.

use std::path::Path;
use std::time::Instant;

use super::measures::Unit;
use super::side::{Side, TREE};
use super::{Row, verdict};

/// The CPU time that the build of this tree may take, in seconds: about 180 s on two cores with nothing else to do. Time
/// on the clock would depend on the number of cores, and on what else runs.
const CPU_S_MAX: f64 = 345.0;
const CPU: &str = "first command, CPU time";

/// Builds both sides once each.
pub(super) fn measure(sides: &[Side; 2]) -> Result<Vec<Row>, String> {
    let mut rows = [("first command", Unit::S), (CPU, Unit::S)].map(|(name, unit)| Row {
        name: name.to_owned(),
        unit,
        sides: [Ok(Vec::new()), Ok(Vec::new())],
    });
    for (place, side) in sides.iter().enumerate() {
        println!("building {} from nothing", side.sources.display());
        for (row, seconds) in rows.iter_mut().zip(build(&side.sources)?) {
            row.sides[place] = Ok(vec![seconds]);
        }
    }
    Ok(rows.into())
}

/// Fails if this tree takes longer to build than it may.
pub(super) fn check(rows: &[Row]) -> Result<(), String> {
    let row = rows.iter().find(|row| row.name == CPU);
    let Some(Ok(seconds)) = row.map(|row| &row.sides[TREE]) else {
        return Ok(());
    };
    let seconds = verdict::least(seconds);
    match seconds <= CPU_S_MAX {
        true => Ok(()),
        false => Err(format!(
            "the first command takes {seconds:.0} s of CPU time to build, more than {CPU_S_MAX:.0}: `cargo build --release \
             --timings` shows which package takes it"
        )),
    }
}

/// Seconds on the clock, and of CPU time.
fn build(sources: &Path) -> Result<[f64; 2], String> {
    let cargo = |arguments: &[&str], target: &Path| {
        let mut cargo = crate::cargo_command();
        cargo.current_dir(sources).args(arguments).arg("--locked");
        let status = cargo.env("CARGO_TARGET_DIR", target).status();
        match status.map_err(|error| format!("cargo: {error}"))? {
            status if status.success() => Ok(()),
            status => Err(format!("cargo {} ended with {status}", arguments.join(" "))),
        }
    };
    let target = crate::target().join("compare").join("first-command");
    let removed = || match std::fs::remove_dir_all(&target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", target.display()))
        }
        _ => Ok(()),
    };
    removed()?;
    cargo(&["fetch", "--quiet"], &target)?;
    let (begun, used) = (Instant::now(), cpu_s_of_children()?);
    cargo(&["build", "--release", "--quiet"], &target)?;
    let seconds = [begun.elapsed().as_secs_f64(), cpu_s_of_children()? - used];
    removed()?;
    Ok(seconds)
}

/// CPU time of all child processes that have ended, and of their children, in seconds.
fn cpu_s_of_children() -> Result<f64, String> {
    let text = std::fs::read_to_string("/proc/self/stat")
        .map_err(|error| format!("/proc/self/stat: {error}"))?;
    cpu_s(&text).ok_or_else(|| format!("/proc/self/stat has another form: {text}"))
}

/// The fields `cutime` and `cstime`, which Linux counts in hundredths of a second.
fn cpu_s(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(13);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_children_is_read_after_the_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 10 20 0 0 30 40 500 250 20 0 1 0 9 8 7";
        assert_eq!(cpu_s(stat), Some(7.5));
    }

    #[test]
    fn a_build_over_the_limit_fails() {
        let row = |seconds: f64| Row {
            name: CPU.to_owned(),
            unit: Unit::S,
            sides: [Ok(vec![1000.0]), Ok(vec![seconds])],
        };
        assert_eq!(check(&[row(CPU_S_MAX - 1.0)]), Ok(()));
        assert!(check(&[row(CPU_S_MAX + 1.0)]).is_err());
        assert_eq!(check(&[]), Ok(()));
    }
}
