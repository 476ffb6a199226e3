//! A leader's core with a pool full of prompts.

use std::time::{Duration, Instant};

use kvferry::cli::bench::rig::{ENGINE, HASH_BYTES, hashes};
use kvferry::error::CommandError;
use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
    Pool, Refusal, WorkerMemory,
};
use kvferry_protocol::{Envelope, HEADER_BYTES, Header, Lookup, Message, VERSION, decode, encode};
use kvferry_types::{
    Answer, AttachId, DepotId, EndedCopy, Epoch, GroupGeometry, GroupId, LookupAnswer, PageHashes,
    PageList, Part, PerTier, Rank, Ratio, Replica, Request, RequestId, ResetAnswer, ResetId,
    ResetScope, SlotId, StoreAnswer, Time, WorkerId,
};

/// Prompts that are stored together, one block of each in turn, so that the blocks of a prompt lie far apart.
const TOGETHER: u64 = 2048;
const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

/// The geometry that a worker reports for the engine.
pub(super) fn geometry() -> GroupGeometry {
    GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 4096,
        device_pages: 1 << 20,
        content_digest: [0; 16],
        layout_fingerprint: [3; 16],
        ..GroupGeometry::default()
    }
}

/// An encoded lookup of a whole prompt.
pub(super) struct Encoded {
    header: [u8; HEADER_BYTES],
    body: Vec<u8>,
}

/// Latency of a lookup.
pub(super) struct Took {
    /// Decoding and step.
    pub(super) whole: Duration,
    /// The step of the core alone.
    pub(super) step: Duration,
}

/// A leader's core that holds prompts `0..prompts`.
pub(super) struct PreloadedLeader {
    leader: Leader,
    prompt_pages: u32,
    requests: u64,
    resets: u64,
    /// Whether the worker was requested to remove the pages of the reset from the inventory.
    invalidated: bool,
    now: Time,
    effects: Vec<LeaderEffect>,
}

