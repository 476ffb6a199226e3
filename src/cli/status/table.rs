//! The status of a leader for people: sizes in units, rates, and what keeps it from serving.

use std::fmt::Write as _;

use kvferry_protocol::{DiskStatus, MovesStatus, StatusAnswer, TierStatus};
use kvferry_types::{ByteSize, TierId};

use super::{name, printable, stage};

/// Number of the tier in host memory.
const HOST: u8 = TierId::Host.number();
/// Processes whose restarts are shown.
const RESTARTED_SHOWN: usize = 4;
/// Width of the names of the rows.
const NAME_WIDTH: usize = 13;

/// The lines of `kvferry status`. All counters are in `kvferry status --json`.
pub(super) fn table(status: &StatusAnswer) -> String {
    let mut rows = vec![
        (
            "kvferry",
            format!("{}, epoch {}", status.version, status.epoch),
        ),
        ("state", state(status)),
    ];
    let unready = status.ranks.iter().filter(|rank| !rank.attached);
    rows.extend(unready.map(|rank| ("", format!("{}: {}", name(rank), stage(rank)))));
    rows.extend(restarts(status).map(|text| ("restarts", text)));
    rows.push(("host memory", memory(status)));
    rows.extend(blocks(status).map(|text| ("", text)));
    rows.extend(status.tiers.iter().skip(1).map(|tier| ("disk", disk(tier))));
    let disks = status.ranks.iter().filter_map(|rank| {
        let disk = rank.disk.as_deref()?;
        Some(("", format!("{}: {}", name(rank), of_worker(disk))))
    });
    rows.extend(disks);
    rows.extend(status.moves.iter().map(|moves| ("", moved(moves))));
    rows.push(("hits", hits(status)));
    rows.push(("copied", copied(status)));
    rows.push((
        "now",
        format!(
            "{}, {}, {}",
            count(status.slots, "running request", "running requests"),
            count(status.pins, "hold", "holds"),
            count(status.copies_under_way, "copy", "copies"),
        ),
    ));
    rows.extend(problems(status).map(|text| ("problems", text)));
    if status.contradiction.as_deref() == Some("") {
        let text = "the second count of pages, pins and blocks agrees";
        rows.push(("check", text.to_owned()));
    }
    let lines = rows.iter().map(|(name, text)| match name.is_empty() {
        true => format!("{:NAME_WIDTH$}{text}", ""),
        false => format!("{name:NAME_WIDTH$}{text}"),
    });
    lines.collect::<Vec<String>>().join("\n")
}

fn counter(status: &StatusAnswer, name: &str) -> u64 {
    status.counters.get(name).copied().unwrap_or(0)
}

