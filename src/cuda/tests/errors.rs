//! Every call of the driver fails once: expects an error that explains it, no wrong byte, no panic and no leak.

use crate::{CopierReport, Sharing};
use kvferry_types::{Direction, EndedCopy};

use super::copies::plain;
use super::engine::Roles;
use super::fake;
use super::world::{Wanted, Ways, World};

/// Calls that release a resource. When such a call fails itself, the resource leaks.
const GIVE_BACK: [&str; 8] = [
    "cuMemRelease",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
];
/// When such a call fails, the end of the copies before it may be unknown: their memory is then never released.
const UNKNOWN_END: [&str; 2] = ["cuEventQuery", "cuEventRecord"];
/// `CUDA_ERROR_INVALID_VALUE`, `_OUT_OF_MEMORY`, and `_LAUNCH_FAILED`, which poisons the context.
const CODES: [u32; 3] = [1, 2, 719];
const POISON: u32 = 719;

fn wanted(direction: Direction) -> Wanted {
    Wanted {
        direction,
        pages: (0..6).map(|page| (page, 8 - page)).collect(),
        pages_a_part: 2,
    }
}

/// A store, then a load, then another store. Returns the text of any refusal by the driver.
fn there_and_back(ways: Ways) -> Result<(), String> {
    let registration = plain(Roles::Split).registration();
    let mut world = World::with_ways(registration, 9, 4096, 7, ways)?;
    for direction in [Direction::Store, Direction::Load, Direction::Store] {
        let mut copy = wanted(direction);
        world.start(&copy);
        let ended = match world.outcome() {
            CopierReport::Ended(copies) => copies[0],
            CopierReport::Written(_) => panic!("nothing was announced"),
            CopierReport::Lost(error) => {
                assert!(
                    error.is_fatal()
                        || error.call().is_some_and(|call| UNKNOWN_END.contains(&call)),
                    "{error}"
                );
                return Err(error.to_string());
            }
        };
        let EndedCopy {
            complete,
            complete_pages,
            ..
        } = ended;
        copy.pages.truncate(complete_pages as usize);
        assert!(complete || copy.pages.len() < 6, "{ended:?}");
        if complete {
            world.expect(&copy);
            world.try_check("complete")?;
            continue;
        }
        // The pages that were copied are right; the others may hold anything until a complete copy overwrites them.
        let again = wanted(direction);
        world.start(&again);
        match world.outcome() {
            CopierReport::Ended(copies) if copies[0].complete => world.expect(&again),
            other => return Err(format!("refused twice: {other:?}")),
        }
        world.try_check("whole at last")?;
    }
    Ok(())
}

/// Runs one process in which one call fails. Returns whether there was such a call.
fn one_failure(nth: u64, code: u32) -> bool {
    let reports = tempfile::tempdir().expect("a folder");
    let report = reports.path().display();
    let settings =
        format!("delay_us=50;strict=1;granule_kib=4;fail=*/*/{nth}/{code};report={report}");
    let folder = fake::folder(&fake::library());
    let output = fake::again(folder.path(), &settings);
    let said = fake::succeeded(&output, &settings);
    let failed = said.lines().find_map(|line| {
        let line = line.strip_prefix("fake CUDA driver: ")?;
        line.strip_suffix(&format!(" fails with {code}, as wanted"))
    });
    let Some(call) = failed else {
        assert!(said.contains("all went well"), "{settings}: {said}");
        return false;
    };
    assert!(
        said.contains("in words: ") || said.contains("all went well"),
        "{settings}: {said}"
    );
    if code != POISON && !UNKNOWN_END.contains(&call) && !GIVE_BACK.contains(&call) {
        let left = fake::only_file(reports.path());
        let something = left.split_whitespace().find(|part| !part.ends_with("=0"));
        assert_eq!(something, None, "{settings}: {call}: {left}");
    }
    true
}

/// Neither an event nor the stream reports the end of copies: the end is not reported, and the memory is kept.
#[test]
fn an_end_that_cannot_be_observed_is_not_reported() {
    // The creation of the world takes 1 record for each allocation, which is one here, and one for the timeline.
    let fails = "fail=*/cuEventRecord/3/1;fail=*/cuStreamSynchronize/1/1";
    let settings = format!("delay_us=300;{fails}");
    let said = fake::under(&settings, || report(Ways::default()));
    let Some(said) = said else { return };
    assert!(said.contains("in words: cuEventRecord answered"), "{said}");
}

fn report(ways: Ways) {
    match there_and_back(ways) {
        Ok(()) => println!("all went well"),
        Err(error) => println!("in words: {error}"),
    }
}

fn each_call_fails(ways: Ways) {
    if fake::is_inside() {
        return report(ways);
    }
    for code in CODES {
        let failures = (1..).take_while(|nth| one_failure(*nth, code)).count();
        assert!(failures > 50, "only {failures} calls");
    }
}

#[test]
fn every_call_fails_in_turn() {
    each_call_fails(Ways::default());
}

#[test]
fn every_call_fails_in_turn_with_memory_in_chunks() {
    each_call_fails(Ways {
        sharing: Some(Sharing::Fd),
        ..Ways::default()
    });
}

/// Batched copies, up to 7 in each call.
pub(super) const TOGETHER: Ways = Ways {
    sharing: None,
    copies_a_call: 7,
};

#[test]
fn every_call_fails_in_turn_with_copies_given_together() {
    each_call_fails(TOGETHER);
}
