//! `kvferry bench gpu`

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::cli::common::print_line;
use crate::error::CommandError;
use kvferry_cuda::{
    BATCH_COPIES_MAX, Context, Copier, CopierReport, CopierSettings, DeviceCopy, DeviceMemories,
    DeviceMemory, Driver, PIN_CHUNK_BYTES, PinnedDepot, RegisteredDevice,
};
use kvferry_memory::{
    COPY_PART_BYTES, CancelFlag, Depot, NumaNode, Prefault, page_stride_bytes, validate,
};
use kvferry_types::{Direction, FragmentPair, GroupId, PageList, TransferId};
use kvferry_workload::content::POISON;

use super::copy_fixture::{gather, registration, shuffled, turned};
use super::spread;

/// Time limit of a copy. Only a hanging copy takes this long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of the GPU, among those that this process may use.
    #[arg(long, default_value = "0")]
    gpu: usize,
    /// Sizes of a fragment in KiB.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2048,512,128,64,32,18,8,4"
    )]
    fragment_kib: Vec<u32>,
    /// Ways to give fragments to the driver that are measured beside one copy: `async` gives each by a call of its own,
    /// `batch` many by one call.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "async,batch")]
    ways: Vec<Way>,
    /// Only one direction: from the device (`store`) or to it (`load`).
    #[arg(long, value_enum)]
    direction: Option<Side>,
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

/// A way to give fragments to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    Async,
    Batch,
}

/// A direction, as it is named on the command line and in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    Store,
    Load,
}

/// Attributes of a GPU that determine which features can be used, by their numbers in `CUdevice_attribute`.
const ATTRIBUTES: [(u32, &str); 4] = [
    (91, "can_use_host_pointer_for_registered_mem"),
    (99, "host_register_supported"),
    (122, "can_use_64_bit_stream_mem_ops"),
    (133, "mps_enabled"),
];

/// Microseconds: minimum, median, maximum.
type Micros = (f64, f64, f64);

/// GB/s (10^9 bytes): minimum, median, maximum.
type Rate = (f64, f64, f64);

/// The measurements of one fragment size and direction.
#[derive(Debug, serde::Serialize)]
struct GpuRow {
    fragment_kib: u32,
    fragments: u32,
    direction: Side,
    /// One copy of the same number of bytes.
    one_copy_gb_per_s: Rate,
    /// Time to submit that copy to the driver.
    one_copy_submit_us: Micros,
    /// Each fragment by its own call, if measured.
    async_gb_per_s: Option<Rate>,
    async_submit_us: Option<Micros>,
    /// Many fragments by one call, if measured and supported by the driver.
    batch_gb_per_s: Option<Rate>,
    batch_submit_us: Option<Micros>,
    async_to_one_copy: Option<f64>,
    batch_to_one_copy: Option<f64>,
}

/// An attribute of the GPU; without a value if the driver does not support it.
#[derive(Debug, serde::Serialize)]
struct Attribute {
    number: u32,
    name: &'static str,
    value: Option<i32>,
}

#[derive(Debug, serde::Serialize)]
struct GpuReport {
    device: String,
    attributes: Vec<Attribute>,
    gpu: String,
    pci_bus_id: String,
    /// The NUMA node of the host memory; `None` if the machine does not report the GPU's node.
    numa_node: Option<u16>,
    driver_version: i32,
    bytes: u64,
    rounds: u32,
    /// Whether calls for many copies were requested, but the driver supports none.
    batches_refused: bool,
    /// One copy of the same number of bytes each way at the same time, both together.
    both_ways_gb_per_s: Rate,
    rows: Vec<GpuRow>,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        // Warnings are shown: one is logged if the driver refuses many copies by one call.
        crate::telemetry::start("warn")?;
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
        report?.print(self.json)
    }

    fn measure(
        &self,
        context: Arc<Context>,
        driver_version: i32,
    ) -> Result<GpuReport, CommandError> {
        let bench = Bench::new(context, self)?;
        let both_ways_gb_per_s = bench.both_ways()?;
        let mut rows = Vec::new();
        for kib in &self.fragment_kib {
            for side in [Side::Store, Side::Load] {
                if self.direction.is_none_or(|only| only == side) {
                    rows.push(bench.row(*kib, side)?);
                }
            }
        }
        Ok(GpuReport {
            device: bench.context.name().map_err(CommandError::failed)?,
            attributes: bench.attributes(),
            gpu: bench.context.device().uuid.to_string(),
            pci_bus_id: bench.context.pci_bus_id().map_err(CommandError::failed)?,
            numa_node: bench.node.map(|node| node.number()),
            driver_version,
            bytes: bench.bytes,
            rounds: self.rounds,
            batches_refused: bench.together.is_some()
                && !bench
                    .context
                    .copies_together()
                    .map_err(CommandError::failed)?,
            both_ways_gb_per_s,
            rows,
        })
    }
}

