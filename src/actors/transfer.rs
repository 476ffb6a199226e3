//! Runs copies on threads of its own, one for each direction, so that a load never waits behind a store.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded};
use ractor::{Actor, ActorProcessingErr, ActorRef, DerivedActorRef};

use crate::memory::{CancelFlag, CopyEngine, CopyError, CopyJob, Depot, RegisteredMemory};
use crate::types::{Copy, Direction, EndedCopy, OpId};

pub(super) use crate::core::RUNNING_COPIES_MAX;

/// What the actor is told.
pub(crate) enum TransferMessage {
    /// Run these copies, each direction in this order.
    Start {
        /// What to copy.
        copies: Vec<Copy>,
        /// The engine's side.
        memory: RegisteredMemory,
        /// The arena's side.
        depot: Arc<Depot>,
    },
    /// Stop this copy between two fragments.
    Stop(OpId),
    /// From a copying thread: these are over.
    Ended(Vec<EndedCopy>),
}

/// With what the actor starts.
pub(crate) struct TransferArguments {
    /// Threads that share one copy.
    pub(crate) copy_threads: usize,
    /// Who hears of copies that are over.
    pub(crate) ended: DerivedActorRef<Vec<EndedCopy>>,
}

/// What a copying thread is given.
struct Work {
    copies: Vec<(Copy, Arc<CancelFlag>)>,
    memory: RegisteredMemory,
    depot: Arc<Depot>,
}

/// Runs copies; see the module.
pub(crate) struct TransferActor;

/// The actor's own.
pub(crate) struct State {
    ended: DerivedActorRef<Vec<EndedCopy>>,
    flags: HashMap<OpId, Arc<CancelFlag>>,
    stores: Sender<Work>,
    loads: Sender<Work>,
    threads: Vec<JoinHandle<()>>,
}

impl Actor for TransferActor {
    type Msg = TransferMessage;
    type State = State;
    type Arguments = TransferArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<TransferMessage>,
        arguments: TransferArguments,
    ) -> Result<State, ActorProcessingErr> {
        let engine = Arc::new(CopyEngine::new(arguments.copy_threads)?);
        let (stores, store_work) = bounded(RUNNING_COPIES_MAX);
        let (loads, load_work) = bounded(RUNNING_COPIES_MAX);
        let mut threads = Vec::new();
        for (name, work) in [
            ("kvferry-gather", store_work),
            ("kvferry-scatter", load_work),
        ] {
            let (engine, actor) = (Arc::clone(&engine), myself.clone());
            let thread = std::thread::Builder::new().name(name.to_owned());
            threads.push(thread.spawn(move || run(&work, &engine, &actor))?);
        }
        Ok(State {
            ended: arguments.ended,
            flags: HashMap::new(),
            stores,
            loads,
            threads,
        })
    }

    async fn handle(
        &self,
        _myself: ActorRef<TransferMessage>,
        message: TransferMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            TransferMessage::Start {
                copies,
                memory,
                depot,
            } => {
                let (stores, loads): (Vec<Copy>, Vec<Copy>) = copies
                    .into_iter()
                    .partition(|copy| copy.direction == Direction::Store);
                state.start(stores, Direction::Store, &memory, &depot)?;
                state.start(loads, Direction::Load, &memory, &depot)?;
            }
            TransferMessage::Stop(op) => {
                if let Some(flag) = state.flags.get(&op) {
                    flag.cancel();
                }
            }
            TransferMessage::Ended(copies) => {
                for copy in &copies {
                    state.flags.remove(&copy.op);
                }
                state.ended.cast(copies)?;
            }
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<TransferMessage>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.flags.values().for_each(|flag| flag.cancel());
        let (closed, _) = bounded(0);
        state.stores = closed.clone();
        state.loads = closed;
        for thread in state.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a copying thread panicked");
            }
        }
        Ok(())
    }
}

impl State {
    fn start(
        &mut self,
        copies: Vec<Copy>,
        direction: Direction,
        memory: &RegisteredMemory,
        depot: &Arc<Depot>,
    ) -> Result<(), ActorProcessingErr> {
        if copies.is_empty() {
            return Ok(());
        }
        let flagged = copies.into_iter().map(|copy| {
            let flag = Arc::new(CancelFlag::default());
            self.flags.insert(copy.op, Arc::clone(&flag));
            (copy, flag)
        });
        let work = Work {
            copies: flagged.collect(),
            memory: memory.clone(),
            depot: Arc::clone(depot),
        };
        let queue = match direction {
            Direction::Store => &self.stores,
            Direction::Load => &self.loads,
        };
        // The core keeps no more copies running than a queue has places, so this never blocks.
        queue
            .try_send(work)
            .map_err(|error| error.to_string().into())
    }
}

fn run(work: &Receiver<Work>, engine: &CopyEngine, actor: &ActorRef<TransferMessage>) {
    while let Ok(Work {
        copies,
        memory,
        depot,
    }) = work.recv()
    {
        let ended = copies.into_iter().map(|(copy, cancel)| {
            let begun = Instant::now();
            let op = copy.op;
            let job = CopyJob {
                direction: copy.direction,
                layout: Arc::clone(&memory.layout),
                device: Arc::clone(&memory.memory),
                depot: Arc::clone(&depot),
                pairs: copy.pairs,
                cancel,
            };
            let result = engine.run(&job);
            let busy_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            match result {
                Ok(report) => EndedCopy {
                    op,
                    whole: true,
                    bytes: report.bytes,
                    busy_us,
                },
                Err(error) => {
                    match error {
                        CopyError::Cancelled { .. } => tracing::info!(%op, "copy cancelled"),
                        _ => tracing::error!(%op, %error, "copy refused"),
                    }
                    EndedCopy {
                        op,
                        whole: false,
                        bytes: 0,
                        busy_us,
                    }
                }
            }
        });
        let ended = ended.collect();
        // Nothing reads or writes any more when this is sent.
        drop((memory, depot));
        if actor.cast(TransferMessage::Ended(ended)).is_err() {
            return;
        }
    }
}
