//! `cargo xtask compare REV`: what users feel, measured in turn in a build of REV and in one of this tree.
//!
//! Instructions are counted by valgrind, which no other program on the machine disturbs. A time is the fastest of several
//! runs in turn, beside the noise: by how much runs of the same program differ here and now. A difference within the noise is none.

mod build;
mod instructions;
mod measures;
mod side;
mod sizes;
mod verdict;

use std::path::Path;

use measures::Unit;
use side::{BASE, Side, TREE};
use verdict::Compared;

/// Runs of each command on each side, in turn: twice three, because the noise is what three runs of one program and three
/// others can differ by. As long as that is too much, there are more runs, up to the second number: other tenants of a
/// machine can slow half of all runs down.
const RUNS: [usize; 2] = [6, 24];
/// Counts of instructions on each side. They differ by the random keys of hash maps.
const COUNTS: usize = 2;

const USAGE: &str = "give a revision: cargo xtask compare REV [--only PART OF A NAME] [--build]";

/// A number of each run, or the reason why there is none.
type Measured = Result<Vec<f64>, String>;

/// A line of the table: the values of REV and of this tree.
struct Row {
    name: String,
    unit: Unit,
    sides: [Measured; 2],
}

impl Row {
    /// Whether the noise hides no difference that counts.
    fn is_settled(&self) -> bool {
        match &self.sides {
            [Ok(base), Ok(tree)] => verdict::noise(base, tree) <= self.unit.floor(),
            _ => true,
        }
    }
}

pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let mut arguments = arguments.iter();
    let (mut revision, mut only, mut build) = (None, "", false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--build" => build = true,
            "--only" => only = arguments.next().ok_or(USAGE)?,
            option if option.starts_with('-') => {
                return Err(format!("unknown option '{option}': {USAGE}"));
            }
            given => revision = Some(given),
        }
    }
    let base = Side::of_revision(root, revision.ok_or(USAGE)?)?;
    let tree = Side::of_tree(root)?;
    println!("base: {}; tree: {}", base.title, tree.title);
    let sides = [base, tree];
    let mut rows = Vec::new();
    if build {
        rows.append(&mut build::measure(&sides)?);
    }
    rows.append(&mut sizes::measure(&sides, only));
    rows.append(&mut instructions::measure(&sides, only));
    rows.append(&mut measures::measure(&sides, only));
    if rows.is_empty() {
        return Err(format!("no measure has '{only}' in its name"));
    }
    println!("\n{}", table(&rows));
    build::check(&rows)
}

/// Runs a measurement on both sides in turn, first on the one, then on the other: `least` times, and up to `most` times
/// until the results are settled. A side on which it has failed is not measured again.
fn in_turn<T>(
    [least, most]: [usize; 2],
    mut run: impl FnMut(usize) -> Result<T, String>,
    is_settled: impl Fn(&[Result<Vec<T>, String>; 2]) -> bool,
) -> [Result<Vec<T>, String>; 2] {
    let mut sides = [Ok(Vec::new()), Ok(Vec::new())];
    for turn in 0..most {
        if turn >= least && is_settled(&sides) {
            break;
        }
        let order = if turn % 2 == 0 {
            [BASE, TREE]
        } else {
            [TREE, BASE]
        };
        for side in order {
            if let Ok(values) = &mut sides[side] {
                match run(side) {
                    Ok(value) => values.push(value),
                    Err(why) => sides[side] = Err(why),
                }
            }
        }
    }
    sides
}

/// The table in Markdown, and below it why measures are missing.
fn table(rows: &[Row]) -> String {
    let mut text = "| measure | base | tree | tree/base | noise | |\n| --- | ---: | ---: | ---: | ---: | --- |\n".to_owned();
    let mut missing = String::new();
    for Row { name, unit, sides } in rows {
        let cell = |side: usize| match &sides[side] {
            Ok(values) => unit.text(verdict::least(values)),
            Err(_) => "missing".to_owned(),
        };
        let rest = match sides {
            [Ok(base), Ok(tree)] => {
                let Compared {
                    ratio,
                    noise,
                    verdict,
                } = verdict::compare(base, tree, unit.floor());
                let word = unit.word(verdict);
                format!("{ratio:.3} | ±{:.1} % | {word} |", 100.0 * noise)
            }
            _ => "| | |".to_owned(),
        };
        text += &format!("| {name} | {} | {} | {rest}\n", cell(BASE), cell(TREE));
        for (side, values) in ["base", "tree"].iter().zip(sides) {
            if let Err(why) = values {
                missing += &format!("* {name}, {side}: {why}\n");
            }
        }
    }
    if !missing.is_empty() {
        text += &format!("\nMissing:\n\n{missing}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns_and_one_that_fails_is_left_alone() {
        let mut order = Vec::new();
        let run = |side| {
            order.push(side);
            match side {
                BASE => Ok(order.len()),
                _ => Err("no such bench".to_owned()),
            }
        };
        let [base, tree] = in_turn([2, 9], run, |sides| {
            sides[BASE].as_ref().is_ok_and(|base| base.len() == 3)
        });
        assert_eq!(order, [BASE, TREE, BASE, BASE]);
        assert_eq!(base, Ok(vec![1, 3, 4]));
        assert_eq!(tree, Err("no such bench".to_owned()));
    }

    #[test]
    fn the_table_says_what_is_missing() {
        let row = |name: &str, sides| Row {
            name: name.to_owned(),
            unit: Unit::Us,
            sides,
        };
        let text = table(&[
            row("lookup", [Ok(vec![10.0; 6]), Ok(vec![15.0; 6])]),
            row(
                "ping",
                [Err("unknown command".to_owned()), Ok(vec![20.0; 6])],
            ),
        ]);
        let expected = "\
| measure | base | tree | tree/base | noise | |
| --- | ---: | ---: | ---: | ---: | --- |
| lookup | 10.0 us | 15.0 us | 1.500 | ±15.0 % | slower |
| ping | missing | 20.0 us | | | |

Missing:

* ping, base: unknown command
";
        assert_eq!(text, expected);
    }
}
