//! The list of metrics: the one table from which `/metrics`, `schema/metrics.json` and `docs/reference/metrics.md` are made.

use kvferry_protocol::DiskHealth;
use kvferry_types::LATENCY_BOUNDS_US;

use super::metric::{LABELS, Metric, Source};
use super::reading::process_name;
use super::sources::{
    EDGE, NS, RESTARTS, US, connections, count, counted, counter, disks, edges, gauge, histogram,
    namespaces, of_clients, of_disks, of_edges, of_leader, of_ranks, of_tiers, ranks,
    refused_orders, stored_pages, tier, tiers,
};

/// Every metric. Those of the leader are absent while it does not answer, and those of a worker while that one does not.
pub const METRICS: &[Metric] = &[
    // The processes, and the sizes in which hosts may differ.
    gauge(
        "kvferry_up",
        "",
        &["process"],
        "1 if the process has answered, 0 if not",
        Source::All(|reading, samples| {
            samples.add(["leader"], reading.leader.is_ok());
            for (worker, measured) in &reading.workers {
                samples.add([&process_name(*worker)], measured.is_ok());
            }
        }),
    ),
    RESTARTS,
    gauge(
        "kvferry_build_info",
        "",
        &["version"],
        "1; the label is the leader's version",
        Source::Leader(|leader, samples| {
            samples.add([&leader.status.version], 1_u64);
        }),
    ),
    of_leader(
        "kvferry_ready",
        "",
        "1 if lookups are served for at least one engine",
        |status| status.ready.into(),
    ),
    gauge(
        "kvferry_draining",
        "",
        &[],
        "1 while the leader refuses lookups, loads and stores",
        Source::Leader(|leader, samples| samples.add([], leader.measured.draining)),
    ),
    of_leader(
        "kvferry_epoch",
        "",
        "Epoch of the leader: grows with each start",
        |status| status.epoch,
    ),
    of_leader(
        "kvferry_ratio_pages",
        "pages",
        "Setting `ratio`: pages of the largest block",
        |status| status.ratio.into(),
    ),
    of_leader("kvferry_seats", "", "Ranks of all replicas", |status| {
        status.ranks.len() as u64
    }),
    of_leader(
        "kvferry_page_tokens",
        "tokens",
        "Tokens of one hash, in which hits are counted; 0 before a rank has attached",
        |status| status.hash_tokens.into(),
    ),
    gauge(
        "kvferry_worker_attached",
        "",
        &["process"],
        "1 if the worker is attached with its engine's memory",
        of_ranks!(attached),
    ),
    gauge(
        "kvferry_host_memory_bytes",
        "bytes",
        &["process"],
        "Bytes of the worker's host memory",
        of_ranks!(host_bytes),
    ),
    gauge(
        "kvferry_host_memory_ready_bytes",
        "bytes",
        &["process"],
        "Bytes of those that are in memory",
        of_ranks!(host_ready_bytes),
    ),
    gauge(
        "kvferry_host_memory_pinned_bytes",
        "bytes",
        &["process"],
        "Bytes of those that are pinned for a GPU; absent without one",
        Source::Leader(|leader, samples| {
            ranks(leader, |process, rank| {
                if let Some(pinned) = rank.host_pinned_bytes {
                    samples.add([process], pinned);
                }
            });
        }),
    ),
    // Tiers.
    gauge(
        "kvferry_tier_capacity_pages",
        "pages",
        &["tier"],
        "Pages of the tier; 0 while it serves none",
        of_tiers!(pages),
    ),
    gauge(
        "kvferry_tier_pages",
        "pages",
        &["tier", "state"],
        "Pages of the tier by state",
        Source::Leader(|leader, samples| {
            tiers(leader, |tier, status| {
                for (state, pages) in &status.page_states {
                    samples.add([tier, state], *pages);
                }
            });
        }),
    ),
    gauge(
        "kvferry_tier_blocks",
        "blocks",
        &["tier"],
        "Blocks of the tier",
        of_tiers!(blocks),
    ),
    gauge(
        "kvferry_tier_quarantined_pages",
        "pages",
        &["tier"],
        "Places of pages that failed on a disk and are out of use",
        of_tiers!(quarantined_pages),
    ),
    counter(
        "kvferry_tier_lookup_pages_total",
        "pages",
        &["tier"],
        "Pages that lookups did not find in a faster tier, counted by their hashes",
        of_tiers!(lookup_pages),
    ),
    counter(
        "kvferry_tier_hit_pages_total",
        "pages",
        &["tier"],
        "Pages of those that lookups found in the tier",
        of_tiers!(hit_pages),
    ),
    counter(
        "kvferry_tier_evicted_pages_total",
        "pages",
        &["tier"],
        "Pages that were evicted from the tier",
        of_tiers!(evicted_pages),
    ),
    counter(
        "kvferry_group_hit_tokens_total",
        "tokens",
        &["tier", "group"],
        "Tokens that lookups found in the tier beyond the engines' own, by group of layers; with several groups, each counts the tokens that it was needed for",
        Source::Leader(|leader, samples| {
            for hits in &leader.measured.hits {
                samples.add([&tier(hits.tier), &hits.group.to_string()], hits.tokens);
            }
        }),
    ),
    // Lookups.
    count(
        "kvferry_lookups_total",
        "lookups",
        "Lookups that were answered",
    ),
    count(
        "kvferry_lookup_pages_total",
        "lookup_pages",
        "Pages of the sequences that lookups named, counted by their hashes",
    ),
    count(
        "kvferry_device_pages_total",
        "device_pages",
        "Pages of those that the engine had itself",
    ),
    count(
        "kvferry_hit_pages_total",
        "hit_pages",
        "Pages that lookups found beyond the engine's own",
    ),
    count(
        "kvferry_below_pages_total",
        "below_pages",
        "Pages of those that lay below host memory",
    ),
    count(
        "kvferry_hit_tokens_total",
        "hit_tokens",
        "Tokens of the pages that lookups found",
    ),
    count(
        "kvferry_below_tokens_total",
        "below_tokens",
        "Tokens of those that lay below host memory",
    ),
    count(
        "kvferry_declined_tokens_total",
        "declined_tokens",
        "Tokens of pages below host memory that lookups did not offer, because computing them takes less time than loading",
    ),
    counter(
        "kvferry_lookup_seconds_total",
        "seconds",
        &[],
        "Time that the leader spent in lookups",
        Source::Time("lookup_ns", NS),
    ),
    // Entries of the file `namespaces`.
    gauge(
        "kvferry_namespace_held_pages",
        "pages",
        &["entry"],
        "Pages that lookups and loads of the entry's namespaces hold",
        Source::Leader(|leader, samples| {
            namespaces(leader, |entry, of| samples.add([entry], of.held_pages));
        }),
    ),
    gauge(
        "kvferry_namespace_held_pages_limit",
        "pages",
        &["entry"],
        "`held_pages` of the entry; absent without a limit",
        Source::Leader(|leader, samples| {
            namespaces(leader, |entry, of| {
                if let Some(limit) = of.held_pages_max {
                    samples.add([entry], limit);
                }
            });
        }),
    ),
    gauge(
        "kvferry_namespace_stored_pages",
        "pages",
        &["entry", "tier"],
        "Pages of the entry's namespaces that the tier holds; absent without a limit there",
        Source::Leader(|leader, samples| {
            stored_pages(leader, |labels, stored| samples.add(labels, stored.pages));
        }),
    ),
    gauge(
        "kvferry_namespace_stored_pages_limit",
        "pages",
        &["entry", "tier"],
        "`g2_pages` or `g3_pages` of the entry; absent without a limit",
        Source::Leader(|leader, samples| {
            stored_pages(leader, |labels, stored| {
                samples.add(labels, stored.pages_max)
            });
        }),
    ),
    // Loads and stores.
    counter(
        "kvferry_loads_total",
        "",
        &["end"],
        "Loads by their end: `done` with all pages, `short` with the first ones, `failed` without any",
        Source::Counters(&[
            ("done", "loads_done"),
            ("short", "loads_short"),
            ("failed", "loads_failed"),
        ]),
    ),
    counter(
        "kvferry_load_seconds_total",
        "seconds",
        &[],
        "Time from the arrival of these loads to their answers",
        Source::Time("load_us", US),
    ),
    count(
        "kvferry_loaded_pages_total",
        "loaded_pages",
        "Pages of all groups that loads brought, by their answers",
    ),
    count(
        "kvferry_loaded_runs_total",
        "blocks_loaded",
        "Runs of pages that loads began to read",
    ),
    counter(
        "kvferry_stores_total",
        "",
        &["end"],
        "Stores by their end: `done` without a failed page, `failed` with one, `cancelled` by the engine",
        Source::Counters(&[
            ("done", "stores_done"),
            ("failed", "stores_failed"),
            ("cancelled", "stores_cancelled"),
        ]),
    ),
    counter(
        "kvferry_store_seconds_total",
        "seconds",
        &[],
        "Time from the arrival of these stores to their answers",
        Source::Time("store_us", US),
    ),
    count(
        "kvferry_present_pages_total",
        "present_pages",
        "Pages that stores found in host memory, or that another store copied",
    ),
    count(
        "kvferry_published_pages_total",
        "published_pages",
        "Pages that became ready",
    ),
    count(
        "kvferry_failed_pages_total",
        "failed_pages",
        "Pages of stores that did not become ready, because their copy failed, was late or was cancelled",
    ),
    count(
        "kvferry_withheld_pages_total",
        "withheld_pages",
        "Pages that lookups found and did not offer, because their engine would have held more than half of host memory, or their namespace more than held_pages",
    ),
    count(
        "kvferry_refused_pages_total",
        "refused_pages",
        "Pages of stores and of moves into host memory that found no room",
    ),
    count(
        "kvferry_refused_runs_total",
        "blocks_refused",
        "Runs of pages that found no room, in whole or in part",
    ),
    count(
        "kvferry_unadmitted_pages_total",
        "unadmitted_pages",
        "Pages that the admission of `g2_policy` kept out of host memory",
    ),
    count(
        "kvferry_recovered_pages_total",
        "recovered_pages",
        "Pages that were recovered from the inventories of the depots",
    ),
    counter(
        "kvferry_refusals_total",
        "",
        &["request", "reason"],
        "Lookups, loads and stores that were refused",
        Source::Refusals,
    ),
    counter(
        "kvferry_expired_total",
        "",
        &["what"],
        "Holds of lookups, loads and stores whose time passed, and engines that did not connect again",
        Source::Counters(&[
            ("holds", "expired_holds"),
            ("loads", "expired_loads"),
            ("stores", "expired_stores"),
            ("engines", "expired_engines"),
        ]),
    ),
    count(
        "kvferry_failed_copies_total",
        "failed_copies",
        "Copies that failed or were cancelled on at least one rank",
    ),
    count(
        "kvferry_late_copies_total",
        "late_copies",
        "Copies that missed their deadline",
    ),
    count(
        "kvferry_gathered_bytes_total",
        "gathered_bytes",
        "Bytes copied from engines, summed over ranks, since the leader's start",
    ),
    count(
        "kvferry_scattered_bytes_total",
        "scattered_bytes",
        "Bytes copied to engines, summed over ranks, since the leader's start",
    ),
    counter(
        "kvferry_gather_seconds_total",
        "seconds",
        &[],
        "Time that these copies from engines took, summed over ranks",
        Source::Time("gather_us", US),
    ),
    counter(
        "kvferry_scatter_seconds_total",
        "seconds",
        &[],
        "Time that these copies to engines took, summed over ranks",
        Source::Time("scatter_us", US),
    ),
    // Blocks of host memory.
    count(
        "kvferry_stored_blocks_total",
        "blocks_stored",
        "Blocks that were reserved for new runs of pages",
    ),
    count(
        "kvferry_grown_blocks_total",
        "blocks_grown",
        "Blocks that grew in place",
    ),
    count(
        "kvferry_branched_blocks_total",
        "blocks_branched",
        "New blocks for a sequence that leaves another one inside a block",
    ),
    count(
        "kvferry_split_blocks_total",
        "blocks_split",
        "Additional blocks because a run was split over several holes",
    ),
    count(
        "kvferry_block_evictions_total",
        "blocks_evicted",
        "Times that a block lost pages to eviction",
    ),
    count(
        "kvferry_evicted_pages_total",
        "evicted_pages",
        "Pages that were evicted from host memory",
    ),
    of_leader(
        "kvferry_largest_eviction_pages",
        "pages",
        "Most pages that were evicted for one allocation",
        |status| counted(status, "largest_eviction_pages"),
    ),
    // Tiers below host memory.
    count(
        "kvferry_moves_total",
        "moves",
        "Transfers between host memory and slower tiers",
    ),
    count("kvferry_moved_pages_total", "moved_pages", "Pages of those"),
    count(
        "kvferry_written_through_pages_total",
        "written_through_pages",
        "Pages of those that were written to a slower tier",
    ),
    count(
        "kvferry_moves_left_out_total",
        "moves_left_out",
        "Blocks that were not moved, because too many waited, or because their moves failed three times",
    ),
    count(
        "kvferry_moves_gone_total",
        "moves_gone",
        "Blocks that left host memory while they waited to be moved to a slower tier",
    ),
    count(
        "kvferry_bad_sources_total",
        "bad_sources",
        "Pages that failed their checksum, or that the disk did not read",
    ),
    count(
        "kvferry_quarantined_places_total",
        "quarantined_places",
        "Places of pages that failed on a disk and were taken out of use",
    ),
    of_leader("kvferry_moves_running", "", "Moves in flight", |status| {
        status.moves.as_ref().map_or(0, |moves| moves.under_way)
    }),
    of_leader(
        "kvferry_moves_waiting",
        "",
        "Blocks that wait to be moved",
        |status| status.moves.as_ref().map_or(0, |moves| moves.waiting),
    ),
    gauge(
        "kvferry_disk_health",
        "",
        &["process", "health"],
        "1 for how far the worker's disk can be used, 0 for the others",
        Source::Leader(|leader, samples| {
            let all = [
                DiskHealth::Ok,
                DiskHealth::Full,
                DiskHealth::ReadOnly,
                DiskHealth::Off,
            ];
            disks(leader, |process, disk| {
                for health in all {
                    samples.add([process, health.name()], disk.health == health);
                }
            });
        }),
    ),
    gauge(
        "kvferry_disk_used_bytes",
        "bytes",
        &["process"],
        "Bytes that all files of the worker's shard use",
        of_disks!(used_bytes),
    ),
    gauge(
        "kvferry_disk_cap_bytes",
        "bytes",
        &["process"],
        "Bytes that they may use",
        of_disks!(cap_bytes),
    ),
    gauge(
        "kvferry_disk_listed_pages",
        "pages",
        &["process"],
        "Pages that the worker's disk lists",
        of_disks!(listed_pages),
    ),
    gauge(
        "kvferry_disk_durable_pages",
        "pages",
        &["process"],
        "Pages of those that are durable",
        of_disks!(durable_pages),
    ),
    counter(
        "kvferry_disk_written_bytes_total",
        "bytes",
        &["process"],
        "Bytes of the pages that were written",
        of_disks!(written_bytes),
    ),
    counter(
        "kvferry_disk_scrubbed_pages_total",
        "pages",
        &["process"],
        "Pages that the scrub has read",
        of_disks!(scrubbed_pages),
    ),
    counter(
        "kvferry_disk_bad_pages_total",
        "pages",
        &["process"],
        "Pages of those that had changed",
        of_disks!(bad_pages),
    ),
    counter(
        "kvferry_disk_bad_reads_total",
        "pages",
        &["process"],
        "Pages that had changed when they were read to be served",
        of_disks!(bad_reads),
    ),
    counter(
        "kvferry_disk_unreadable_pages_total",
        "pages",
        &["process"],
        "Pages of those that the disk did not read",
        of_disks!(unreadable_pages),
    ),
    gauge(
        "kvferry_disk_quarantined_pages",
        "pages",
        &["process"],
        "Pages whose place failed since the disk was opened",
        of_disks!(quarantined_pages),
    ),
    // Resets.
    count(
        "kvferry_reset_slices_total",
        "reset_slices",
        "Slices in which resets were carried out",
    ),
    of_leader(
        "kvferry_largest_reset_slice_pages",
        "pages",
        "Most pages that one slice examined",
        |status| counted(status, "largest_reset_slice_pages"),
    ),
    // What runs now.
    of_leader(
        "kvferry_engines",
        "",
        "Engines that are connected",
        |status| status.requests.engines,
    ),
    of_leader(
        "kvferry_slots",
        "",
        "Running requests of engines",
        |status| status.slots,
    ),
    of_leader("kvferry_pins", "", "Pins and leases", |status| status.pins),
    of_leader(
        "kvferry_open_requests",
        "",
        "Requests of engines and operators that are not answered, without parked ones",
        |status| status.requests.open_requests,
    ),
    of_leader("kvferry_open_loads", "", "Loads of those", |status| {
        status.requests.open_loads
    }),
    of_leader("kvferry_open_stores", "", "Stores of those", |status| {
        status.requests.open_stores
    }),
    of_leader(
        "kvferry_parked_requests",
        "",
        "Loads and stores that wait until no copy of an older leader can run",
        |status| status.requests.parked_requests,
    ),
    of_leader(
        "kvferry_transfers_running",
        "",
        "Transfers that have not ended on every rank",
        |status| status.copies_under_way,
    ),
    of_leader(
        "kvferry_storing_pages",
        "pages",
        "Pages that running copies read from engines",
        |status| status.requests.storing_pages,
    ),
    of_leader(
        "kvferry_loading_pages",
        "pages",
        "Pages that running copies write to engines",
        |status| status.requests.loading_pages,
    ),
    // Copies on each worker.
    counter(
        "kvferry_copies_total",
        "",
        &["process", "from", "to", "end"],
        "Copies by their end",
        Source::All(|reading, samples| {
            edges(reading, |[process, from, to], edge| {
                samples.add([process, from, to, "complete"], edge.complete);
                samples.add([process, from, to, "incomplete"], edge.incomplete);
            });
        }),
    ),
    counter(
        "kvferry_copied_bytes_total",
        "bytes",
        EDGE,
        "Bytes that were copied",
        of_edges!(bytes),
    ),
    gauge(
        "kvferry_copies_open",
        "",
        &["process", "from", "to", "stage"],
        "Copies that have not ended: the depth of the queue of the edge",
        Source::All(|reading, samples| {
            edges(reading, |[process, from, to], edge| {
                samples.add([process, from, to, "waiting"], edge.waiting);
                samples.add([process, from, to, "queued"], edge.queued);
                samples.add([process, from, to, "running"], edge.running);
            });
        }),
    ),
    histogram(
        "kvferry_copy_queue_seconds",
        EDGE,
        "Time that copies waited for others or for their rate, since their pages were written",
        of_edges!(&queue),
    ),
    histogram(
        "kvferry_copy_seconds",
        EDGE,
        "Time that copies ran",
        of_edges!(&copy),
    ),
    // Connections of each process.
    gauge(
        "kvferry_connected_peers",
        "",
        &["process", "role"],
        "Clients that are connected; the monitor is one `admin` of each process",
        Source::All(|reading, samples| {
            connections(reading, |process, open| {
                samples.add([process, "engine"], open.engines);
                samples.add([process, "rank"], open.ranks);
                samples.add([process, "worker"], open.workers);
                samples.add([process, "admin"], open.admins);
                samples.add([process, "stranger"], open.strangers);
            });
        }),
    ),
    gauge(
        "kvferry_credits_used",
        "",
        &["process"],
        "Credits in use: requests of clients that are not answered",
        of_clients!(open_requests),
    ),
    gauge(
        "kvferry_credits_used_bytes",
        "bytes",
        &["process"],
        "Bytes of those requests",
        of_clients!(open_bytes),
    ),
    counter(
        "kvferry_malformed_messages_total",
        "",
        &["process"],
        "Messages that were not taken, and connections that were closed because their bytes are no messages",
        of_clients!(malformed_messages),
    ),
    counter(
        "kvferry_refused_handshakes_total",
        "",
        &["process"],
        "Connections that were refused before their handshake was complete",
        of_clients!(refused_handshakes),
    ),
    counter(
        "kvferry_refused_hellos_total",
        "",
        &["process"],
        "Clients whose hello was refused",
        of_clients!(refused_hellos),
    ),
    counter(
        "kvferry_repeated_requests_total",
        "",
        &["process"],
        "Requests that came again while they were open, and were not read",
        of_clients!(repeated_requests),
    ),
    counter(
        "kvferry_refused_messages_total",
        "",
        &["process", "code"],
        "Messages that were refused by their bytes, header, role or credits; requests among them got that error",
        Source::All(|reading, samples| {
            connections(reading, |process, open| {
                for (code, count) in &open.refused_messages {
                    samples.add([process, code], *count);
                }
            });
        }),
    ),
    counter(
        "kvferry_refused_orders_total",
        "",
        &["process", "code"],
        "Errors with which a worker answered orders of its leader",
        Source::All(|reading, samples| {
            refused_orders(reading, |process, code, count| {
                samples.add([process, code], count)
            });
        }),
    ),
    counter(
        "kvferry_errors_total",
        "",
        &["process", "code"],
        "Errors that were sent to clients",
        Source::All(|reading, samples| {
            connections(reading, |process, open| {
                for (code, count) in &open.errors {
                    samples.add([process, code], *count);
                }
            });
        }),
    ),
];

/// The list as JSON: `schema/metrics.json`.
pub fn metrics_catalogue() -> serde_json::Value {
    let labels = LABELS.iter().map(|label| {
        serde_json::json!({
            "name": label.name,
            "values": label.values,
            "most": label.most,
        })
    });
    let metrics = METRICS.iter().map(|metric| {
        serde_json::json!({
            "name": metric.name,
            "type": metric.kind.name(),
            "unit": metric.unit,
            "labels": metric.labels,
            "meaning": metric.meaning,
        })
    });
    serde_json::json!({
        "latency_bounds_us": LATENCY_BOUNDS_US,
        "labels": labels.collect::<Vec<_>>(),
        "metrics": metrics.collect::<Vec<_>>(),
    })
}
