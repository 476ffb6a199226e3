//! Settings with which a test configures the driver.

use std::collections::BTreeMap;

use crate::code::Code;

/// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`.
const HOST_POINTERS: u32 = 91;

/// Environment variable with the settings, `name=value` separated by `;`. `WHO` selects the processes with that word in
/// their command line, `*` selects all. Defaults are in parentheses:
///
/// * `devices=N` (1);
/// * `version=12040`: the result of `cuDriverGetVersion`;
/// * `init=CODE`: the result of `cuInit`;
/// * `seed=N` (1): seed of the pauses; each stream derives its own from it and the stream's number;
/// * `delay_us=N` (0): longest pause before a piece of work; `delay_us=WHO/N`: only in the selected processes;
/// * `fail=WHO/CALL/NTH/CODE`, any number of times: the n-th such call of a process fails. `CALL` is the name of
///   a function, or `*` for all calls together; functions that return the name of an error do not count;
/// * `once=FILE`: those calls fail only in the first process that reaches one of them, which creates this file;
/// * `init_ms=N` (0): duration of `cuInit`;
/// * `exclusive=FILE`: the GPUs are in exclusive compute mode: only one process has contexts at a time, the one that
///   holds this file, and other processes get 46;
/// * `memory_mib=N` (unlimited), `context_mib=N` or `context_mib=WHO/N` (0): memory that a process can allocate on a
///   GPU, and the part of it that a context takes;
/// * `granule_kib=N` (2048): granularity of the virtual memory management: chunks and reservations are multiples of it;
/// * `strict=1`: asynchronous copies of host memory that is not registered are refused (a real driver copies it twice,
///   and blocks the caller) (0);
/// * `call_us=N` or `call_us=WHO/N` (0): duration of each call that needs a context; calls of one process wait for each
///   other;
/// * `pidns=WHO/N`: these processes are in another PID namespace, where memory handles are not valid: 201;
/// * `hang=WHO/NTH/FOLDER`: the n-th call for many copies of such a process never ends, nor does any work after it in
///   its stream; a file named after the process id is created in that folder;
/// * `block=WHO/CALL/NTH`: the n-th such call never returns; a process that exits during that call is aborted;
/// * `unpin=WHO/MIB/FIFO`: when such a process unregisters host memory of at least this many MiB, the call opens that
///   FIFO for reading, and does its work when the process that has opened the FIFO for writing closes it;
/// * `trace=FOLDER`: at its exit each process writes there, into a file named after its id, the order in which copies
///   from a device (`d2h N`) and to it (`h2d N`) were given by calls of their own, and the number of threads that
///   called each function;
/// * `mig=1`: the devices are instances of one GPU, and `cuDeviceGetUuid` returns the name of that GPU for each of them
///   (0);
/// * `attribute=NUMBER/VALUE`, any number of times: a result of `cuDeviceGetAttribute`; by default 91, 99 and 122 are
///   1, 133 is 0, and others are unknown;
/// * `host_pointers=0`: attribute 91 is 0, and streams do not find registered host memory at the addresses that the
///   process has for it, where many copies are given by one call (1);
/// * `half=NTH`: the n-th call for many copies of a process accepts half of them, and is refused;
/// * `skip=NTH`: the n-th copy of a process is reported as done, and is not made;
/// * `stale=NTH`: the n-th handle of another process's memory, or of a chunk, that a process opens maps the memory of
///   the handle that it opened before;
/// * `report=FOLDER`: at its exit each process writes there everything that it has not released, into a file named
///   after its id.
pub const SETTINGS: &str = "FAKE_CUDA";

/// A call that must fail.
#[derive(Debug, Clone)]
pub(crate) struct Fail {
    pub(crate) call: String,
    pub(crate) nth: u64,
    pub(crate) code: Code,
}

