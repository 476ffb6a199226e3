//! Signals at their defaults for what the tests start, however the tests were started.
//!
//! A shell without job control starts its background jobs with SIGINT ignored, `nohup` with SIGHUP, and a process passes
//! on what it ignores. What a process handles is at its default in the processes that it starts. So the tests handle
//! those signals that they were started with ignored, by doing nothing, as before.

use std::sync::Once;

use tokio::signal::unix::{SignalKind, signal};

/// Whether a process ignores this signal, by the kernel's word on it.
pub fn ignored(process: &str, signal: SignalKind) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.expect("a process that is there");
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(line.expect("a mask").trim(), 16).expect("hexadecimal");
    mask >> (signal.as_raw_value() - 1) & 1 == 1
}

/// To be called before a process is started.
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
