//! Sets signals to their defaults for the processes that tests start, however the tests themselves were started.
//!
//! A shell without job control starts its background jobs with SIGINT ignored, and `nohup` starts its command with
//! SIGHUP ignored. Child processes inherit an ignored signal, while a handled signal is reset to its default in them.
//! The tests therefore install a handler that does nothing for each of those signals that is ignored at their start:
//! for the tests themselves the behaviour stays the same.

use std::sync::Once;

use tokio::signal::unix::{SignalKind, signal};

/// Whether a process (a number or `self`) ignores this signal, according to its `SigIgn` mask in `/proc`.
pub fn ignored(process: &str, signal: SignalKind) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.expect("a process that is there");
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(line.expect("a mask").trim(), 16).expect("hexadecimal");
    mask >> (signal.as_raw_value() - 1) & 1 == 1
}

/// Must be called before a process is started. Only the first call has an effect.
pub fn set_to_defaults() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let _inside = runtime.enter();
        for kind in [
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
            SignalKind::terminate(),
        ] {
            if ignored("self", kind) {
                // The handler outlives the runtime.
                drop(signal(kind).expect("a handler"));
            }
        }
    });
}
