//! How many calls of one direction the driver gets before the other direction has its turn, how many threads pin
//! memory, and what the fake driver does with memory that is not pinned.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use crate::driver::{DeviceSide, HostMemory, Stream};
use crate::{
    Context, Copier, CopierReport, CopierSettings, DeviceCopy, DeviceMemories, DeviceMemory,
    Driver, PinnedDepot, end_process, threads_in_driver,
};
use kvferry_memory::{CopyRange, Depot, SharedBuffer};
use kvferry_types::{Direction, FragmentPair, GroupId, PageList, TransferId};

use super::copies::plain;
use super::engine::Roles;
use super::fake;
use super::world::{TEST_TIMEOUT, Wanted, World};

/// Runs a body under these settings, and returns the driver's trace.
fn traced(settings: &str, body: impl FnOnce()) -> Option<String> {
    let traces = tempfile::tempdir().expect("a folder");
    let settings = format!("{settings};trace={}", traces.path().display());
    fake::under(&settings, body)?;
    Some(fake::only_file(traces.path()))
}

/// Copies of a trace: whether they are from the device, and how many in a row.
fn copies(trace: &str) -> Vec<(bool, usize)> {
    let lines = trace.lines().filter_map(|line| line.split_once(' '));
    let copies = lines.filter_map(|(way, count)| match way {
        "d2h" => Some((true, count)),
        "h2d" => Some((false, count)),
        _ => None,
    });
    copies
        .map(|(way, count)| (way, count.parse().expect("a number")))
        .collect()
}

/// Calls for which a load may have to wait, those of the first copy included.
const TURN_MAX: usize = 300;

/// A part of a store has far more calls than a turn, and each call has its cost: a load that was ordered together with
/// the store must be submitted after one turn, not after the part.
#[test]
fn a_load_is_submitted_after_one_slice_of_a_store_of_small_fragments() {
    const PAGES: u32 = 400;
    let trace = traced("call_us=5", || {
        let mut engine = plain(Roles::Split);
        engine.pages = u64::from(PAGES);
        let world = World::new(engine.registration(), PAGES, 1 << 30, 1);
        let fragments = world.layout.fragments.len();
        assert!(PAGES as usize * fragments > 3 * TURN_MAX, "{fragments}");
        // The copier blocks in its first report until both orders are queued.
        let (first, stands) = channel();
        let (go_on, may_go_on) = channel::<()>();
        let (sender, outcomes) = channel();
        let reported = std::sync::Mutex::new(Some((first, may_go_on)));
        let context = Context::new(Driver::get().expect("there"), device()).expect("a context");
        let copier = Copier::start(CopierSettings {
            context,
            copies_a_call: 1,
            mark: Box::new(|_| ()),
            report: Box::new(move |outcome| {
                if let Some((first, may_go_on)) = reported.lock().expect("no panic").take() {
                    first.send(()).expect("the test goes on");
                    may_go_on.recv().expect("the test goes on");
                }
                sender.send(outcome).is_ok()
            }),
        });
        let copier = copier.expect("a copier");
        let order = |transfer, direction, pages: std::ops::Range<u32>| {
            // In reverse order, so that neighbours are not merged.
            let list = |pages: std::ops::Range<u32>| pages.rev().collect::<PageList>();
            let pair = FragmentPair {
                src: list(pages.clone()),
                dst: list(pages),
            };
            let given = copier.start_copy(DeviceCopy {
                transfer: TransferId(transfer),
                direction,
                parts: vec![vec![pair]],
                device: world.device.clone(),
                group: GroupId(0),
                depot: Arc::clone(&world.depot),
                cancel: Arc::default(),
            });
            assert!(given, "a place");
        };
        order(1, Direction::Store, 0..1);
        stands
            .recv_timeout(TEST_TIMEOUT)
            .expect("the first copy ends");
        order(2, Direction::Store, 0..PAGES - 2);
        order(3, Direction::Load, PAGES - 2..PAGES);
        go_on.send(()).expect("the copier waits");
        let mut left = 3;
        while left > 0 {
            match outcomes.recv_timeout(TEST_TIMEOUT).expect("they end") {
                CopierReport::Ended(ended) => {
                    assert!(ended.iter().all(|copy| copy.complete), "{ended:?}");
                    left -= ended.len();
                }
                other => panic!("{other:?}"),
            }
        }
    });
    let Some(trace) = trace else { return };
    let copies = copies(&trace);
    // The creation of the world writes to the device, then one page is stored; the next copies from the device are
    // those of the large store.
    let load = copies.iter().rposition(|(from_device, _)| !from_device);
    let load = load.expect("the load");
    let (_, before) = copies[load - 1];
    assert!(before <= TURN_MAX, "{copies:?}");
    assert!(
        copies.len() > load + 1,
        "the store went on behind it: {copies:?}"
    );
}

fn device() -> crate::Device {
    let driver = Driver::get().expect("it is there");
    driver.devices().expect("listed")[0]
}

/// Host memory that is not pinned.
struct Plain(SharedBuffer);

impl HostMemory for Plain {
    fn buffer(&self) -> &SharedBuffer {
        &self.0
    }

    fn end_of_part(&self, _offset_bytes: u64) -> u64 {
        u64::MAX
    }
}

