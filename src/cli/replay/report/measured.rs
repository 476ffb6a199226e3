//! The measurements that depend on time: latencies, waits, links. A live replay measures in wall time, a timed offline
//! replay in virtual time. A value that neither provides is null.

use schemars::JsonSchema;
use serde::Serialize;

use kvferry_sim::timed::{LinkUse, Measurements, TimedSettings};

use super::{ReplayReport, percentile};

/// Time to the first token, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FirstToken {
    /// Median.
    pub p50: Option<u64>,
    /// 95th percentile.
    pub p95: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// Median of the same requests without G2.
    pub without_p50: Option<u64>,
    /// 95th percentile without G2.
    pub without_p95: Option<u64>,
    /// 99th percentile without G2.
    pub without_p99: Option<u64>,
}

/// The links of the ranks, and the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct LinkReports {
    /// From device to host: stores.
    pub d2h: LinkReport,
    /// From host to device: loads.
    pub h2d: LinkReport,
    /// The disk that all ranks share, as far as it is written.
    pub g3_write: LinkReport,
    /// The same disk, as far as it is read.
    pub g3_read: LinkReport,
}

/// The links of one direction: one for each rank, or the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct LinkReport {
    /// Capacity of each link, in GB/s (10^9 bytes).
    pub gb_per_s: Option<f64>,
    /// Bytes that all of them moved.
    pub bytes: u64,
    /// Share of the time until the last copy ended during which a link carried something, from 0 to 1, the mean of all
    /// ranks.
    pub busy_share: Option<f64>,
    /// How much longer a copy took than alone on its link, in microseconds: the mean.
    pub queue_mean_us: Option<f64>,
    /// The same: 95th percentile.
    pub queue_p95_us: Option<u64>,
}

/// Waits and refusals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct Waits {
    /// Prompts that could not run when they arrived because pages of the engine's memory were missing.
    pub page_waits: u64,
    /// Total of these waits, in seconds.
    pub page_wait_seconds: Option<f64>,
    /// 95th percentile of these, in microseconds.
    pub page_wait_p95_us: Option<u64>,
    /// Stores that left pages out, or were refused as a whole.
    pub refused_stores: u64,
    /// Stores that were refused, or whose copies failed or did not end in time.
    pub late_stores: Option<u64>,
    /// Loads and stores that were not answered in time, so that they were abandoned at the workers.
    pub abandoned: Option<u64>,
    /// The longest time until a lookup, load or store was answered or given up, in microseconds.
    pub answer_max_us: Option<u64>,
    /// The longest time from giving up until the workers had released the pages, in microseconds.
    pub abandon_max_us: Option<u64>,
}

/// Seconds that all prefills take together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct Prefills {
    /// With G2.
    pub with: Option<f64>,
    /// Without G2.
    pub without: Option<f64>,
    /// The difference: the time that G2 saves.
    pub saved: Option<f64>,
}

impl ReplayReport {
    /// Copies the measurements of a timed replay, with G2 and without.
    pub(in crate::cli::replay) fn measured(
        &mut self,
        settings: &TimedSettings,
        mut with: Measurements,
        mut without: Measurements,
    ) {
        let ranks = f64::from(self.setup.ranks);
        let span = with.span.as_secs_f64();
        self.latency_us.lookup_p50 = microseconds(&mut with.lookup_ns, 500);
        self.latency_us.lookup_p99 = microseconds(&mut with.lookup_ns, 990);
        self.latency_us.load_p50 = microseconds(&mut with.load_ns, 500);
        self.latency_us.load_p95 = microseconds(&mut with.load_ns, 950);
        self.latency_us.load_p99 = microseconds(&mut with.load_ns, 990);
        self.first_token_us = FirstToken {
            p50: microseconds(&mut with.first_token_ns, 500),
            p95: microseconds(&mut with.first_token_ns, 950),
            p99: microseconds(&mut with.first_token_ns, 990),
            without_p50: microseconds(&mut without.first_token_ns, 500),
            without_p95: microseconds(&mut without.first_token_ns, 950),
            without_p99: microseconds(&mut without.first_token_ns, 990),
        };
        // Not the span of the prompts: a slow disk is still written when the last one has ended.
        let ran = with.ran.as_secs_f64();
        let link = |used: &mut LinkUse, bytes_per_s: u64, links: f64| {
            let busy = used.busy.as_secs_f64();
            let queued: u128 = used.queue_ns.iter().map(|ns| u128::from(*ns)).sum();
            let copies = used.queue_ns.len();
            LinkReport {
                gb_per_s: Some(bytes_per_s as f64 / 1e9),
                bytes: used.bytes,
                busy_share: (ran > 0.0).then(|| busy / ran / links),
                queue_mean_us: (copies > 0).then(|| queued as f64 / copies as f64 / 1e3),
                queue_p95_us: microseconds(&mut used.queue_ns, 950),
            }
        };
        self.links = LinkReports {
            d2h: link(&mut with.d2h, settings.d2h_bytes_per_s, ranks),
            h2d: link(&mut with.h2d, settings.h2d_bytes_per_s, ranks),
            g3_write: link(&mut with.disk_write, settings.disk_write_bytes_per_s, 1.0),
            g3_read: link(&mut with.disk_read, settings.disk_read_bytes_per_s, 1.0),
        };
        let rate = |used: &LinkUse| {
            let busy = used.busy.as_secs_f64();
            (busy > 0.0).then(|| used.bytes as f64 / busy / 1e9)
        };
        self.rates.gather_gb_per_s = rate(&with.d2h);
        self.rates.scatter_gb_per_s = rate(&with.h2d);
        let waited: u128 = with.page_wait_ns.iter().map(|ns| u128::from(*ns)).sum();
        self.waits.page_wait_seconds = Some(waited as f64 / 1e9);
        self.waits.page_wait_p95_us = microseconds(&mut with.page_wait_ns, 950);
        self.waits.late_stores = Some(with.late_stores);
        let (with_s, without_s) = (with.prefill.as_secs_f64(), without.prefill.as_secs_f64());
        self.prefill_seconds = Prefills {
            with: Some(with_s),
            without: Some(without_s),
            saved: Some(without_s - with_s),
        };
        self.seconds.r#virtual = Some(span);
    }
}

/// Percentile, given in thousandths, of a list of nanoseconds; in microseconds.
fn microseconds(nanoseconds: &mut [u64], thousandths: usize) -> Option<u64> {
    percentile(nanoseconds, thousandths).map(|ns| ns / 1_000)
}
