//! `kvferry bench gpu`

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::cli::say;
use crate::cuda::{
    BATCH_COPIES_MAX, Context, Copier, CopierSettings, CopyOrder, DeviceMemories, DeviceMemory,
    Driver, Outcome, PIN_CHUNK_BYTES, PinnedDepot, RegisteredDevice,
};
use crate::engine::content::POISON;
use crate::error::CommandError;
use crate::memory::{COPY_PART_BYTES, CancelFlag, Depot, Prefault, page_stride_bytes, validate};
use crate::types::{Direction, FragmentPair, OpId, PageList};

use super::copy::registration;
use super::pages::{gather, shuffled, turned};
use super::spread;

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Prime, so that no piece of it is like the next.
const PATTERN_BYTES: usize = 251;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Which GPU, of those that this process may use.
    #[arg(long, default_value = "0")]
    gpu: usize,
    /// Sizes of a fragment in KiB.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2048,512,128,64,32,18,8,4"
    )]
    fragment_kib: Vec<u32>,
    /// Bytes of one copy in MiB.
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u64).range(1..=4096))]
    mib: u64,
    /// Rounds of each side.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// GB/s (10^9 bytes) as minimum, median, maximum.
type Rate = (f64, f64, f64);

/// What is copied and how.
#[derive(Debug, serde::Serialize)]
struct Row {
    fragment_kib: u32,
    fragments: u32,
    direction: &'static str,
    /// One copy of as many bytes.
    one_copy_gb_per_s: Rate,
    /// Each fragment by a call.
    async_gb_per_s: Rate,
    /// Many fragments by a call, where the driver has such a call.
    batch_gb_per_s: Option<Rate>,
    async_to_one_copy: f64,
    batch_to_one_copy: Option<f64>,
}

#[derive(Debug, serde::Serialize)]
struct Report {
    gpu: String,
    pci_bus_id: String,
    driver_version: i32,
    bytes: u64,
    rounds: u32,
    /// One copy each way at the same time, both together.
    both_ways_gb_per_s: Rate,
    rows: Vec<Row>,
}

/// One way to give copies to the driver.
struct Side {
    copier: Copier,
    outcomes: Receiver<Outcome>,
}

/// Both memories, cut into fragments of one size.
struct Cut {
    device: RegisteredDevice,
    depot: Arc<PinnedDepot>,
    pairs: Vec<FragmentPair>,
    bytes: u64,
}

/// Memory and ways.
struct Bench {
    memory: Arc<DeviceMemories>,
    depot: Arc<PinnedDepot>,
    one_by_one: Side,
    /// Where the driver has a call for many.
    together: Option<Side>,
    bytes: u64,
    rounds: u32,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        // A driver that refuses many copies by one call is said to.
        crate::telemetry::start("warn").map_err(CommandError::Config)?;
        let driver = Driver::get().map_err(CommandError::failed)?;
        let devices = driver.devices().map_err(CommandError::failed)?;
        let device = devices.get(self.gpu).ok_or_else(|| {
            CommandError::Failed(format!(
                "gpu is {}: this process may use {}, so it is below that",
                self.gpu,
                devices.len()
            ))
        })?;
        let context = Context::new(driver, *device).map_err(CommandError::failed)?;
        let bench = Bench::new(&context, self.mib << 20, self.rounds, &self.fragment_kib)
            .map_err(CommandError::Failed)?;
        let both_ways = bench.both_ways().map_err(CommandError::Failed)?;
        let mut rows = Vec::new();
        for kib in &self.fragment_kib {
            for direction in [Direction::Store, Direction::Load] {
                let row = bench.row(*kib, direction);
                rows.push(row.map_err(CommandError::Failed)?);
            }
        }
        let report = Report {
            gpu: device.uuid.to_string(),
            pci_bus_id: context.pci_bus_id().map_err(CommandError::failed)?,
            driver_version: driver.version(),
            bytes: bench.bytes,
            rounds: self.rounds,
            both_ways_gb_per_s: both_ways,
            rows,
        };
        report.say(self.json)
    }
}

