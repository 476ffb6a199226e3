//! A leader's core with a pool full of prompts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvferry::cli::bench::rig::{ENGINE, HASH_BYTES, hashes};
use kvferry::error::CommandError;
use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Domain, Leader, LeaderEffect, LeaderEvent,
    LeaderSettings, Pool, Refusal, WorkerMemory,
};
use kvferry_protocol::limits::PAGE_RECORDS_MAX;
use kvferry_protocol::{Envelope, HEADER_BYTES, Header, Lookup, Message, VERSION, decode, encode};
use kvferry_types::{
    Answer, AttachId, DepotId, EndedCopy, Epoch, GroupGeometry, GroupId, LookupAnswer, PageHashes,
    PageList, PageRecord, Part, Rank, Ratio, Replica, Request, RequestId, ResetAnswer, ResetId,
    ResetScope, SlotId, StoreAnswer, Stored, TierId, Time, TransferId, WorkerId,
};

/// Prompts that are stored together, one block of each in turn, so that the blocks of a prompt lie far apart.
const TOGETHER: u64 = 2048;
/// Secret key of the anchors.
const KEY: [u8; 32] = [5; 32];
const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

/// The depots of the worker.
const HOST_DEPOT: DepotId = DepotId(1);
const DISK_DEPOT: DepotId = DepotId(2);

/// What a [`PreloadedLeader`] holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Preload {
    /// Number of prompts, and pages of each.
    pub(super) prompts: u64,
    pub(super) prompt_pages: u32,
    /// Further pages of host memory, which stay free.
    pub(super) free_pages: u32,
    pub(super) below: Below,
    /// The leader finds pages inside blocks.
    pub(super) page_index: bool,
}

/// The tier below host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Below {
    /// There is none.
    None,
    /// It is empty: host memory has all pages.
    Empty,
    /// It has the second half of each prompt, and host memory the first half.
    Half,
}

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

/// An encoded lookup of a prompt, or of its tail.
pub(super) struct Encoded {
    header: [u8; HEADER_BYTES],
    body: Vec<u8>,
    /// Pages that it names.
    pages: u32,
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
    below: Below,
    /// Stores whose copies have not ended, oldest first.
    under_way: VecDeque<TransferId>,
    requests: u64,
    resets: u64,
    /// Whether the worker was requested to remove the pages of the reset from the inventory.
    invalidated: bool,
    now: Time,
    effects: Vec<LeaderEffect>,
}

impl PreloadedLeader {
    pub(super) fn new(prompts: u64, prompt_pages: u32) -> Result<Self, CommandError> {
        Self::with(Preload {
            prompts,
            prompt_pages,
            free_pages: 0,
            below: Below::None,
            page_index: false,
        })
    }

    pub(super) fn with(preload: Preload) -> Result<Self, CommandError> {
        let Preload {
            prompts,
            prompt_pages,
            free_pages,
            below,
            page_index,
        } = preload;
        let ratio = Ratio::default();
        let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new(KEY));
        settings.page_index = page_index;
        if below != Below::None {
            settings.tiers.push(TierId::Disk);
        }
        let mut filled = Self {
            leader: Leader::new(settings),
            prompt_pages,
            below,
            under_way: VecDeque::new(),
            requests: 0,
            resets: 0,
            invalidated: false,
            now: Time(1),
            effects: Vec::new(),
        };
        let pages = prompts * u64::from(prompt_pages) + u64::from(free_pages);
        let pages = u32::try_from(pages).map_err(CommandError::failed)?;
        filled.attach(prompts, pages, ratio.pages())?;
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

    /// Pages of each prompt in host memory.
    fn host_pages(&self) -> u32 {
        match self.below {
            Below::None | Below::Empty => self.prompt_pages,
            Below::Half => self.prompt_pages / 2,
        }
    }