/// The parsed settings of this process. See [`SETTINGS`].
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) devices: i32,
    pub(crate) version: i32,
    pub(crate) init: Code,
    pub(crate) seed: u64,
    pub(crate) delay_us: u64,
    pub(crate) fails: Vec<Fail>,
    pub(crate) once: Option<String>,
    pub(crate) init_ms: u64,
    pub(crate) exclusive: Option<String>,
    /// Unlimited if `None`.
    pub(crate) memory_bytes: Option<usize>,
    pub(crate) context_bytes: usize,
    /// Granularity of the virtual memory management.
    pub(crate) granule_bytes: usize,
    pub(crate) strict: bool,
    pub(crate) call_us: u64,
    pub(crate) namespace: u32,
    /// Number of the call for many copies that never ends, and the folder in which that is noted.
    pub(crate) hang: Option<(u64, String)>,
    /// Name and number of the call that never returns.
    pub(crate) block: Option<(String, u64)>,
    /// Minimum size of registered host memory whose release is delayed, and the FIFO for which the release waits.
    pub(crate) unpin: Option<(usize, String)>,
    pub(crate) trace: Option<String>,
    pub(crate) mig: bool,
    /// By number in `CUdevice_attribute`.
    pub(crate) attributes: BTreeMap<u32, i32>,
    pub(crate) half: Option<u64>,
    pub(crate) skip: Option<u64>,
    pub(crate) stale: Option<u64>,
    pub(crate) report: Option<String>,
}

impl Settings {
    /// Reads the settings from the environment. A setting that cannot be parsed ends the process, because a driver has
    /// no caller to which it could report the error.
    pub(crate) fn read() -> Self {
        let text = std::env::var(SETTINGS).unwrap_or_default();
        Self::parse(&text, &command_line()).unwrap_or_else(|wrong| {
            complain(&format!("{SETTINGS}: {wrong}"));
            std::process::abort()
        })
    }

