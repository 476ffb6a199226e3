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
use crate::memory::{
    COPY_PART_BYTES, CancelFlag, Depot, NumaNode, Prefault, page_stride_bytes, validate,
};
use crate::types::{Direction, FragmentPair, OpId, PageList};

use super::copy::registration;
use super::pages::{gather, shuffled, turned};
use super::spread;

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

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
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u64).range(1..=1024))]
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
    /// Many fragments by a call, where the driver takes such calls.
    batch_gb_per_s: Option<Rate>,
    async_to_one_copy: f64,
    batch_to_one_copy: Option<f64>,
}

#[derive(Debug, serde::Serialize)]
struct Report {
    gpu: String,
    pci_bus_id: String,
    /// Where the host memory is from, if the machine tells where the GPU is.
    numa_node: Option<u16>,
    driver_version: i32,
    bytes: u64,
    rounds: u32,
    /// One copy of as many bytes each way at the same time, both together.
    both_ways_gb_per_s: Rate,
    rows: Vec<Row>,
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
        let report = self.measure(context, driver.version());
        report.map_err(CommandError::Failed)?.say(self.json)
    }

    fn measure(&self, context: Arc<Context>, driver_version: i32) -> Result<Report, String> {
        let bench = Bench::new(context, self.mib << 20, self.rounds, &self.fragment_kib)?;
        let both_ways_gb_per_s = bench.both_ways()?;
        let mut rows = Vec::new();
        for kib in &self.fragment_kib {
            for direction in [Direction::Store, Direction::Load] {
                rows.push(bench.row(*kib, direction)?);
            }
        }
        Ok(Report {
            gpu: bench.context.device().uuid.to_string(),
            pci_bus_id: bench.context.pci_bus_id().map_err(text)?,
            numa_node: bench.node.map(|node| node.number()),
            driver_version,
            bytes: bench.bytes,
            rounds: self.rounds,
            both_ways_gb_per_s,
            rows,
        })
    }
}