    fn attach(
        &mut self,
        prompts: u64,
        arena_pages: u32,
        block_pages: u32,
    ) -> Result<(), CommandError> {
        let tiers: &[(TierId, DepotId)] = match self.below {
            Below::None => &[(TierId::Host, HOST_DEPOT)],
            Below::Empty | Below::Half => &[(TierId::Host, HOST_DEPOT), (TierId::Disk, DISK_DEPOT)],
        };
        let depots = tiers.iter().map(|(tier, depot)| {
            let epoch = Epoch(0);
            let depot = *depot;
            (*tier, AttachedDepot { depot, epoch })
        });
        let attached = AttachRequest {
            worker: WORKER,
            ranks: 1,
            shards: 1,
            attach: AttachId(1),
            depots: depots.collect(),
        };
        let memory = WorkerMemory {
            engine: ENGINE,
            geometry: geometry().into(),
            arena_pages: tiers.iter().map(|(tier, _)| (*tier, arena_pages)).collect(),
        };
        let mut disk = Vec::new();
        if self.below == Below::Half {
            for prompt in 0..prompts {
                let blocks = (self.host_pages()..self.prompt_pages).step_by(block_pages as usize);
                disk.extend(blocks.map(|position| (prompt, position)));
            }
            fastrand::Rng::with_seed(4).shuffle(&mut disk);
        }
        let mut events = VecDeque::from([LeaderEvent::EngineOpened(ENGINE)]);
        events.extend(LeaderEvent::arrival(attached, memory));
        while let Some(event) = events.pop_front() {
            self.leader.step(self.now, event, &mut self.effects);
            for effect in std::mem::take(&mut self.effects) {
                if let LeaderEffect::ReadInventory {
                    depot,
                    read_id,
                    from,
                    ..
                } = effect
                {
                    let blocks = (depot == DISK_DEPOT).then_some(&disk[..]);
                    let (records, next) =
                        self.part_of_disk(blocks.unwrap_or_default(), block_pages, from)?;
                    events.push_back(LeaderEvent::Inventory {
                        worker: WORKER,
                        read_id,
                        from,
                        next,
                        depot,
                        records,
                    });
                }
            }
        }
        self.pool().map(|_| ())
    }

    /// The part of the inventory of a disk with these blocks, given as prompts and positions, from an arena page on.
    fn part_of_disk(
        &self,
        blocks: &[(u64, u32)],
        block_pages: u32,
        from: u32,
    ) -> Result<(Vec<PageRecord>, Option<u32>), CommandError> {
        let key = AnchorKey::new(KEY);
        let domain = Domain::new(&key, &[], &geometry().layout_fingerprint, GroupId(0));
        let first = (from / block_pages) as usize;
        let end = (first + (PAGE_RECORDS_MAX as u32 / block_pages) as usize).min(blocks.len());
        let mut records = Vec::new();
        for (at, (prompt, position)) in (first..end).zip(&blocks[first..end]) {
            let hashes = packed(hashes(*prompt, self.prompt_pages))?;
            let block_start = at as u32 * block_pages;
            let pages = block_pages.min(self.prompt_pages - position);
            let anchor = domain.anchor(hashes.fingerprint(*position as usize));
            records.extend((0..pages).map(|index| PageRecord {
                page: block_start + index,
                anchor,
                domain: domain.id(),
                block_start,
                index: index as u16,
                phase: 0,
                stored: Stored {
                    epoch: Epoch(0),
                    transfer: TransferId(at as u64),
                },
                fingerprint: hashes.fingerprint((position + index) as usize),
            }));
        }
        let next = (end < blocks.len()).then_some(end as u32 * block_pages);
        Ok((records, next))
    }