impl GpuReport {
    fn print(&self, json: bool) -> Result<(), CommandError> {
        if json {
            print_line(&serde_json::to_string_pretty(self).map_err(CommandError::failed)?);
            return Ok(());
        }
        let three = |(least, median, most): Rate| format!("{median:6.2} ({least:6.2}..{most:6.2})");
        let any = || "any node".to_owned();
        print_line(&format!(
            "{}, {} at {}, host memory of {}, driver for CUDA {}.{}",
            self.device,
            self.gpu,
            self.pci_bus_id,
            self.numa_node
                .map_or_else(any, |node| format!("node {node}")),
            self.driver_version / 1000,
            self.driver_version % 1000 / 10,
        ));
        for Attribute {
            number,
            name,
            value,
        } in &self.attributes
        {
            let value = value.map_or("not known".to_owned(), |value| value.to_string());
            print_line(&format!("attribute {number} ({name}): {value}"));
        }
        print_line(&format!(
            "{} MiB a copy, medians of {} rounds; every way was compared byte by byte before",
            self.bytes >> 20,
            self.rounds
        ));
        print_line(&format!(
            "one copy each way at once: {} GB/s",
            three(self.both_ways_gb_per_s)
        ));
        print_line(
            "fragment  direction  one copy GB/s            async GB/s               batch GB/s               async/one  batch/one  submit us: one copy, async, batch",
        );
        for row in &self.rows {
            let rate = |rate: Option<Rate>| rate.map_or_else(|| "-".to_owned(), three);
            let ratio = |ratio: Option<f64>| ratio.map(|ratio| format!("{ratio:.2}"));
            let micros = |micros: Option<Micros>| {
                micros.map_or_else(|| "-".to_owned(), |micros| format!("{:.0}", micros.1))
            };
            print_line(&format!(
                "{:>4} KiB  {:<9}  {:<24} {:<24} {:<24} {:>9}  {:>9}  {:>9} {:>9} {:>9}",
                row.fragment_kib,
                row.direction.name(),
                three(row.one_copy_gb_per_s),
                rate(row.async_gb_per_s),
                match self.batches_refused {
                    true => "the driver takes none".to_owned(),
                    false => rate(row.batch_gb_per_s),
                },
                ratio(row.async_to_one_copy).unwrap_or_default(),
                ratio(row.batch_to_one_copy).unwrap_or_default(),
                micros(Some(row.one_copy_submit_us)),
                micros(row.async_submit_us),
                micros(row.batch_submit_us),
            ));
        }
        Ok(())
    }
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Load => "load",
        }
    }

    const fn direction(self) -> Direction {
        match self {
            Self::Store => Direction::Store,
            Self::Load => Direction::Load,
        }
    }
}

/// A copier that submits copies to the driver in one way.
struct Giver {
    copier: Copier,
    outcomes: Receiver<CopierReport>,
}

impl Giver {
    fn start(context: &Arc<Context>, copies_a_call: usize) -> Result<Self, CommandError> {
        let (sender, outcomes) = channel();
        let copier = Copier::start(CopierSettings {
            context: Arc::clone(context),
            copies_a_call,
            mark: Box::new(|_| ()),
            report: Box::new(move |outcome| sender.send(outcome).is_ok()),
        });
        Ok(Self {
            copier: copier.map_err(CommandError::failed)?,
            outcomes,
        })
    }

    fn give(&self, order: DeviceCopy) -> Result<(), CommandError> {
        let given = self.copier.start_copy(order);
        given
            .then_some(())
            .ok_or_else(|| CommandError::failed("no place for a copy"))
    }

    /// Waits until `copies` copies have ended.
    fn ended(&self, mut copies: usize) -> Result<(), CommandError> {
        while copies > 0 {
            match self
                .outcomes
                .recv_timeout(ANSWER_TIMEOUT)
                .map_err(CommandError::failed)?
            {
                CopierReport::Ended(ended) => {
                    if !ended.iter().all(|copy| copy.complete) {
                        return Err(CommandError::failed("a copy was refused: see above"));
                    }
                    copies = copies.saturating_sub(ended.len());
                }
                CopierReport::Written(_) => {}
                CopierReport::Lost(error) => return Err(CommandError::failed(error)),
            }
        }
        Ok(())
    }

    /// Runs one copy. Returns its rate in GB/s, from order to end, and the microseconds spent in submitting it to the
    /// driver.
    fn timed(&self, cut: &Cut, direction: Direction) -> Result<(f64, f64), CommandError> {
        let order = cut.order(direction)?;
        let (begun, before) = (Instant::now(), self.copier.giving());
        self.give(order)?;
        self.ended(1)?;
        let rate = rate(cut.bytes, begun);
        let giving = self.copier.giving().saturating_sub(before);
        Ok((rate, giving.as_secs_f64() * 1e6))
    }
}