/// A real driver accepts such a copy, and blocks its caller while it copies the bytes twice: only the fake driver shows
/// the mistake.
#[test]
fn a_copy_of_host_memory_that_is_not_pinned_is_refused() {
    fake::under("strict=1", || {
        let context = Context::new(Driver::get().expect("there"), device()).expect("a context");
        let stream = Stream::new(&context).expect("a stream");
        let memory = DeviceMemory::allocate(&context, 4096).expect("memory");
        let device = DeviceMemories::own(vec![memory]) as Arc<dyn DeviceSide>;
        let host = Arc::new(Plain(SharedBuffer::create("plain", 4096).expect("memory")));
        let range = CopyRange {
            allocation: 0,
            device_bytes: 0,
            depot_bytes: 0,
            len_bytes: 4096,
        };
        let mut ranges = std::iter::once(range);
        let refused = stream.submit(Direction::Store, device, host, &mut ranges);
        let error = refused.expect_err("not pinned").error();
        assert_eq!(
            (error.call(), error.code()),
            (Some("cuMemcpyAsync"), Some(1))
        );
    });
}

/// A range outside of its memory never reaches the driver, and is not reported as an error of the driver.
#[test]
fn a_range_outside_of_its_memory_is_not_reported_as_an_answer_of_the_driver() {
    let trace = traced("", || {
        let world = World::new(plain(Roles::Split).registration(), 9, 4096, 1);
        let context = Context::new(Driver::get().expect("there"), device()).expect("a context");
        let stream = Stream::new(&context).expect("a stream");
        let range = CopyRange {
            allocation: 0,
            device_bytes: 1 << 40,
            depot_bytes: 0,
            len_bytes: 8,
        };
        let memory = Arc::clone(&world.device.memory) as Arc<dyn DeviceSide>;
        let host = Arc::clone(&world.depot) as Arc<dyn HostMemory>;
        let mut ranges = std::iter::once(range);
        let refused = stream.submit(Direction::Store, memory, host, &mut ranges);
        let error = refused.expect_err("outside").error();
        assert_eq!((error.call(), error.code()), (None, None));
        assert!(!error.is_fatal());
        let text = error.to_string();
        assert!(text.contains("the driver was not called"), "{text}");
    });
    let Some(trace) = trace else { return };
    assert!(
        !copies(&trace).iter().any(|(from_device, _)| *from_device),
        "{trace}"
    );
}

/// Number of threads that called a function, from the trace.
fn threads(trace: &str, call: &str) -> usize {
    let prefix = format!("threads {call} ");
    let found = trace.lines().find_map(|line| line.strip_prefix(&prefix));
    found.map_or(0, |count| count.parse().expect("a number"))
}

/// One thread pins about 10 GiB/s, which takes minutes for 1 TiB: several threads pin chunks at the same time.
#[test]
fn a_depot_is_pinned_by_several_threads() {
    // 1,024 chunks in 0.2 s.
    let trace = traced("call_us=200", || {
        let context = Context::new(Driver::get().expect("there"), device()).expect("a context");
        let depot = Arc::new(Depot::create(4 << 20).expect("memory"));
        let mut pinned = Vec::new();
        let all = PinnedDepot::new(&context, depot, 4096, |bytes| pinned.push(bytes));
        let all = all.expect("pinned");
        assert_eq!(all.depot().bytes(), 4 << 20);
        let expected: Vec<u64> = (1..=1024).map(|chunk| chunk * 4096).collect();
        assert_eq!(pinned, expected);
    });
    let Some(trace) = trace else { return };
    assert!(threads(&trace, "cuMemHostRegister_v2") > 1, "{trace}");
}

/// Memory that the driver pins does not count as locked memory: the remedy is another one.
#[test]
fn memory_that_cannot_be_pinned_is_refused_with_the_limit() {
    refused_pin(
        "fail=*/cuMemHostRegister_v2/100/2",
        "the memory cgroup of a container",
    );
}

#[test]
fn a_gpu_that_cannot_register_memory_is_refused_with_that_reason() {
    refused_pin(
        "attribute=99/0;fail=*/cuMemHostRegister_v2/100/2",
        "as in a confidential virtual machine",
    );
}

fn refused_pin(settings: &str, limit: &str) {
    fake::under(settings, || {
        let context = Context::new(Driver::get().expect("there"), device()).expect("a context");
        let depot = Arc::new(Depot::create(1 << 20).expect("memory"));
        let mut pinned = 0;
        let refused = PinnedDepot::new(&context, depot, 4096, |bytes| pinned = bytes);
        let error = refused.expect_err("a chunk is refused");
        assert_eq!((error.pinned_bytes, error.bytes), (pinned, 1 << 20));
        assert!(pinned < 1 << 20, "all of it");
        let text = error.to_string();
        assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{text}");
        assert!(text.contains(limit), "{text}");
    });
}

/// Whether a thread of this process has the name that the fake driver gives to one in a call that does not return.
fn a_thread_is_in_the_driver() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    tasks.flatten().any(|task| {
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| name.trim() == "in-driver")
    })
}

/// A driver frees its state when the process ends, and crashes if a thread is in one of its functions.
#[test]
fn a_process_with_a_thread_in_the_driver_ends_without_the_driver() {
    const STATUS: u8 = 7;
    if fake::is_inside() {
        let mut world = World::new(plain(Roles::Split).registration(), 9, 4096, 1);
        let store = Wanted {
            direction: Direction::Store,
            pages: vec![(0, 0)],
            pages_a_part: 1,
        };
        let until = Instant::now() + TEST_TIMEOUT;
        while !a_thread_is_in_the_driver() {
            assert!(Instant::now() < until, "the call returns");
            // Refused while the queue is full.
            world.try_start(&store, Arc::default());
            std::thread::yield_now();
        }
        // Waits for the copying thread up to its limit, then leaves it.
        drop(world);
        assert!(threads_in_driver());
        end_process(STATUS);
    }
    let folder = fake::folder(&fake::library());
    // The creation of the world takes two copies.
    let output = fake::again(folder.path(), "block=*/cuMemcpyAsync/3");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cuMemcpyAsync does not return"), "{said}");
    assert_eq!(output.status.code(), Some(i32::from(STATUS)), "{said}");
}
