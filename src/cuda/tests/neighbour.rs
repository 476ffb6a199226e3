//! Memory of another process, by IPC handles: opened, proven, read and written, and never an earlier mapping.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::{Context, DeviceIo, DeviceMemories, DeviceMemory, Driver, RegisteredDevice};
use kvferry_types::{Allocation, AllocationHandle, AllocationKind, Nonce, Registration};

use super::copies::plain;
use super::engine::Roles;
use super::fake;

/// The test below, which runs both sides.
const TEST: &str = "tests::neighbour::memory_of_another_process_is_copied_unchanged";
/// Variable that marks the engine's process.
const ENGINE: &str = "FAKE_CUDA_ENGINE";
const SEEDS: u64 = 40;

pub(super) fn context() -> std::sync::Arc<Context> {
    let driver = Driver::get().expect("it is there");
    let device = driver.devices().expect("listed")[0];
    Context::new(driver, device).expect("a context")
}

/// The contents of the memory of a generation.
pub(super) fn contents(generation: u64, bytes: usize) -> Vec<u8> {
    let mut contents = vec![0; bytes];
    fastrand::Rng::with_seed(generation).fill(&mut contents);
    contents
}

pub(super) fn bytes() -> u64 {
    plain(Roles::Split).registration().allocations[0].bytes
}

/// The engine: allocates new memory for each line, and writes its handle. `keep` keeps the earlier memory alive.
fn engine() {
    let context = context();
    let mut staged_io = DeviceIo::new(&context).expect("a window");
    let mut kept = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.expect("readable");
        let (generation, keep) = line.split_once(' ').expect("two words");
        if keep != "keep" {
            kept.clear();
        }
        let generation: u64 = generation.parse().expect("a number");
        // A real driver shares a whole block of 2 MiB: in a smaller allocation, other processes also see its
        // neighbours.
        let alone = generation.is_multiple_of(2) || fake::on_gpu();
        let wanted = if alone { bytes().max(2 << 20) } else { bytes() };
        let memory = DeviceMemory::allocate(&context, wanted).expect("memory");
        let handle = memory.ipc_handle().expect("a handle");
        let memory = DeviceMemories::own(vec![memory]);
        let written = contents(generation, bytes() as usize);
        let all = [(0, bytes())];
        staged_io
            .write(&memory, 0, &all, &written)
            .expect("written");
        let digits: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\nengine: {digits}");
        kept.push(memory);
    }
}

pub(super) struct Neighbour {
    process: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Neighbour {
    pub(super) fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command
            .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(ENGINE, "1")
            .env(kvferry_fake_cuda::SETTINGS, "delay_us=100")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().expect("it runs");
        Self {
            orders: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().expect("a pipe")).lines(),
            process,
        }
    }

    /// Requests new memory of the engine, and returns its handle.
    pub(super) fn memory(&mut self, generation: u64, keep: bool) -> [u8; 64] {
        let keep = if keep { "keep" } else { "free" };
        let orders = self.orders.as_mut().expect("it listens");
        writeln!(orders, "{generation} {keep}").expect("it listens");
        let said = self.answers.by_ref().map(|line| line.expect("text"));
        let digits = said
            .filter_map(|line| line.strip_prefix("engine: ").map(str::to_owned))
            .next()
            .expect("it answers");
        let byte = |at: usize| u8::from_str_radix(&digits[at * 2..at * 2 + 2], 16);
        std::array::from_fn(|at| byte(at).expect("hexadecimal"))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.orders = None;
        self.process.wait().expect("it ends");
    }
}

pub(super) fn registration(handle: [u8; 64], generation: u64) -> Registration {
    let mut registration = plain(Roles::Split).registration();
    assert_eq!(registration.allocations.len(), 1);
    registration.device_uuid = Some("GPU-0".to_owned());
    registration.allocations[0] = Allocation {
        kind: AllocationKind::Device,
        handle: AllocationHandle::CudaIpc(handle),
        bytes: bytes(),
    };
    registration.nonce = Nonce {
        allocation: 0,
        offset_bytes: 0,
        bytes: contents(generation, bytes() as usize)[..32].to_vec(),
    };
    registration
}

/// An engine that registers memory, and then other memory, as after a restart.
fn one_seed(neighbour: &mut Neighbour, seed: u64) {
    let mut chance = fastrand::Rng::with_seed(seed);
    let context = context();
    let mut staged_io = DeviceIo::new(&context).expect("a window");
    for round in 0..3 {
        let generation = seed * 10 + round;
        let handle = neighbour.memory(generation, chance.bool());
        let registration = registration(handle, generation);
        let opened = RegisteredDevice::open(&registration, &context, &mut staged_io, |_| None);
        let opened = opened.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let expected = contents(generation, bytes() as usize);
        let mut seen = vec![0; expected.len()];
        let read = staged_io.read(&opened.memory, 0, &[(0, bytes())], &mut seen);
        read.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(seen == expected, "seed {seed}, round {round}");
    }
}

fn seeds(count: u64) {
    let mut neighbour = Neighbour::start();
    for seed in 0..count {
        one_seed(&mut neighbour, seed);
    }
}

#[test]
fn memory_of_another_process_is_copied_unchanged() {
    if std::env::var_os(ENGINE).is_some() {
        return engine();
    }
    fake::anywhere("seed=3;delay_us=100", || seeds(SEEDS));
}

/// A driver that does not report the size of memory that another process allocated.
#[test]
fn memory_whose_size_only_its_engine_reports_is_mapped() {
    fake::under_and_clean("fail=*/cuMemGetAddressRange_v2/1/500", || seeds(2));
}

/// A failure of the size query may also mean that the GPU is lost for this process.
#[test]
fn an_opening_that_loses_the_gpu_is_reported() {
    fake::under("fail=*/cuMemGetAddressRange_v2/1/719", || {
        let mut neighbour = Neighbour::start();
        let (context, handle) = (context(), neighbour.memory(1, false));
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        let registration = registration(handle, 1);
        let refused = RegisteredDevice::open(&registration, &context, &mut staged_io, |_| None);
        let error = refused.expect_err("the GPU is lost").fatal();
        assert_eq!(error.and_then(|error| error.code()), Some(719));
    });
}

#[test]
fn a_handle_of_freed_memory_is_refused_with_the_reason() {
    fake::anywhere("", || {
        let mut neighbour = Neighbour::start();
        let context = context();
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        let old = neighbour.memory(1, false);
        let new = neighbour.memory(2, false);
        let open = |handle, generation, staged_io: &mut DeviceIo| {
            let registration = registration(handle, generation);
            let opened = RegisteredDevice::open(&registration, &context, staged_io, |_| None);
            opened.map(|_| ()).map_err(|error| error.to_string())
        };
        // NVIDIA's driver opens the memory that lies at the freed address now; then only the proof tells them apart.
        let refused = open(old, 1, &mut staged_io).expect_err("freed");
        let reasons = [
            "registration.allocations[0].handle: cuIpcOpenMemHandle_v2 answered CUDA_ERROR",
            "registration.nonce: not at byte 0",
        ];
        assert!(
            reasons.iter().any(|reason| refused.starts_with(reason)),
            "{refused}"
        );
        let refused = open(new, 1, &mut staged_io).expect_err("other contents");
        assert!(
            refused.starts_with("registration.nonce: not at byte 0"),
            "{refused}"
        );
        open(new, 2, &mut staged_io).expect("what it says it is");
    });
}