impl PreloadedLeader {
    pub(super) fn new(prompts: u64, prompt_pages: u32) -> Result<Self, CommandError> {
        let ratio = Ratio::default();
        let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([5; 32]));
        let mut filled = Self {
            leader: Leader::new(settings),
            prompt_pages,
            requests: 0,
            resets: 0,
            invalidated: false,
            now: Time(1),
            effects: Vec::new(),
        };
        let pages = prompts * u64::from(prompt_pages);
        filled.attach(u32::try_from(pages).map_err(CommandError::failed)?)?;
        for first in (0..prompts).step_by(TOGETHER as usize) {
            filled.fill(
                (first..prompts.min(first + TOGETHER)).collect(),
                ratio.pages(),
            )?;
        }
        Ok(filled)
    }

    pub(super) fn pool(&self) -> Result<&Pool, CommandError> {
        let pool = self.leader.pool();
        pool.ok_or_else(|| CommandError::Failed("no pool".to_owned()))
    }

    fn attach(&mut self, arena_pages: u32) -> Result<(), CommandError> {
        let depot = DepotId(1);
        let attached = AttachRequest {
            worker: WORKER,
            ranks: 1,
            shards: 1,
            attach: AttachId(1),
            depots: PerTier::host(AttachedDepot {
                depot,
                epoch: Epoch(0),
            }),
            memory: Some(WorkerMemory {
                engine: ENGINE,
                geometry: geometry().into(),
                arena_pages: PerTier::host(arena_pages),
            }),
        };
        let inventory = LeaderEvent::Inventory {
            worker: WORKER,
            read_id: 1,
            from: 0,
            next: None,
            depot,
            records: Vec::new(),
        };
        for event in [
            LeaderEvent::EngineOpened(ENGINE),
            LeaderEvent::Attach(attached),
            inventory,
        ] {
            self.leader.step(self.now, event, &mut self.effects);
        }
        self.effects.clear();
        self.pool().map(|_| ())
    }

    fn fill(&mut self, mut prompts: Vec<u64>, block_pages: u32) -> Result<(), CommandError> {
        for prompt in &prompts {
            let lookup = Request::Lookup {
                slot: SlotId(*prompt),
                namespace: Vec::new(),
                hashes: packed(hashes(*prompt, self.prompt_pages))?,
                device_pages: 0,
                limit_pages: None,
            };
            self.request(lookup)?;
        }
        let mut rng = fastrand::Rng::with_seed(1);
        for first_page in (0..self.prompt_pages).step_by(block_pages as usize) {
            rng.shuffle(&mut prompts);
            let pages = block_pages.min(self.prompt_pages - first_page);
            for prompt in &prompts {
                let store = Request::Store {
                    slot: SlotId(*prompt),
                    parts: vec![Part::new(
                        GroupId(0),
                        first_page,
                        PageList::run(first_page, pages),
                    )],
                    more: None,
                };
                match self.request(store)? {
                    Answer::Store(StoreAnswer { stored_pages, .. }) if stored_pages == pages => {}
                    other => return Err(CommandError::Failed(format!("stored {other:?}"))),
                }
            }
        }
        for prompt in prompts {
            self.finish(prompt)?;
        }
        Ok(())
    }

    /// Sends a request to the core, and ends all resulting copies at once.
    fn request(&mut self, request: Request) -> Result<Answer, CommandError> {
        self.requests += 1;
        let event = LeaderEvent::Request {
            engine: ENGINE,
            id: RequestId(self.requests),
            deadline: Time::NEVER,
            request,
        };
        self.leader.step(self.now, event, &mut self.effects);
        let copies: Vec<EndedCopy> = self
            .effects
            .iter()
            .filter_map(|effect| match effect {
                LeaderEffect::Transfer { transfer: copy, .. } => Some(EndedCopy {
                    transfer: copy.id,
                    complete: true,
                    complete_pages: 0,
                    bytes: 0,
                    copy_us: 0,
                    bad_source: false,
                }),
                _ => None,
            })
            .collect();
        if !copies.is_empty() {
            let ended = LeaderEvent::Ended {
                worker: WORKER,
                epoch: Epoch(1),
                copies,
            };
            self.leader.step(self.now, ended, &mut self.effects);
        }
        self.answer()
    }

    fn answer(&mut self) -> Result<Answer, CommandError> {
        let answer = self.effects.drain(..).find_map(|effect| match effect {
            LeaderEffect::Answer { answer, .. } => Some(answer),
            _ => None,
        });
        let answer = answer.ok_or_else(|| CommandError::Failed("no answer".to_owned()))?;
        answer.map_err(|refusal: Refusal| CommandError::failed(refusal))
    }

    pub(super) fn encoded(&mut self, prompt: u64) -> Result<Encoded, CommandError> {
        self.requests += 1;
        let lookup = Lookup {
            slot: prompt,
            namespace: Vec::new(),
            hash_bytes: HASH_BYTES as u8,
            hashes: hashes(prompt, self.prompt_pages),
            device_pages: 0,
            limit_pages: None,
        };
        let envelope = Envelope {
            version: VERSION,
            correlation: RequestId(self.requests),
            deadline_ms: 1000,
            epoch: Epoch(1),
            message: Message::Lookup(lookup),
        };
        let (header, body) = encode(&envelope).map_err(CommandError::failed)?;
        Ok(Encoded { header, body })
    }

    /// Decodes and executes a lookup, up to the answer to be sent. Fails unless the whole prompt is found.
    pub(super) fn lookup(&mut self, encoded: &Encoded) -> Result<Took, CommandError> {
        let begun = Instant::now();
        let header = Header::from_bytes(&encoded.header).map_err(CommandError::failed)?;
        let envelope = decode(header, &encoded.body).map_err(CommandError::failed)?;
        let id = envelope.correlation;
        let request = Request::try_from(envelope.message)
            .map_err(|error| CommandError::Failed(error.message))?;
        let decoded = begun.elapsed();
        let event = LeaderEvent::Request {
            engine: ENGINE,
            id,
            deadline: Time::NEVER,
            request,
        };
        self.leader.step(self.now, event, &mut self.effects);
        let whole = begun.elapsed();
        let step = whole - decoded;
        match self.answer()? {
            Answer::Lookup(LookupAnswer { hit_pages, .. }) if hit_pages == self.prompt_pages => {
                Ok(Took { whole, step })
            }
            other => Err(CommandError::Failed(format!("found {other:?}"))),
        }
    }

    /// Begins a reset of pages that the leader does not hold. Returns the time of the step.
    pub(super) fn begin_reset(&mut self, seed: u64, pages: u32) -> Result<Duration, CommandError> {
        let scope = ResetScope::Pages(Vec::new(), packed(hashes(seed, pages))?);
        self.requests += 1;
        let event = LeaderEvent::Request {
            engine: ENGINE,
            id: RequestId(self.requests),
            deadline: Time::NEVER,
            request: Request::Reset { scope },
        };
        let begun = Instant::now();
        self.leader.step(self.now, event, &mut self.effects);
        Ok(begun.elapsed())
    }

    /// Runs the next slice of the reset and returns the time of its step; `None` once the worker has been requested to
    /// remove the pages from the inventory.
    pub(super) fn go_on_with_reset(&mut self) -> Option<Duration> {
        if std::mem::take(&mut self.invalidated) {
            return None;
        }
        self.now = self.leader.next_timeout()?;
        let begun = Instant::now();
        self.leader
            .step(self.now, LeaderEvent::Tick, &mut self.effects);
        let took = begun.elapsed();
        let invalidations =
            |effect: LeaderEffect| matches!(effect, LeaderEffect::Invalidate { .. });
        self.invalidated = self.effects.drain(..).any(invalidations);
        Some(took)
    }

    /// Confirms that the worker has removed the pages from the inventory.
    pub(super) fn end_reset(&mut self) -> Result<(), CommandError> {
        self.resets += 1;
        let invalidated = LeaderEvent::Invalidated {
            worker: WORKER,
            epoch: Epoch(1),
            id: ResetId(self.resets),
        };
        self.leader.step(self.now, invalidated, &mut self.effects);
        match self.answer()? {
            Answer::Reset(ResetAnswer { pages: 0 }) => Ok(()),
            other => Err(CommandError::Failed(format!(
                "a reset ended with {other:?}"
            ))),
        }
    }

    pub(super) fn finish(&mut self, prompt: u64) -> Result<(), CommandError> {
        let slot = SlotId(prompt);
        self.request(Request::Finish { slot }).map(|_| ())
    }
}

fn packed(hashes: Vec<u8>) -> Result<PageHashes, CommandError> {
    let packed = PageHashes::packed(HASH_BYTES, hashes);
    packed.ok_or_else(|| CommandError::Failed("hashes do not fit".to_owned()))
}