impl Report {
    fn say(&self, json: bool) -> Result<(), CommandError> {
        if json {
            say(&serde_json::to_string_pretty(self).map_err(CommandError::failed)?);
            return Ok(());
        }
        let three = |(least, median, most): Rate| format!("{median:6.2} ({least:6.2}..{most:6.2})");
        let any = || "any node".to_owned();
        say(&format!(
            "{} at {}, host memory of {}, driver for CUDA {}.{}",
            self.gpu,
            self.pci_bus_id,
            self.numa_node
                .map_or_else(any, |node| format!("node {node}")),
            self.driver_version / 1000,
            self.driver_version % 1000 / 10,
        ));
        say(&format!(
            "{} MiB a copy, medians of {} rounds; every way was compared byte by byte before",
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
        let none = || "the driver takes none".to_owned();
        for row in &self.rows {
            let ratio = row.batch_to_one_copy.map(|ratio| format!("{ratio:.2}"));
            say(&format!(
                "{:>4} KiB  {:<9}  {:<24} {:<24} {:<24} {:>9.2}  {:>9}",
                row.fragment_kib,
                row.direction,
                three(row.one_copy_gb_per_s),
                three(row.async_gb_per_s),
                row.batch_gb_per_s.map_or_else(none, three),
                row.async_to_one_copy,
                ratio.unwrap_or_default(),
            ));
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// One way to give copies to the driver.
struct Side {
    copier: Copier,
    outcomes: Receiver<Outcome>,
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

    fn give(&self, order: CopyOrder) -> Result<(), String> {
        let given = self.copier.start_copy(order);
        given
            .then_some(())
            .ok_or_else(|| "no place for a copy".to_owned())
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
        let order = cut.order(direction);
        let begun = Instant::now();
        self.give(order)?;
        self.ended(1)?;
        Ok(rate(cut.bytes, begun))
    }
}

fn rate(bytes: u64, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

/// Both memories, cut into pages of one size, and which of them are copied.
struct Cut {
    device: RegisteredDevice,
    depot: Arc<PinnedDepot>,
    pairs: Vec<FragmentPair>,
    /// Of all pages.
    bytes: u64,
}

impl Cut {
    /// A copy of them.
    fn order(&self, direction: Direction) -> CopyOrder {
        let pairs = match direction {
            Direction::Store => self.pairs.clone(),
            Direction::Load => self.pairs.iter().cloned().map(turned).collect(),
        };
        CopyOrder {
            op: OpId(1),
            direction,
            parts: FragmentPair::parts(pairs, self.device.layout.page_bytes, COPY_PART_BYTES),
            device: self.device.clone(),
            depot: Arc::clone(&self.depot),
            cancel: Arc::new(CancelFlag::default()),
        }
    }

    /// Where all pages lie in the depot's memory.
    fn places(&self) -> impl Iterator<Item = u64> + use<> {
        let page_bytes = self.device.layout.page_bytes;
        let first = self.depot.depot().pages_at(page_bytes);
        let stride = page_stride_bytes(page_bytes);
        (0..self.bytes / page_bytes).map(move |page| first + page * stride)
    }
}

/// Memory and ways.
struct Bench {
    context: Arc<Context>,
    node: Option<NumaNode>,
    memory: Arc<DeviceMemories>,
    depot: Arc<PinnedDepot>,
    one_by_one: Side,
    together: Side,
    bytes: u64,
    rounds: u32,
}

impl Bench {
    fn new(
        context: Arc<Context>,
        bytes: u64,
        rounds: u32,
        fragments_kib: &[u32],
    ) -> Result<Self, String> {
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
        // Twice, for one copy each way.
        let memory = DeviceMemory::allocate(&context, 2 * bytes).map_err(text)?;
        let depot = Depot::create(room.max(Depot::bytes_for(2, bytes))).map_err(text)?;
        let node = NumaNode::near(&context.pci_bus_id().map_err(text)?);
        let by = Prefault {
            threads: 4,
            chunk_bytes: 64 << 20,
            node: node.clone(),
        };
        let prefaulted = depot.prefault(&by, &|_, _| (), &Default::default());
        prefaulted.map_err(text)?;
        let depot = PinnedDepot::new(&context, Arc::new(depot), PIN_CHUNK_BYTES, |_| ());
        Ok(Self {
            memory: DeviceMemories::own(vec![memory]),
            depot: Arc::new(depot.map_err(text)?),
            one_by_one: Side::start(&context, 1)?,
            together: Side::start(&context, BATCH_COPIES_MAX)?,
            context,
            node,
            bytes,
            rounds,
        })
    }

    /// As many fragments as a copy has, in an order in which hardly two are neighbours on both sides.
    fn cut(&self, fragment: u64) -> Result<Cut, String> {
        let pages = u32::try_from(self.bytes / fragment).map_err(text)?;
        self.pages(fragment, pages, gather(&shuffled(pages), 0))
    }

    fn pages(&self, page: u64, pages: u32, pairs: Vec<FragmentPair>) -> Result<Cut, String> {
        let registration = registration(page, pages);
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
            pairs,
            bytes: page * u64::from(pages),
        })
    }

    /// One copy each way at once.
    fn both_ways(&self) -> Result<Rate, String> {
        let one_of_two = |page: u32| {
            let pair = FragmentPair {
                src: PageList::run(page, 1),
                dst: PageList::run(page, 1),
            };
            self.pages(self.bytes, 2, vec![pair])
        };
        let (stored, loaded) = (one_of_two(0)?, one_of_two(1)?);
        let mut rates = Vec::new();
        for round in 0..=self.rounds {
            let store = stored.order(Direction::Store);
            let load = loaded.order(Direction::Load);
            let begun = Instant::now();
            self.one_by_one.give(store)?;
            self.one_by_one.give(load)?;
            self.one_by_one.ended(2)?;
            // The first round warms up.
            if round > 0 {
                rates.push(rate(2 * self.bytes, begun));
            }
        }
        Ok(spread(rates))
    }

    /// Random bytes that one side loads and another one stores are the same as before.
    fn check(&self, loads: &Side, stores: &Side, cut: &Cut) -> Result<(), String> {
        let (page_bytes, buffer) = (cut.device.layout.page_bytes, self.depot.depot().buffer());
        let mut page = vec![0; page_bytes as usize];
        let seed = fastrand::u64(..);
        let mut random = fastrand::Rng::with_seed(seed);
        for at in cut.places() {
            random.fill(&mut page);
            buffer.write_from(at, &page).map_err(text)?;
        }
        loads.timed(cut, Direction::Load)?;
        page.fill(POISON);
        for at in cut.places() {
            buffer.write_from(at, &page).map_err(text)?;
        }
        stores.timed(cut, Direction::Store)?;
        let (mut random, mut expected) = (fastrand::Rng::with_seed(seed), page.clone());
        for (number, at) in cut.places().enumerate() {
            random.fill(&mut expected);
            buffer.read_into(at, &mut page).map_err(text)?;
            if page != expected {
                return Err(format!(
                    "fragment {number} of {page_bytes} bytes came back with other bytes"
                ));
            }
        }
        Ok(())
    }

    fn row(&self, kib: u32, direction: Direction) -> Result<Row, String> {
        let fragment = u64::from(kib) << 10;
        let cut = self.cut(fragment)?;
        let whole = self.pages(cut.bytes, 1, gather(&[0], 0))?;
        let (alone, batched) = (&self.one_by_one, &self.together);
        self.check(alone, alone, &whole)?;
        self.check(alone, batched, &cut)?;
        self.check(batched, alone, &cut)?;
        let (mut one_copy, mut one_by_one, mut together) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=self.rounds {
            let rates = [
                alone.timed(&whole, direction)?,
                alone.timed(&cut, direction)?,
                batched.timed(&cut, direction)?,
            ];
            // The first round warms up.
            if round > 0 {
                one_copy.push(rates[0]);
                one_by_one.push(rates[1]);
                together.push(rates[2]);
            }
        }
        let (one_copy, one_by_one) = (spread(one_copy), spread(one_by_one));
        // What the driver does not take by one call was given one by one.
        let taken = self.context.copies_together().map_err(text)?;
        let together = taken.then(|| spread(together));
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
