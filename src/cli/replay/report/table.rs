//! The report as a table.

use kvferry_types::ByteSize;

use super::{ReplayReport, RestartKind, Tokens};

impl ReplayReport {
    /// Formats the report as a table.
    pub(in crate::cli::replay) fn table(&self) -> String {
        let Tokens {
            prompt,
            hit_g1,
            hit_g2,
            hit_g3,
            computed,
        } = self.tokens;
        let share = |tokens: u64| match prompt {
            0 => "0.0 %".to_owned(),
            _ => format!("{:.1} %", 100.0 * tokens as f64 / prompt as f64),
        };
        let rate =
            |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.2} GB/s"));
        let us = |us: Option<u64>| us.map_or("-".to_owned(), |us| format!("{us} us"));
        let capacity = self.arena.capacity_pages;
        let capacity = capacity.map_or("unlimited".to_owned(), |pages| pages.to_string());
        let b = &self.blocks;
        let l = &self.latency_us;
        let replicas = match self.setup.replicas {
            1 => String::new(),
            replicas => format!("{replicas} replicas, "),
        };
        let mut lines = vec![
            format!(
                "trace      {} ({} requests, {replicas}{} ranks, {})",
                self.trace.name, self.requests, self.setup.ranks, self.mode
            ),
            format!("prompt     {prompt:>14} tokens"),
            format!("  from G1  {hit_g1:>14} tokens  {:>7}", share(hit_g1)),
            format!("  from G2  {hit_g2:>14} tokens  {:>7}", share(hit_g2)),
            format!("  computed {computed:>14} tokens  {:>7}", share(computed)),
            format!(
                "blocks     {} stored, {} grown, {} loaded, {} branched, {} split, {} evicted, {} refused",
                b.stored, b.grown, b.loaded, b.branched, b.split, b.evicted, b.refused
            ),
            format!(
                "arena      {} of {capacity} pages used",
                self.arena.used_pages
            ),
            format!(
                "bytes      {} gathered, {} scattered, {} verified, {} wrong",
                ByteSize(self.bytes.gathered),
                ByteSize(self.bytes.scattered),
                ByteSize(self.bytes.verified),
                self.bytes.mismatched
            ),
            format!(
                "rates      gather {}, scatter {}",
                rate(self.rates.gather_gb_per_s),
                rate(self.rates.scatter_gb_per_s)
            ),
            format!(
                "latency    lookup p50 {} p99 {}, load p50 {} p99 {}",
                us(l.lookup_p50),
                us(l.lookup_p99),
                us(l.load_p50),
                us(l.load_p99)
            ),
            format!("time       {:.1} s", self.seconds.wall),
            format!("decisions  {}", self.decisions_digest),
        ];
        let with_disk = self.setup.g3_pages != Some(0);
        if with_disk || hit_g3 > 0 {
            let from_g3 = format!("  from G3  {hit_g3:>14} tokens  {:>7}", share(hit_g3));
            lines.insert(4, from_g3);
        }
        if with_disk {
            let moves = &self.moves;
            let left_out = match moves.left_out {
                0 => String::new(),
                blocks => format!(", {blocks} blocks left out"),
            };
            let all = moves.g3_pages;
            let all = all.map_or("unlimited".to_owned(), |pages| pages.to_string());
            let line = format!(
                "G3         {} of {all} pages used, {} written, {} read{left_out}",
                moves.g3_used_pages,
                moves.written_through_pages,
                moves.pages - moves.written_through_pages
            );
            lines.insert(8, line);
        }
        if let Some(restart) = &self.restart {
            let Tokens {
                hit_g1,
                hit_g2,
                hit_g3,
                prompt,
                ..
            } = restart.tokens;
            let share = match prompt {
                0 => 0.0,
                _ => 100.0 * (hit_g1 + hit_g2 + hit_g3) as f64 / prompt as f64,
            };
            let how = match restart.by {
                RestartKind::Restart => "restarted",
                RestartKind::Kill => "killed",
            };
            lines.push(format!(
                "{how:<10} after {} requests: {} of {} pages found, then {hit_g1} from G1, {hit_g2} from G2, {hit_g3} \
                 from G3 of {prompt} tokens ({share:.1} %)",
                restart.at, restart.listed_pages, restart.used_pages
            ));
        }
        let mut text = lines.join("\n");
        for line in self.timed_lines() {
            text.push('\n');
            text.push_str(&line);
        }
        if self.disturbed_requests > 0 {
            text.push_str(&format!(
                "\ndisturbed  {} requests",
                self.disturbed_requests
            ));
            if let Some(abandoned) = self.waits.abandoned.filter(|abandoned| *abandoned > 0) {
                text.push_str(&format!(", {abandoned} loads and stores abandoned"));
            }
            if let Some(first) = self.left.complaints.first() {
                text.push_str(&format!("; first: {first}"));
            }
        }
        text
    }

    /// Lines that only a replay in virtual time provides.
    fn timed_lines(&self) -> Vec<String> {
        let ms =
            |us: Option<u64>| us.map_or("-".to_owned(), |us| format!("{:.2} ms", us as f64 / 1e3));
        let seconds = |s: Option<f64>| s.map_or("-".to_owned(), |s| format!("{s:.1} s"));
        let mut lines = Vec::new();
        let first = &self.first_token_us;
        if first.p50.is_some() {
            lines.push(format!(
                "1st token  p50 {} p95 {} p99 {}",
                ms(first.p50),
                ms(first.p95),
                ms(first.p99)
            ));
            lines.push(format!(
                "waits      {} prompts for pages, {}; {} stores refused",
                self.waits.page_waits,
                seconds(self.waits.page_wait_seconds),
                self.waits.refused_stores
            ));
        }
        if first.without_p50.is_some() {
            lines.push(format!(
                "without G2 p50 {} p95 {} p99 {}",
                ms(first.without_p50),
                ms(first.without_p95),
                ms(first.without_p99)
            ));
            lines.push(format!(
                "prefill    {}, without G2 {}: {} saved",
                seconds(self.prefill_seconds.with),
                seconds(self.prefill_seconds.without),
                seconds(self.prefill_seconds.saved)
            ));
            let mut links = vec![("d2h", self.links.d2h), ("h2d", self.links.h2d)];
            if self.setup.g3_pages != Some(0) {
                links.push(("g3w", self.links.g3_write));
                links.push(("g3r", self.links.g3_read));
            }
            for (name, link) in links {
                let busy = link.busy_share.map_or(0.0, |share| 100.0 * share);
                let mean = link.queue_mean_us.map_or(0.0, |us| us / 1e3);
                lines.push(format!(
                    "link {name}   {}, busy {busy:.1} %, queue mean {mean:.2} ms p95 {}",
                    ByteSize(link.bytes),
                    ms(link.queue_p95_us)
                ));
            }
            lines.push(format!("virtual    {}", seconds(self.seconds.r#virtual)));
        }
        lines
    }
}