impl Report {
    fn say(&self, json: bool) -> Result<(), CommandError> {
        if json {
            say(&serde_json::to_string_pretty(self).map_err(CommandError::failed)?);
            return Ok(());
        }
        let three = |(least, median, most): Rate| format!("{median:6.2} ({least:6.2}..{most:6.2})");
        say(&format!(
            "{} at {}, driver for CUDA {}.{}; {} MiB a copy, medians of {} rounds; every way was compared byte by byte",
            self.gpu,
            self.pci_bus_id,
            self.driver_version / 1000,
            self.driver_version % 1000 / 10,
            self.bytes >> 20,
            self.rounds
        ));
        say(&format!(
            "one copy each way at once: {} GB/s",
            three(self.both_ways_gb_per_s)
        ));
        say(
            "fragment  direction  one copy GB/s            async GB/s               batch GB/s               async/one  batch/one",
        );
        for row in &self.rows {
            say(&format!(
                "{:>4} KiB  {:<9}  {:<24} {:<24} {:<24} {:>9.2}  {:>9}",
                row.fragment_kib,
                row.direction,
                three(row.one_copy_gb_per_s),
                three(row.async_gb_per_s),
                row.batch_gb_per_s
                    .map_or("the driver has none".to_owned(), three),
                row.async_to_one_copy,
                row.batch_to_one_copy
                    .map_or(String::new(), |ratio| format!("{ratio:.2}"))
            ));
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Side {
    fn start(context: &Arc<Context>, copies_a_call: usize) -> Result<Self, String> {
        let (tell, outcomes) = channel();
        let copier = Copier::start(CopierSettings {
            context: Arc::clone(context),
            copies_a_call,
            tell: Box::new(move |outcome| tell.send(outcome).is_ok()),
        });
        Ok(Self {
            copier: copier.map_err(text)?,
            outcomes,
        })
    }

    fn give(&self, cut: &Cut, direction: Direction) -> Result<(), String> {
        let pairs = match direction {
            Direction::Store => cut.pairs.clone(),
            Direction::Load => cut.pairs.iter().cloned().map(turned).collect(),
        };
        let page_bytes = cut.device.layout.page_bytes;
        let order = CopyOrder {
            op: OpId(1),
            direction,
            parts: FragmentPair::parts(pairs, page_bytes, COPY_PART_BYTES),
            device: cut.device.clone(),
            depot: Arc::clone(&cut.depot),
            cancel: Arc::new(CancelFlag::default()),
        };
        let given = self.copier.start_copy(order);
        given.then_some(()).ok_or("no place for a copy".to_owned())
    }

    /// Waits until so many copies have ended.
    fn ended(&self, mut copies: usize) -> Result<(), String> {
        while copies > 0 {
            match self.outcomes.recv_timeout(PATIENCE).map_err(text)? {
                Outcome::Ended(ended) => {
                    if !ended.iter().all(|copy| copy.whole) {
                        return Err("a copy was refused: see above".to_owned());
                    }
                    copies = copies.saturating_sub(ended.len());
                }
                Outcome::Written(_) => {}
                Outcome::Lost(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// GB/s of one copy, from its order to its end.
    fn timed(&self, cut: &Cut, direction: Direction) -> Result<f64, String> {
        let begun = Instant::now();
        self.give(cut, direction)?;
        self.ended(1)?;
        Ok(cut.bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }
}

impl Bench {
    fn new(
        context: &Arc<Context>,
        bytes: u64,
        rounds: u32,
        fragments_kib: &[u32],
    ) -> Result<Self, String> {
        let memory = DeviceMemory::allocate(context, bytes).map_err(text)?;
        let room = fragments_kib.iter().map(|kib| {
            let fragment = u64::from(*kib) << 10;
            let pages = bytes.checked_div(fragment).unwrap_or(0);
            let pages = u32::try_from(pages).ok().filter(|pages| *pages > 0);
            let pages = pages.ok_or(format!(
                "fragment_kib is {kib}: write sizes from 1 to those of a copy, {} KiB",
                bytes >> 10
            ))?;
            Ok(Depot::bytes_for(pages, fragment))
        });
        let room = room.collect::<Result<Vec<u64>, String>>()?;
        let room = room.into_iter().max().unwrap_or(0);
        let depot =
            Depot::create(room.max(Depot::bytes_for(2, bytes.div_ceil(2)))).map_err(text)?;
        let by = Prefault {
            threads: 4,
            chunk_bytes: 64 << 20,
            node: None,
        };
        depot
            .prefault(&by, &|_, _| (), &Default::default())
            .map_err(text)?;
        let together = context.driver().copies_together();
        let together = together.then(|| Side::start(context, BATCH_COPIES_MAX));
        let depot = PinnedDepot::new(context, Arc::new(depot), PIN_CHUNK_BYTES, |_| ());
        Ok(Self {
            memory: DeviceMemories::own(vec![memory]),
            depot: Arc::new(depot.map_err(text)?),
            one_by_one: Side::start(context, 1)?,
            together: together.transpose()?,
            bytes,
            rounds,
        })
    }

    /// As many fragments as there is room for, in an order in which hardly two are neighbours on both sides.
    fn cut(&self, fragment: u64) -> Result<Cut, String> {
        let pages = u32::try_from(self.bytes / fragment).map_err(text)?;
        let registration = registration(fragment, pages);
        let layout = validate(&registration).map_err(text)?;
        let geometry = layout.geometry(&registration);
        Ok(Cut {
            device: RegisteredDevice {
                memory: Arc::clone(&self.memory),
                layout: Arc::new(layout),
                geometry,
                timeline: None,
            },
            depot: Arc::clone(&self.depot),
            pairs: gather(&shuffled(pages), 0),
            bytes: fragment * u64::from(pages),
        })
    }

    /// One copy each way at once, of half of the memory each.
    fn both_ways(&self) -> Result<Rate, String> {
        let halves = self.cut(self.bytes / 2)?;
        let half = |page: u32| Cut {
            device: halves.device.clone(),
            depot: Arc::clone(&halves.depot),
            pairs: vec![FragmentPair {
                src: PageList::run(page, 1),
                dst: PageList::run(page, 1),
            }],
            bytes: self.bytes / 2,
        };
        let (stored, loaded) = (half(0), half(1));
        let mut rates = Vec::new();
        for round in 0..=self.rounds {
            let begun = Instant::now();
            self.one_by_one.give(&stored, Direction::Store)?;
            self.one_by_one.give(&loaded, Direction::Load)?;
            self.one_by_one.ended(2)?;
            if round > 0 {
                rates.push(halves.bytes as f64 / begun.elapsed().as_secs_f64() / 1e9);
            }
        }
        Ok(spread(rates))
    }

    /// A load and a store of all fragments, compared byte by byte.
    fn check(&self, side: &Side, cut: &Cut) -> Result<(), String> {
        let (page_bytes, buffer) = (cut.device.layout.page_bytes, self.depot.depot().buffer());
        let places = || {
            let first = self.depot.depot().pages_at(page_bytes);
            let stride = page_stride_bytes(page_bytes);
            let pages = cut.bytes / page_bytes;
            (0..pages).map(move |page| (page as usize, first + page * stride))
        };
        let pattern: Vec<u8> = (0..PATTERN_BYTES as u8).collect();
        let pattern = pattern.repeat(page_bytes as usize / PATTERN_BYTES + 2);
        let expected = |page: usize| &pattern[page % PATTERN_BYTES..][..page_bytes as usize];
        for (page, at) in places() {
            buffer.write_from(at, expected(page)).map_err(text)?;
        }
        side.timed(cut, Direction::Load)?;
        let mut found = vec![POISON; page_bytes as usize];
        for (_, at) in places() {
            found.fill(POISON);
            buffer.write_from(at, &found).map_err(text)?;
        }
        side.timed(cut, Direction::Store)?;
        for (page, at) in places() {
            buffer.read_into(at, &mut found).map_err(text)?;
            if found != expected(page) {
                return Err(format!(
                    "fragment {page} of {page_bytes} bytes came back with other bytes"
                ));
            }
        }
        Ok(())
    }

    fn row(&self, kib: u32, direction: Direction) -> Result<Row, String> {
        let fragment = u64::from(kib) << 10;
        let cut = self.cut(fragment)?;
        let whole = self.cut(cut.bytes)?;
        let sides = [Some(&self.one_by_one), self.together.as_ref()];
        for side in sides.into_iter().flatten() {
            self.check(side, &cut)?;
        }
        let (mut one_copy, mut one_by_one, mut together) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=self.rounds {
            let floor = self.one_by_one.timed(&whole, direction)?;
            let alone = self.one_by_one.timed(&cut, direction)?;
            let batched = self.together.as_ref();
            let batched = batched
                .map(|side| side.timed(&cut, direction))
                .transpose()?;
            // The first round warms up.
            if round > 0 {
                one_copy.push(floor);
                one_by_one.push(alone);
                together.extend(batched);
            }
        }
        let (one_copy, one_by_one) = (spread(one_copy), spread(one_by_one));
        let together = self.together.is_some().then(|| spread(together));
        Ok(Row {
            fragment_kib: kib,
            fragments: u32::try_from(cut.bytes / fragment).unwrap_or(u32::MAX),
            direction: match direction {
                Direction::Store => "store",
                Direction::Load => "load",
            },
            one_copy_gb_per_s: one_copy,
            async_gb_per_s: one_by_one,
            batch_gb_per_s: together,
            async_to_one_copy: one_by_one.1 / one_copy.1,
            batch_to_one_copy: together.map(|together| together.1 / one_copy.1),
        })
    }
}
