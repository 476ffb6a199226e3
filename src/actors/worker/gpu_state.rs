//! The state of a worker's GPU, and how long it stays in it.

use std::sync::Arc;
use std::time::Duration;

use crate::gpu::Gpu;
use kvferry_cuda::DeviceUuid;
use kvferry_memory::DropWaiter;
use kvferry_types::Time;

/// The state of a worker's GPU.
#[derive(Default)]
pub(super) enum GpuState {
    /// No GPU was requested yet.
    #[default]
    None,
    /// The depot is being pinned; with the bytes pinned so far.
    Starting(DeviceUuid, u64),
    /// The GPU copies.
    Ready(Arc<Gpu>),
    /// The GPU cannot be used, with the reason and the time of the failure. Tried again, by this worker or its
    /// successor, on a later request.
    Failed(DeviceUuid, GpuRefusal, Time),
    /// No engine used the GPU: the depot is being unpinned.
    Releasing(ReleasingGpu),
}

/// A GPU that is being released. No GPU is started before that has ended, because the driver does not pin memory that
/// is still pinned.
pub(super) struct ReleasingGpu {
    pub(super) uuid: DeviceUuid,
    pub(super) end: DropWaiter,
    pub(super) since: Time,
}

/// Progress of a release.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReleaseProgress {
    Done,
    UnderWay,
    /// The release does not end.
    Stuck,
}

impl ReleasingGpu {
    pub(super) fn is(&self, now: Time) -> ReleaseProgress {
        if self.end.wait(Duration::ZERO) {
            return ReleaseProgress::Done;
        }
        match self.since.until(now) < RELEASE_LIMIT {
            true => ReleaseProgress::UnderWay,
            false => ReleaseProgress::Stuck,
        }
    }
}

/// Why a GPU cannot be used.
#[derive(Debug)]
pub(crate) struct GpuRefusal {
    pub(super) why: String,
    /// True when this process gets the same refusal until it ends.
    pub(super) is_final: bool,
}

/// Reaction of a worker to a request for a GPU that it could not use before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GpuRetry {
    /// Repeats the refusal.
    Refuse,
    /// Tries again.
    Try,
    /// Ends, so that its successor tries.
    End,
}

impl GpuRefusal {
    pub(super) fn again(&self, waited: Duration, serves: bool) -> GpuRetry {
        match self.is_final {
            true if waited >= END_AFTER && !serves => GpuRetry::End,
            false if waited >= TRY_AGAIN_AFTER => GpuRetry::Try,
            _ => GpuRetry::Refuse,
        }
    }
}

/// How long a worker repeats the refusal of a GPU before it tries again.
pub(super) const TRY_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Like [`TRY_AGAIN_AFTER`], for a driver that did not start, which is tried only once per process: the worker ends, so
/// that its successor tries. Longer than a supervisor takes to count a worker as stable.
pub(super) const END_AFTER: Duration = Duration::from_secs(60);

/// Time limit for the release of a GPU. A depot of a few TiB is unpinned in minutes. A release that takes longer waits
/// for a driver that does not respond, and only the end of this process unpins the memory.
pub(super) const RELEASE_LIMIT: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_memory::DropSignal;

    #[test]
    fn the_release_of_a_gpu_ends_with_its_memory_or_is_stuck() {
        let held = DropSignal::default();
        let letting_go = ReleasingGpu {
            uuid: DeviceUuid::gpu([7; 16]),
            end: held.end(),
            since: Time(5),
        };
        let last = Time(5) + RELEASE_LIMIT;
        let before = Time(last.0 - 1);
        assert_eq!(letting_go.is(before), ReleaseProgress::UnderWay);
        assert_eq!(letting_go.is(last), ReleaseProgress::Stuck);
        drop(held);
        for now in [before, last] {
            assert_eq!(letting_go.is(now), ReleaseProgress::Done);
        }
    }

    #[test]
    fn a_failed_driver_start_is_retried_by_a_successor_and_not_by_the_same_process() {
        let refusal = |is_final| GpuRefusal {
            why: "no GPU".to_owned(),
            is_final,
        };
        let just_before = |limit: Duration| limit - Duration::from_millis(1);
        for (is_final, waited, serves, expected) in [
            (false, just_before(TRY_AGAIN_AFTER), false, GpuRetry::Refuse),
            (false, TRY_AGAIN_AFTER, false, GpuRetry::Try),
            (false, END_AFTER, true, GpuRetry::Try),
            (true, TRY_AGAIN_AFTER, false, GpuRetry::Refuse),
            (true, just_before(END_AFTER), false, GpuRetry::Refuse),
            (true, END_AFTER, false, GpuRetry::End),
            (true, END_AFTER, true, GpuRetry::Refuse),
        ] {
            let found = refusal(is_final).again(waited, serves);
            assert_eq!(
                found, expected,
                "final {is_final}, {waited:?}, serves {serves}"
            );
        }
    }
}