/// A number with its noun, such as `12,345 holds`.
fn count(number: u64, one: &str, many: &str) -> String {
    let noun = if number == 1 { one } else { many };
    format!("{} {noun}", grouped(number))
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes in the largest unit in which it is at least 1, with one decimal place.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// `part` of `all` in percent; `None` if `all` is 0.
fn percent(part: u64, all: u64) -> Option<String> {
    (all > 0).then(|| format!("{:.1} %", part as f64 * 100.0 / all as f64))
}

fn state(status: &StatusAnswer) -> String {
    let all = status.ranks.len();
    let attached = status.ranks.iter().filter(|rank| rank.attached).count();
    if status.draining {
        let resume = "lookups, loads and stores are refused until kvferry drain --resume";
        return format!("drains: {resume}");
    }
    match (status.ready, attached) {
        (true, _) if attached == all => "serves".to_owned(),
        (true, _) => format!("serves, with {attached} of {all} ranks"),
        (false, 0) => "waits for an engine: no rank has registered its memory".to_owned(),
        (false, _) if attached == all => "reads the inventories of the depots".to_owned(),
        (false, _) => format!("waits for ranks: {attached} of {all} are attached"),
    }
}

fn memory(status: &StatusAnswer) -> String {
    let bytes: u64 = status.ranks.iter().map(|rank| rank.host_bytes).sum();
    let ready: u64 = status.ranks.iter().map(|rank| rank.host_ready_bytes).sum();
    let mut text = match (bytes, ready < bytes) {
        (0, _) => "no worker yet".to_owned(),
        (_, true) => format!("{} of {} are ready", size(ready), ByteSize(bytes)),
        (_, false) => ByteSize(bytes).to_string(),
    };
    if let Some(host) = status.tier(HOST).filter(|host| host.pages > 0) {
        let percent = percent(host.used_pages, host.pages).unwrap_or_default();
        let (filled, pages) = (grouped(host.used_pages), grouped(host.pages));
        write!(text, ": {percent} filled, {filled} of {pages} pages").ok();
    }
    text
}

/// The blocks, and the pages that are neither free nor ready.
fn blocks(status: &StatusAnswer) -> Option<String> {
    let host = status.tier(HOST)?;
    let others = host.page_states.iter();
    let others =
        others.filter(|(state, pages)| **pages > 0 && *state != "free" && *state != "ready");
    let others: String = others
        .map(|(state, pages)| format!(", {} pages {state}", grouped(*pages)))
        .collect();
    (host.blocks > 0).then(|| {
        let blocks = count(host.blocks, "block", "blocks");
        format!("{blocks} of up to {} pages{others}", status.ratio)
    })
}

/// A tier below host memory.
fn disk(tier: &TierStatus) -> String {
    let name = format!("G{}", tier.tier);
    let Some(filled) = percent(tier.used_pages, tier.pages) else {
        return format!("{name}: serves no pages");
    };
    let rate = percent(tier.hit_pages, tier.lookup_pages);
    let rate = rate.map(|rate| format!(" ({rate} of what no faster tier had)"));
    let mut text = format!(
        "{name}: {filled} filled, {} of {} pages in {}; {} pages hit{}, {} evicted",
        grouped(tier.used_pages),
        grouped(tier.pages),
        count(tier.blocks, "block", "blocks"),
        grouped(tier.hit_pages),
        rate.unwrap_or_default(),
        grouped(tier.evicted_pages),
    );
    if tier.quarantined_pages > 0 {
        let pages = count(tier.quarantined_pages, "page", "pages");
        write!(text, ", {pages} quarantined").ok();
    }
    text
}

/// The disk of one worker.
fn of_worker(disk: &DiskStatus) -> String {
    let mut text = disk.health.name().to_owned();
    if !disk.reason.is_empty() {
        write!(text, " ({})", printable(&disk.reason)).ok();
    }
    let (used, cap) = (size(disk.used_bytes), ByteSize(disk.cap_bytes));
    let (day, all) = (size(disk.day_written_bytes), size(disk.written_bytes));
    write!(
        text,
        "; {used} of {cap}, {day} written in 24 h ({all} in all)"
    )
    .ok();
    let waiting = disk.listed_pages.saturating_sub(disk.durable_pages);
    if waiting > 0 {
        let pages = count(waiting, "page", "pages");
        write!(text, ", {pages} not durable yet").ok();
    }
    if disk.scrubbed_pages > 0 {
        let scrubbed = count(disk.scrubbed_pages, "page", "pages");
        write!(text, ", {scrubbed} scrubbed").ok();
    }
    for (pages, what) in [
        (disk.bad_pages.saturating_add(disk.bad_reads), "bad"),
        (disk.unreadable_pages, "unreadable"),
        (disk.quarantined_pages, "quarantined"),
    ] {
        if pages > 0 {
            write!(text, ", {} {what}", grouped(pages)).ok();
        }
    }
    text
}

fn moved(moves: &MovesStatus) -> String {
    let mut text = format!(
        "{} of {} pages, {} in flight, {} waiting",
        count(moves.ordered, "move", "moves"),
        grouped(moves.pages),
        grouped(moves.under_way),
        count(moves.waiting, "block", "blocks"),
    );
    if moves.left_out > 0 {
        let blocks = count(moves.left_out, "block", "blocks");
        write!(text, ", {blocks} left out").ok();
    }
    if moves.gone > 0 {
        let blocks = count(moves.gone, "block", "blocks");
        write!(text, ", {blocks} gone before they were moved").ok();
    }
    if moves.bad_sources > 0 {
        let pages = count(moves.bad_sources, "bad page", "bad pages");
        write!(text, ", {pages}").ok();
    }
    text
}

fn hits(status: &StatusAnswer) -> String {
    let lookups = counter(status, "lookups");
    let requested = counter(status, "lookup_pages");
    let missing = requested.saturating_sub(counter(status, "device_pages"));
    let hit = counter(status, "hit_pages");
    let tokens = u64::from(status.hash_tokens);
    match percent(hit, missing) {
        None if lookups == 0 => "no lookup yet".to_owned(),
        None => format!(
            "{}; the engine had every page itself",
            count(lookups, "lookup", "lookups")
        ),
        Some(percent) => {
            // Without an engine, the tokens of a page are not known.
            let (each, unit) = match tokens {
                0 => (1, "pages"),
                tokens => (tokens, "tokens"),
            };
            format!(
                "{percent} of what the engine lacked: {} of {} {unit}, {}",
                grouped(hit * each),
                grouped(missing * each),
                count(lookups, "lookup", "lookups"),
            )
        }
    }
}

fn copied(status: &StatusAnswer) -> String {
    let way = |word: &str, bytes: &str, us: &str| {
        let (bytes, us) = (counter(status, bytes), counter(status, us));
        // Bytes per microsecond are megabytes per second.
        let rate = match us {
            0 => String::new(),
            _ => format!(" at {:.1} GB/s a copy", bytes as f64 / us as f64 / 1e3),
        };
        format!("{} {word}{rate}", size(bytes))
    };
    let stored = way("stored", "gathered_bytes", "gather_us");
    format!(
        "{stored}, {}",
        way("loaded", "scattered_bytes", "scatter_us")
    )
}

/// The processes that `up` has started again, if there are any. Of many, the first ones.
fn restarts(status: &StatusAnswer) -> Option<String> {
    let mut texts: Vec<String> = Vec::new();
    for restarted in status.restarts.iter().take(RESTARTED_SHOWN) {
        let causes = restarted.causes.iter().map(|(cause, number)| {
            let cause = match cause.as_str() {
                "exit" => "an exit code",
                "signal" => "a signal",
                "out_of_memory" => "lack of memory",
                "fenced" => "a request of the leader",
                "not_started" => "failed starts",
                other => other,
            };
            format!("{} after {}", grouped(*number), printable(cause))
        });
        let causes: Vec<String> = causes.collect();
        let process = printable(&restarted.process);
        texts.push(format!("{process}: {}", causes.join(", ")));
    }
    let more = status.restarts.len().saturating_sub(RESTARTED_SHOWN);
    texts.extend((more > 0).then(|| format!("{} more processes", grouped(more as u64))));
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Failures since the start of the leader, if there were any.
fn problems(status: &StatusAnswer) -> Option<String> {
    let kinds = [
        ("failed_copies", "failed copy", "failed copies"),
        ("late_copies", "late copy", "late copies"),
        ("refused_pages", "page without room", "pages without room"),
    ];
    let counted = kinds.map(|(name, one, many)| (counter(status, name), one, many));
    let counted = counted.into_iter().filter(|(number, ..)| *number > 0);
    let texts: Vec<String> = counted
        .map(|(number, one, many)| count(number, one, many))
        .collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::{DiskHealth, RankStatus, RestartedProcess};

    use super::*;

    fn rank(attached: bool) -> RankStatus {
        RankStatus {
            pid: 7,
            attached,
            host_bytes: 20 << 30,
            host_ready_bytes: 20 << 30,
            ..RankStatus::default()
        }
    }

    fn status() -> StatusAnswer {
        let counters = [
            ("lookups", 4000),
            ("lookup_pages", 150_000),
            ("device_pages", 50_000),
            ("hit_pages", 62_500),
            ("gathered_bytes", 3 << 30),
            ("gather_us", 400_000),
            ("refused_pages", 1),
            ("late_copies", 12),
        ];
        let pages = [("free", 25), ("filling", 3), ("ready", 72)];
        let host = TierStatus {
            tier: HOST,
            pages: 100,
            used_pages: 72,
            blocks: 1234,
            page_states: pages.map(|(name, n)| (name.to_owned(), n)).into(),
            ..TierStatus::default()
        };
        StatusAnswer {
            version: "0.1.0".to_owned(),
            epoch: 9,
            ready: true,
            ratio: 32,
            hash_tokens: 16,
            ranks: vec![rank(true), rank(true)],
            slots: 1,
            pins: 0,
            copies_under_way: 2,
            counters: counters.map(|(name, n)| (name.to_owned(), n)).into(),
            tiers: vec![host],
            moves: None,
            ..StatusAnswer::default()
        }
    }

    #[test]
    fn a_leader_that_serves_shows_sizes_rates_and_problems() {
        let expected = "\
kvferry      0.1.0, epoch 9
state        serves
host memory  40 GiB: 72.0 % filled, 72 of 100 pages
             1,234 blocks of up to 32 pages, 3 pages filling
hits         62.5 % of what the engine lacked: 1,000,000 of 1,600,000 tokens, 4,000 lookups
copied       3.0 GiB stored at 8.1 GB/s a copy, 0 B loaded
now          1 running request, 0 holds, 2 copies
problems     12 late copies, 1 page without room";
        assert_eq!(table(&status()), expected);
    }

    #[test]
    fn a_leader_that_drains_says_so_and_a_second_count_that_agrees_is_stated() {
        let mut status = status();
        assert!(!table(&status).contains("check"));
        status.draining = true;
        status.contradiction = Some(String::new());
        let text = table(&status);
        assert!(text.contains("\nstate        drains"), "{text}");
        assert!(text.contains("drain --resume"), "{text}");
        assert!(text.contains("\ncheck        "), "{text}");
        status.contradiction = Some("one page more".to_owned());
        assert!(!table(&status).contains("agrees"));
    }

    #[test]
    fn a_leader_with_a_disk_shows_its_pages_and_moves() {
        let disk = TierStatus {
            tier: 3,
            pages: 4000,
            used_pages: 3000,
            blocks: 1,
            hit_pages: 1234,
            lookup_pages: 4936,
            evicted_pages: 5,
            quarantined_pages: 2,
            ..TierStatus::default()
        };
        let moves = MovesStatus {
            under_way: 2,
            waiting: 1,
            ordered: 50,
            pages: 1600,
            left_out: 0,
            bad_sources: 1,
            gone: 3,
        };
        let disks = [
            DiskStatus {
                health: DiskHealth::Ok,
                used_bytes: 1 << 30,
                cap_bytes: 4 << 30,
                written_bytes: 7 << 30,
                day_written_bytes: 2 << 30,
                ..DiskStatus::default()
            },
            DiskStatus {
                cap_bytes: 4 << 30,
                listed_pages: 500,
                durable_pages: 480,
                scrubbed_pages: 1000,
                bad_pages: 3,
                bad_reads: 4,
                quarantined_pages: 2,
                ..DiskStatus::new(DiskHealth::ReadOnly, "cannot write".to_owned())
            },
        ];
        let ranks = (0..).zip(disks).map(|(number, disk)| RankStatus {
            rank: number,
            disk: Some(Box::new(disk)),
            ..rank(true)
        });
        let mut status = StatusAnswer {
            ranks: ranks.collect(),
            tiers: vec![
                TierStatus {
                    tier: HOST,
                    ..TierStatus::default()
                },
                disk,
            ],
            moves: Some(Box::new(moves)),
            ..status()
        };
        let text = table(&status);
        let expected = "
disk         G3: 75.0 % filled, 3,000 of 4,000 pages in 1 block; 1,234 pages hit (25.0 % of what no faster tier had), \
5 evicted, 2 pages quarantined
             rank 0: ok; 1.0 GiB of 4 GiB, 2.0 GiB written in 24 h (7.0 GiB in all)
             rank 1: read_only (cannot write); 0 B of 4 GiB, 0 B written in 24 h (0 B in all), 20 pages not durable \
yet, 1,000 pages scrubbed, 7 bad, 2 quarantined
             50 moves of 1,600 pages, 2 in flight, 1 block waiting, 3 blocks gone before they were moved, 1 bad page
";
        assert!(text.contains(expected), "{text}");
        status.tiers[1].pages = 0;
        assert!(table(&status).contains("G3: serves no pages"));
    }

    #[test]
    fn a_leader_without_an_engine_shows_the_missing_ranks() {
        let mut status = StatusAnswer {
            ready: false,
            ranks: vec![rank(false)],
            tiers: Vec::new(),
            counters: [].into(),
            slots: 0,
            copies_under_way: 1,
            ..status()
        };
        let expected = "\
kvferry      0.1.0, epoch 9
state        waits for an engine: no rank has registered its memory
             rank 0: waits for its engine to register its memory
host memory  20 GiB
hits         no lookup yet
copied       0 B stored, 0 B loaded
now          0 running requests, 0 holds, 1 copy";
        assert_eq!(table(&status), expected);
        status.ranks = vec![rank(true), rank(false)];
        assert!(table(&status).contains("waits for ranks: 1 of 2 are attached"));
        status.ranks = vec![rank(true)];
        assert!(table(&status).contains("reads the inventories of the depots"));
        status.ready = true;
        status.ranks.push(RankStatus::default());
        let text = table(&status);
        assert!(text.contains("serves, with 1 of 2 ranks"), "{text}");
    }

    #[test]
    fn restarts_are_shown_with_their_causes() {
        let restarted = |process: &str, causes: &[(&str, u64)]| RestartedProcess {
            process: process.to_owned(),
            causes: causes
                .iter()
                .map(|(cause, count)| ((*cause).to_owned(), *count))
                .collect(),
        };
        let mut status = StatusAnswer {
            restarts: vec![
                restarted("leader", &[("exit", 1)]),
                restarted("worker-0-0", &[("out_of_memory", 1234), ("signal", 2)]),
            ],
            ..status()
        };
        let expected = "leader: 1 after an exit code; worker-0-0: 1,234 after lack of memory, 2 after a signal";
        assert_eq!(restarts(&status).as_deref(), Some(expected));
        assert!(table(&status).contains(&format!("\nrestarts     {expected}\n")));
        status.restarts = vec![restarted("worker-0-1", &[("new", 1)]); 6];
        let text = restarts(&status).expect("restarts");
        assert!(
            text.ends_with("worker-0-1: 1 after new; 2 more processes"),
            "{text}"
        );
        status.restarts.clear();
        assert_eq!(restarts(&status), None);
    }

    #[test]
    fn hits_are_in_pages_while_no_engine_says_how_many_tokens_a_page_has() {
        let status = StatusAnswer {
            hash_tokens: 0,
            ..status()
        };
        let expected = "62.5 % of what the engine lacked: 62,500 of 100,000 pages, 4,000 lookups";
        assert_eq!(hits(&status), expected);
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1 << 40, "1.0 TiB"),
            (5 << 50, "5120.0 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }
}