fn rate(bytes: u64, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

/// Both memories, divided into pages of one size, and the page pairs to copy.
struct Cut {
    device: RegisteredDevice,
    depot: Arc<PinnedDepot>,
    pairs: Vec<FragmentPair>,
    /// Bytes of all pages.
    bytes: u64,
}

impl Cut {
    /// Creates an order for the copy. Sets the depot's page size first, because cuts of different page sizes take
    /// turns.
    fn order(&self, direction: Direction) -> Result<DeviceCopy, CommandError> {
        let page_bytes = self.device.layout.geometry.page_bytes();
        let held = self.depot.depot().hold_pages_of(page_bytes);
        held.map_err(CommandError::failed)?;
        let pairs = match direction {
            Direction::Store => self.pairs.clone(),
            Direction::Load => self.pairs.iter().cloned().map(turned).collect(),
        };
        Ok(DeviceCopy {
            transfer: TransferId(1),
            direction,
            parts: FragmentPair::parts(pairs, page_bytes, COPY_PART_BYTES),
            group: GroupId(0),
            device: self.device.clone(),
            depot: Arc::clone(&self.depot),
            cancel: Arc::new(CancelFlag::default()),
        })
    }

    /// Offsets of all pages in the depot's memory.
    fn places(&self) -> impl Iterator<Item = u64> + use<> {
        let page_bytes = self.device.layout.geometry.page_bytes();
        let first = self.depot.depot().pages_at(page_bytes);
        let stride = page_stride_bytes(page_bytes);
        (0..self.bytes / page_bytes).map(move |page| first + page * stride)
    }
}

/// The memories and the copiers that are measured.
struct Bench {
    context: Arc<Context>,
    node: Option<NumaNode>,
    memory: Arc<DeviceMemories>,
    depot: Arc<PinnedDepot>,
    one_by_one: Giver,
    /// The copier for many copies by one call, if measured.
    together: Option<Giver>,
    /// Whether each fragment by its own call is measured.
    asynchronous: bool,
    bytes: u64,
    rounds: u32,
}

impl Bench {
    fn new(context: Arc<Context>, arguments: &Arguments) -> Result<Self, CommandError> {
        let (bytes, rounds) = (arguments.mib << 20, arguments.rounds);
        let room = arguments.fragment_kib.iter().map(|kib| {
            let fragment = u64::from(*kib) << 10;
            let pages = bytes.checked_div(fragment).unwrap_or(0);
            let pages = u32::try_from(pages).ok().filter(|pages| *pages > 0);
            let pages = pages.ok_or_else(|| {
                CommandError::Config(format!(
                    "fragment_kib is {kib}: write sizes from 1 to those of a copy, {} KiB",
                    bytes >> 10
                ))
            })?;
            Ok(Depot::bytes_for(pages, fragment))
        });
        let room = room.collect::<Result<Vec<u64>, CommandError>>()?;
        let room = room.into_iter().max().unwrap_or(0);
        // Twice, for one copy each way.
        let memory = DeviceMemory::allocate(&context, 2 * bytes).map_err(CommandError::failed)?;
        let depot =
            Depot::create(room.max(Depot::bytes_for(2, bytes))).map_err(CommandError::failed)?;
        let node = NumaNode::near(&context.pci_bus_id().map_err(CommandError::failed)?);
        let by = Prefault {
            threads: 4,
            chunk_bytes: 64 << 20,
            node: node.clone(),
        };
        let prefaulted = depot.prefault(&by, &|_, _| (), &Default::default());
        prefaulted.map_err(CommandError::failed)?;
        let depot = PinnedDepot::new(&context, Arc::new(depot), PIN_CHUNK_BYTES, |_| ());
        Ok(Self {
            memory: DeviceMemories::own(vec![memory]),
            depot: Arc::new(depot.map_err(CommandError::failed)?),
            one_by_one: Giver::start(&context, 1)?,
            together: match arguments.ways.contains(&Way::Batch) {
                true => Some(Giver::start(&context, BATCH_COPIES_MAX)?),
                false => None,
            },
            asynchronous: arguments.ways.contains(&Way::Async),
            context,
            node,
            bytes,
            rounds,
        })
    }

    /// Divides the memory into fragments, in an order in which hardly two are neighbours on both sides.
    fn cut(&self, fragment: u64) -> Result<Cut, CommandError> {
        let pages = u32::try_from(self.bytes / fragment).map_err(CommandError::failed)?;
        self.pages(fragment, pages, gather(&shuffled(pages), 0))
    }

    fn pages(&self, page: u64, pages: u32, pairs: Vec<FragmentPair>) -> Result<Cut, CommandError> {
        let registration = registration(page, pages);
        let layout = validate(&registration).map_err(CommandError::failed)?;
        Ok(Cut {
            device: RegisteredDevice {
                memory: Arc::clone(&self.memory),
                layout: Arc::new(layout),
                timeline: None,
            },
            depot: Arc::clone(&self.depot),
            pairs,
            bytes: page * u64::from(pages),
        })
    }

    /// Measures one copy each way at the same time.
    fn both_ways(&self) -> Result<Rate, CommandError> {
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
            let store = stored.order(Direction::Store)?;
            let load = loaded.order(Direction::Load)?;
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

    /// Checks that random bytes that one copier loads and another stores come back unchanged.
    fn check(&self, loads: &Giver, stores: &Giver, cut: &Cut) -> Result<(), CommandError> {
        let (page_bytes, buffer) = (
            cut.device.layout.geometry.page_bytes(),
            self.depot.depot().buffer(),
        );
        let mut page = vec![0; page_bytes as usize];
        let seed = fastrand::u64(..);
        let mut random = fastrand::Rng::with_seed(seed);
        for at in cut.places() {
            random.fill(&mut page);
            buffer.write_from(at, &page).map_err(CommandError::failed)?;
        }
        loads.timed(cut, Direction::Load)?;
        page.fill(POISON);
        for at in cut.places() {
            buffer.write_from(at, &page).map_err(CommandError::failed)?;
        }
        stores.timed(cut, Direction::Store)?;
        let (mut random, mut expected) = (fastrand::Rng::with_seed(seed), page.clone());
        for (number, at) in cut.places().enumerate() {
            random.fill(&mut expected);
            buffer
                .read_into(at, &mut page)
                .map_err(CommandError::failed)?;
            if page != expected {
                return Err(CommandError::Found(format!(
                    "fragment {number} of {page_bytes} bytes came back with other bytes"
                )));
            }
        }
        Ok(())
    }

    /// Attributes that determine which features can be used.
    fn attributes(&self) -> Vec<Attribute> {
        let attribute = |(number, name)| Attribute {
            number,
            name,
            value: self.context.attribute(number).ok(),
        };
        ATTRIBUTES.map(attribute).into()
    }

    fn row(&self, kib: u32, side: Side) -> Result<GpuRow, CommandError> {
        let fragment = u64::from(kib) << 10;
        let cut = self.cut(fragment)?;
        let complete = self.pages(cut.bytes, 1, gather(&[0], 0))?;
        let alone = &self.one_by_one;
        let asynchronous = self.asynchronous.then_some(alone);
        self.check(alone, alone, &complete)?;
        match &self.together {
            Some(batched) => {
                self.check(alone, batched, &cut)?;
                self.check(batched, alone, &cut)?;
            }
            None => self.check(alone, alone, &cut)?,
        }
        let ways = [
            (Some(alone), &complete),
            (asynchronous, &cut),
            (self.together.as_ref(), &cut),
        ];
        let mut measured = [const { (Vec::new(), Vec::new()) }; 3];
        for round in 0..=self.rounds {
            for ((giver, cut), (rates, submits)) in ways.iter().zip(&mut measured) {
                let Some(giver) = giver else { continue };
                let (rate, submit) = giver.timed(cut, side.direction())?;
                // The first round warms up.
                if round > 0 {
                    rates.push(rate);
                    submits.push(submit);
                }
            }
        }
        let [one_copy, one_by_one, together] =
            measured.map(|(rates, submits)| (spread(rates), spread(submits)));
        let one_by_one = asynchronous.map(|_| one_by_one);
        // Copies that the driver does not take by one call were submitted one by one.
        let taken = self.together.is_some()
            && self
                .context
                .copies_together()
                .map_err(CommandError::failed)?;
        let together = taken.then_some(together);
        let to_one_copy = |way: Option<(Rate, Micros)>| way.map(|(rate, _)| rate.1 / one_copy.0.1);
        Ok(GpuRow {
            fragment_kib: kib,
            fragments: u32::try_from(cut.bytes / fragment).unwrap_or(u32::MAX),
            direction: side,
            one_copy_gb_per_s: one_copy.0,
            one_copy_submit_us: one_copy.1,
            async_gb_per_s: one_by_one.map(|way| way.0),
            async_submit_us: one_by_one.map(|way| way.1),
            batch_gb_per_s: together.map(|way| way.0),
            batch_submit_us: together.map(|way| way.1),
            async_to_one_copy: to_one_copy(one_by_one),
            batch_to_one_copy: to_one_copy(together),
        })
    }
}