    fn parse(text: &str, command_line: &str) -> Result<Self, String> {
        let mut settings = Self {
            devices: 1,
            version: 12_040,
            init: crate::code::SUCCESS,
            seed: 1,
            delay_us: 0,
            fails: Vec::new(),
            once: None,
            init_ms: 0,
            exclusive: None,
            memory_bytes: None,
            context_bytes: 0,
            granule_bytes: 2 << 20,
            strict: false,
            call_us: 0,
            namespace: 0,
            hang: None,
            block: None,
            unpin: None,
            trace: None,
            mig: false,
            attributes: BTreeMap::from([(HOST_POINTERS, 1), (99, 1), (122, 1), (133, 0)]),
            half: None,
            skip: None,
            stale: None,
            report: None,
        };
        let is_meant =
            |who: &str| who == "*" || command_line.split_whitespace().any(|word| word == who);
        for part in text.split(';').filter(|part| !part.is_empty()) {
            let wrong = || format!("'{part}' is not understood");
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u64>().map_err(|_| wrong());
            let many = |unit: usize| {
                let count = value.parse::<usize>().map_err(|_| wrong())?;
                count.checked_mul(unit).ok_or_else(wrong)
            };
            match name {
                "devices" => settings.devices = value.parse().map_err(|_| wrong())?,
                "version" => settings.version = value.parse().map_err(|_| wrong())?,
                "init" => settings.init = value.parse().map_err(|_| wrong())?,
                "seed" => settings.seed = number()?,
                "delay_us" => {
                    let (who, delay) = value.split_once('/').unwrap_or(("*", value));
                    if is_meant(who) {
                        settings.delay_us = delay.parse().map_err(|_| wrong())?;
                    }
                }
                "init_ms" => settings.init_ms = number()?,
                "exclusive" => settings.exclusive = Some(value.to_owned()),
                "memory_mib" => settings.memory_bytes = Some(many(1 << 20)?),
                "context_mib" => {
                    let (who, mib) = value.split_once('/').unwrap_or(("*", value));
                    if is_meant(who) {
                        let mib: usize = mib.parse().map_err(|_| wrong())?;
                        settings.context_bytes = mib << 20;
                    }
                }
                "granule_kib" => settings.granule_bytes = many(1 << 10)?.max(4096),
                "strict" => settings.strict = number()? != 0,
                "call_us" => {
                    let (who, cost) = value.split_once('/').unwrap_or(("*", value));
                    if is_meant(who) {
                        settings.call_us = cost.parse().map_err(|_| wrong())?;
                    }
                }
                "pidns" => {
                    let (who, namespace) = value.split_once('/').ok_or_else(wrong)?;
                    if is_meant(who) {
                        settings.namespace = namespace.parse().map_err(|_| wrong())?;
                    }
                }
                "hang" => {
                    let parts: Vec<&str> = value.splitn(3, '/').collect();
                    let [who, nth, folder] = parts[..] else {
                        return Err(wrong());
                    };
                    if is_meant(who) {
                        let nth = nth.parse().map_err(|_| wrong())?;
                        settings.hang = Some((nth, folder.to_owned()));
                    }
                }
                "block" => {
                    let parts: Vec<&str> = value.split('/').collect();
                    let [who, call, nth] = parts[..] else {
                        return Err(wrong());
                    };
                    if is_meant(who) {
                        let nth = nth.parse().map_err(|_| wrong())?;
                        settings.block = Some((call.to_owned(), nth));
                    }
                }
                "unpin" => {
                    let parts: Vec<&str> = value.splitn(3, '/').collect();
                    let [who, mib, fifo] = parts[..] else {
                        return Err(wrong());
                    };
                    if is_meant(who) {
                        let mib: usize = mib.parse().map_err(|_| wrong())?;
                        settings.unpin = Some((mib << 20, fifo.to_owned()));
                    }
                }
                "trace" => settings.trace = Some(value.to_owned()),
                "mig" => settings.mig = number()? != 0,
                "attribute" => {
                    let (attribute, value) = value.split_once('/').ok_or_else(wrong)?;
                    let attribute = attribute.parse().map_err(|_| wrong())?;
                    let value = value.parse().map_err(|_| wrong())?;
                    settings.attributes.insert(attribute, value);
                }
                "host_pointers" => {
                    let value = value.parse().map_err(|_| wrong())?;
                    settings.attributes.insert(HOST_POINTERS, value);
                }
                "half" => settings.half = Some(number()?),
                "skip" => settings.skip = Some(number()?),
                "stale" => settings.stale = Some(number()?),
                "once" => settings.once = Some(value.to_owned()),
                "report" => settings.report = Some(value.to_owned()),
                "fail" => {
                    let parts: Vec<&str> = value.split('/').collect();
                    let [who, call, nth, code] = parts[..] else {
                        return Err(wrong());
                    };
                    let fail = Fail {
                        call: call.to_owned(),
                        nth: nth.parse().map_err(|_| wrong())?,
                        code: code.parse().map_err(|_| wrong())?,
                    };
                    if is_meant(who) {
                        settings.fails.push(fail);
                    }
                }
                _ => return Err(wrong()),
            }
        }
        Ok(settings)
    }
}

impl Settings {
    /// Whether streams find registered host memory at the addresses that the process has for it.
    pub(crate) fn host_pointers(&self) -> bool {
        self.attributes.get(&HOST_POINTERS) == Some(&1)
    }

    /// Whether a call that is selected to fail may fail here: always, or with `once` only in the process that creates
    /// its file.
    pub(crate) fn may_fail(&self) -> bool {
        self.once
            .as_ref()
            .is_none_or(|path| std::fs::File::create_new(path).is_ok())
    }
}

fn command_line() -> String {
    let bytes = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Prints a message to standard error.
#[expect(clippy::print_stderr, reason = "a driver has no other way to speak")]
pub(crate) fn complain(what: &str) {
    eprintln!("fake CUDA driver: {what}");
}
