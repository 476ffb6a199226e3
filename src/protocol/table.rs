//! The one table of the kinds of messages. Everything that depends on the kind is generated from it.
//!
//! A row has: the number, the name, the schema's name, the body, who sends it to whom, the stability, and for a request
//! its answer. Numbers are never reused. Requests have even numbers and answers odd ones, except below 16.
//!
//! * **Senders**: roles of clients, or `Server`. `Unknown` stands for a role that this version does not know.
//! * **Receivers**: `leader`, `worker`, either `server`, `client`, or the other side of any connection (`peer`).
//! * **Stability**: `public` kinds are for engines, ranks and tools. `internal` ones are between leader and workers,
//!   and between these and the monitor or a supervisor.
//! * **`call`** is a request with a body of its own type, which a client can send as a [`Call`](crate::Call);
//!   **`request`** is one without, and **`answer`** answers one.

/// Calls a macro with the table.
macro_rules! for_each_kind {
    ($generate:ident) => {
        $generate! {
            /// First message of a client: its role, its identity, and the versions that it supports.
            1 Hello "hello": Hello, [Engine Rank Worker Admin Supervisor Unknown] to server, public, call Welcome(Welcome);
            /// Answer to `hello`: the chosen version, the epoch of the server, the credits.
            2 Welcome "welcome": Welcome, [Server] to client, public, answer;
            /// Answer to any request that is not carried out.
            3 Error "error": ErrorBody, [Worker Server] to peer, public, answer;
            /// Sent when nothing else was sent for a heartbeat.
            4 Ping "ping": Empty, [Engine Rank Worker Admin Supervisor Unknown Server] to peer, public, request Pong;
            /// Answer to `ping`.
            5 Pong "pong": Empty, [Engine Rank Worker Admin Supervisor Unknown Server] to peer, public, answer;
            /// Engine to leader: finds and holds the pages of a sequence.
            16 Lookup "lookup": Lookup, [Engine] to leader, public, call LookupAnswer(LookupAnswer);
            /// Answer to `lookup`: the number of pages found.
            17 LookupAnswer "lookup_answer": LookupAnswer, [Server] to client, public, answer;
            /// Engine to leader: copies held pages to device pages.
            18 Load "load": Load, [Engine] to leader, public, call LoadAnswer(LoadAnswer);
            /// Answer to `load`, after the last copy has ended.
            19 LoadAnswer "load_answer": LoadAnswer, [Server] to client, public, answer;
            /// Engine to leader: copies device pages to host memory.
            20 Store "store": Store, [Engine] to leader, public, call StoreAnswer(StoreAnswer);
            /// Answer to `store`, after the last copy has ended: how many pages lookups find.
            21 StoreAnswer "store_answer": StoreAnswer, [Server] to client, public, answer;
            /// Engine to leader: ends a running request and releases its holds.
            22 Finish "finish": Finish, [Engine] to leader, public, call FinishAnswer(Empty);
            /// Answer to `finish`.
            23 FinishAnswer "finish_answer": Empty, [Server] to client, public, answer;
            /// Engine or operator to leader: removes pages from every tier.
            24 Reset "reset": Reset, [Engine Admin] to leader, public, call ResetAnswer(ResetAnswer);
            /// Answer to `reset`: the number of pages removed.
            25 ResetAnswer "reset_answer": ResetAnswer, [Server] to client, public, answer;
            /// Engine to leader: stops stores in flight.
            26 CancelStores "cancel_stores": CancelStores, [Engine] to leader, public,
                call CancelStoresAnswer(CancelStoresAnswer);
            /// Answer to `cancel_stores`, once no page of those stores is read any longer.
            27 CancelStoresAnswer "cancel_stores_answer": CancelStoresAnswer, [Server] to client, public, answer;
            /// Engine or operator to leader: moves what is stored to the disk, and makes it durable there.
            28 Flush "flush": Flush, [Engine Admin] to leader, public, call FlushAnswer(FlushAnswer);
            /// Answer to `flush`: the number of pages on the disk.
            29 FlushAnswer "flush_answer": FlushAnswer, [Server] to client, public, answer;
            /// Engine or operator to leader: reads which pages the tiers gained and lost, and waits for the next change.
            30 ReadEvents "read_events": ReadEvents, [Engine Admin] to leader, public, call Events(Events);
            /// Answer to `read_events`.
            31 Events "events": Events, [Server] to client, public, answer;
            /// Engine rank to worker: describes and hands over the rank's KV memory.
            32 Register "register": Register, [Rank] to worker, public, call Registered(Registered);
            /// Answer to `register`, after the worker has mapped the memory and the leader has admitted it.
            33 Registered "registered": Registered, [Server] to client, public, answer;
            /// Engine rank to worker: everything up to this request is written, pages that stores read as well as work
            /// that loads wait for.
            34 Written "written": Written, [Rank] to worker, public, call WrittenAnswer(Empty);
            /// Answer to `written`.
            35 WrittenAnswer "written_answer": Empty, [Server] to client, public, answer;
            /// Engine rank to worker: stops the copies for these requests, and forbids later ones.
            36 Abandon "abandon": Abandon, [Rank] to worker, public, call AbandonAnswer(Empty);
            /// Answer to `abandon`, once none of those copies runs any longer.
            37 AbandonAnswer "abandon_answer": Empty, [Server] to client, public, answer;
            /// Engine rank to worker: gives back the rank's KV memory.
            38 Unregister "unregister": Unregister, [Rank] to worker, public, call Unregistered(Empty);
            /// Answer to `unregister`, after the worker has closed the memory.
            39 Unregistered "unregistered": Empty, [Server] to client, public, answer;
            /// Worker to leader: its depots are ready, and no earlier order is in flight.
            48 Attach "attach": Attach, [Worker] to leader, internal, call Attached(Attached);
            /// Answer to `attach`.
            49 Attached "attached": Attached, [Server] to client, internal, answer;
            /// Leader to worker: begins copies.
            50 Transfer "transfer": TransferOrder, [Server] to client, internal, call Ended(Ended);
            /// Answer to `transfer` and `cancel`: how each copy ended.
            51 Ended "ended": Ended, [Worker] to leader, internal, answer;
            /// Leader to worker: stops copies, whose ends are still reported.
            52 Cancel "cancel": Cancel, [Server] to client, internal, call Ended(Ended);
            /// Leader to worker: removes pages from the inventory of the worker's shard.
            54 Invalidate "invalidate": Invalidate, [Server] to client, internal, call Invalidated(Invalidated);
            /// Answer to `invalidate`, after the last page is removed.
            55 Invalidated "invalidated": Invalidated, [Worker] to leader, internal, answer;
            /// Leader to worker: reads a part of the inventory of the worker's shard.
            56 ReadInventory "read_inventory": ReadInventory, [Server] to client, internal, call Inventory(Inventory);
            /// Answer to `read_inventory`: the pages that the part lists.
            57 Inventory "inventory": Inventory, [Worker] to leader, internal, answer;
            /// Worker to leader: progress of a worker that cannot serve yet.
            58 Readiness "readiness": Readiness, [Worker] to leader, internal, call ReadinessAnswer(Empty);
            /// Answer to `readiness`.
            59 ReadinessAnswer "readiness_answer": Empty, [Server] to client, internal, answer;
            /// Worker to leader: the engine memory that it has from now on, or that it has none.
            60 Memory "memory": Memory, [Worker] to leader, internal, call MemoryAnswer(MemoryAnswer);
            /// Answer to `memory`: it is in use.
            61 MemoryAnswer "memory_answer": MemoryAnswer, [Server] to client, internal, answer;
            /// Leader to worker: makes durable what was written to a tier of the worker's shard.
            62 FlushTier "flush_tier": FlushTier, [Server] to client, internal, call TierFlushed(TierFlushed);
            /// Answer to `flush_tier`, after everything is durable.
            63 TierFlushed "tier_flushed": TierFlushed, [Worker] to leader, internal, answer;
            /// Any client to leader: requests its state.
            64 Status "status": Status, [Engine Worker Admin] to leader, public, call StatusAnswer(StatusAnswer);
            /// Answer to `status`.
            65 StatusAnswer "status_answer": StatusAnswer, [Server] to client, public, answer;
            /// Engine to leader: several `store` requests in one message.
            66 Stores "stores": Stores, [Engine] to leader, public, call StoresAnswer(StoresAnswer);
            /// Answer to `stores`, after the last of them has ended: how each one ended.
            67 StoresAnswer "stores_answer": StoresAnswer, [Server] to client, public, answer;
            /// Operator to leader or worker: requests the numbers that the status does not have.
            68 Measure "measure": Measure, [Admin] to server, internal, call MeasureAnswer(MeasureAnswer);
            /// Answer to `measure`.
            69 MeasureAnswer "measure_answer": MeasureAnswer, [Server] to client, internal, answer;
            /// Operator to leader or worker: checks that requests are handled, and in a worker that pages are copied.
            70 Probe "probe": Probe, [Admin] to server, internal, call ProbeAnswer(ProbeAnswer);
            /// Answer to `probe`, after its lookup or its copy.
            71 ProbeAnswer "probe_answer": ProbeAnswer, [Server] to client, internal, answer;
            /// Operator to leader: refuses lookups, loads and stores from now on, or takes them again.
            72 Drain "drain": Drain, [Admin] to leader, public, call DrainAnswer(DrainAnswer);
            /// Answer to `drain`: what still runs.
            73 DrainAnswer "drain_answer": DrainAnswer, [Server] to client, public, answer;
            /// Operator to leader or worker: changes the filter of the log.
            74 SetLog "set_log": SetLog, [Admin] to server, internal, call SetLogAnswer(SetLogAnswer);
            /// Answer to `set_log`.
            75 SetLogAnswer "set_log_answer": SetLogAnswer, [Server] to client, internal, answer;
            /// Supervisor to leader: the worker of this seat has ended.
            76 WorkerGone "worker_gone": WorkerGone, [Supervisor] to leader, internal,
                call WorkerGoneAnswer(WorkerGoneAnswer);
            /// Answer to `worker_gone`.
            77 WorkerGoneAnswer "worker_gone_answer": WorkerGoneAnswer, [Server] to client, internal, answer;
            /// Worker to leader: the pages of the tiers below host memory, whose number has changed.
            78 Tiers "tiers": Tiers, [Worker] to leader, internal, call TiersAnswer(TiersAnswer);
            /// Answer to `tiers`.
            79 TiersAnswer "tiers_answer": TiersAnswer, [Server] to client, internal, answer;
            /// Leader to worker without an engine: opens its tiers below host memory, or closes them for another worker.
            80 OpenTiers "open_tiers": OpenTiers, [Server] to client, internal, call OpenTiersAnswer(Empty);
            /// Answer to `open_tiers`, before the tiers are open.
            81 OpenTiersAnswer "open_tiers_answer": Empty, [Worker] to leader, internal, answer;
        }
    };
}

pub(crate) use for_each_kind;