    fn fill(&mut self, mut prompts: Vec<u64>, block_pages: u32) -> Result<(), CommandError> {
        for prompt in &prompts {
            let lookup = Request::Lookup {
                slot: SlotId(*prompt),
                namespace: Vec::new(),
                hashes: packed(hashes(*prompt, self.prompt_pages))?,
                have_pages: 0,
                limit_pages: None,
            };
            self.request(lookup)?;
        }
        let mut rng = fastrand::Rng::with_seed(1);
        for first_page in (0..self.host_pages()).step_by(block_pages as usize) {
            rng.shuffle(&mut prompts);
            let pages = block_pages.min(self.host_pages() - first_page);
            for prompt in &prompts {
                let store = Request::Store {
                    slot: SlotId(*prompt),
                    parts: vec![Part::new(
                        GroupId(0),
                        first_page,
                        PageList::run(first_page, pages),
                    )],
                    more: None,
                    after: RequestId(0),
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
        let copies: Vec<EndedCopy> = transfers(&self.effects).map(complete).collect();
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

    /// Opens a slot for a sequence of which the leader has the hashes of no page yet.
    pub(super) fn begin_sequence(&mut self, slot: u64) -> Result<(), CommandError> {
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: Vec::new(),
            hashes: packed(Vec::new())?,
            have_pages: 0,
            limit_pages: None,
        };
        self.request(lookup).map(|_| ())
    }

    /// Stores one new page of a sequence, named with its hash, and ends the oldest copies until `under_way` are left.
    /// Returns the time of all steps.
    pub(super) fn store_page(
        &mut self,
        slot: u64,
        position: u32,
        hash: &[u8],
        under_way: usize,
    ) -> Result<Duration, CommandError> {
        self.requests += 1;
        let event = LeaderEvent::Request {
            engine: ENGINE,
            id: RequestId(self.requests),
            deadline: Time::NEVER,
            request: Request::Store {
                slot: SlotId(slot),
                parts: vec![Part::new(GroupId(0), position, PageList::run(position, 1))],
                more: Some((position, packed(hash.to_vec())?)),
                after: RequestId(0),
            },
        };
        let begun = Instant::now();
        self.leader.step(self.now, event, &mut self.effects);
        let mut took = begun.elapsed();
        self.under_way.extend(transfers(&self.effects));
        self.effects.clear();
        while self.under_way.len() > under_way {
            took += self.end_oldest_store()?;
        }
        Ok(took)
    }

    /// Ends the copy of the oldest store. Returns the time of the step.
    fn end_oldest_store(&mut self) -> Result<Duration, CommandError> {
        let ended = LeaderEvent::Ended {
            worker: WORKER,
            epoch: Epoch(1),
            copies: self
                .under_way
                .pop_front()
                .map(complete)
                .into_iter()
                .collect(),
        };
        let begun = Instant::now();
        self.leader.step(self.now, ended, &mut self.effects);
        let took = begun.elapsed();
        match self.answer()? {
            Answer::Store(StoreAnswer {
                stored_pages: 1, ..
            }) => Ok(took),
            other => Err(CommandError::Failed(format!("stored {other:?}"))),
        }
    }

    /// Ends the copies of all stores, and the slot.
    pub(super) fn end_sequence(&mut self, slot: u64) -> Result<(), CommandError> {
        while !self.under_way.is_empty() {
            self.end_oldest_store()?;
        }
        self.finish(slot)
    }

    pub(super) fn encoded(&mut self, prompt: u64) -> Result<Encoded, CommandError> {
        self.encoded_tail(prompt, 0)
    }

    /// A lookup that names a prompt from page `first` on.
    pub(super) fn encoded_tail(
        &mut self,
        prompt: u64,
        first: u32,
    ) -> Result<Encoded, CommandError> {
        self.requests += 1;
        let lookup = Lookup {
            slot: prompt,
            namespace: Vec::new(),
            hash_bytes: HASH_BYTES as u8,
            hashes: hashes(prompt, self.prompt_pages).split_off(first as usize * HASH_BYTES),
            have_pages: 0,
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
        let pages = self.prompt_pages - first;
        Ok(Encoded {
            header,
            body,
            pages,
        })
    }

    /// Decodes and executes a lookup, up to the answer to be sent. Fails unless all pages are found.
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
            Answer::Lookup(LookupAnswer { hit_pages, .. }) if hit_pages == encoded.pages => {
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
            request: Request::Reset { scope, tier: None },
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
            Answer::Reset(ResetAnswer { pages: 0, .. }) => Ok(()),
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

fn transfers(effects: &[LeaderEffect]) -> impl Iterator<Item = TransferId> {
    effects.iter().filter_map(|effect| match effect {
        LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
        _ => None,
    })
}

fn complete(transfer: TransferId) -> EndedCopy {
    EndedCopy::complete(transfer)
}

fn packed(hashes: Vec<u8>) -> Result<PageHashes, CommandError> {
    let packed = PageHashes::packed(HASH_BYTES, hashes);
    packed.ok_or_else(|| CommandError::Failed("hashes do not fit".to_owned()))
}
