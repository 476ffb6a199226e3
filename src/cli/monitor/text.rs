//! The text of `/metrics`: the Prometheus text format, version 0.0.4.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::list::METRICS;
use super::metric::{Metric, MetricKind, Value};
use super::reading::Reading;
use kvferry_protocol::Durations;
use kvferry_types::LATENCY_BOUNDS_US;

/// The content type of [`text`].
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text of every metric. A metric without series has its type and its meaning.
pub(super) fn text(reading: Reading) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Exposed(reading)));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Exposed(Reading);

impl Collector for Exposed {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for metric in METRICS {
            encode(metric, &self.0, &mut encoder)?;
        }
        Ok(())
    }
}

fn encode(metric: &Metric, reading: &Reading, encoder: &mut DescriptorEncoder) -> fmt::Result {
    let kind = match metric.kind {
        MetricKind::Counter => MetricType::Counter,
        MetricKind::Gauge => MetricType::Gauge,
        MetricKind::Histogram => MetricType::Histogram,
    };
    // The encoder adds the end of a counter's name.
    let name = metric.name.strip_suffix("_total").unwrap_or(metric.name);
    let mut encoder = encoder.encode_descriptor(name, metric.meaning, None, kind)?;
    for (values, value) in metric.samples(reading).0 {
        let labels = metric.labels.iter().copied().zip(values);
        let labels: Vec<(&str, String)> = labels.collect();
        if labels.is_empty() {
            encode_value(metric.kind, &value, &mut encoder)?;
        } else {
            encode_value(metric.kind, &value, &mut encoder.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_value(kind: MetricKind, value: &Value, encoder: &mut MetricEncoder) -> fmt::Result {
    match (kind, value) {
        (MetricKind::Counter, Value::Count(count)) => {
            encoder.encode_counter::<NoLabelSet, _, f64>(count, None)
        }
        (MetricKind::Counter, Value::Number(number)) => {
            encoder.encode_counter::<NoLabelSet, _, f64>(number, None)
        }
        (_, Value::Count(count)) => encoder.encode_gauge(count),
        (_, Value::Number(number)) => encoder.encode_gauge(number),
        (_, Value::Durations(durations)) => encode_durations(durations, encoder),
    }
}

fn encode_durations(durations: &Durations, encoder: &mut MetricEncoder) -> fmt::Result {
    let bounds = LATENCY_BOUNDS_US.iter().map(|us| *us as f64 / 1e6);
    let bounds = bounds.chain(std::iter::once(f64::INFINITY));
    let counts = durations.counts.iter().copied();
    let buckets: Vec<(f64, u64)> = bounds.zip(counts.chain(std::iter::repeat(0))).collect();
    let count = buckets.iter().map(|(_, count)| count).sum();
    let sum = durations.sum_us as f64 / 1e6;
    encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
}

#[cfg(test)]
mod tests;
