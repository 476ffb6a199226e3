//! The first reading of a recording: checks every frame, and finds when each request ended.

use std::collections::HashMap;
use std::io::Read;

use super::file::{CallsError, Ending, FrameKind, Frames};
use super::frames::{
    HashWindow, Header, LeaderFrame, Outcome, RequestKind, Requested, answer, ended_id, failure,
    hashes_after,
};
use kvferry_protocol::limits::PAGES_MAX;
use kvferry_types::{Answer, PageHashes, Request, SlotId, StoreAnswer};

/// Most requests of a recording, 8 bytes each: 64 MiB.
const REQUESTS_MAX: usize = 8 << 20;
/// Most requests that have no answer yet, about 256 bytes each: 16 MiB. An engine's client has 4,096.
const OPEN_MAX: usize = 65_536;
/// Most pages of these requests, 32 bytes each: 256 MiB.
const OPEN_PAGES_MAX: u64 = 8 << 20;
/// Most bytes of page hashes of all open slots.
pub(super) const SLOT_BYTES_MAX: usize = 1 << 30;

/// The end of a request, as the recording has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The recording ends before it.
    Nothing,
    /// It was answered.
    Answered,
    /// The leader refused it, or reported that it failed.
    Refused,
    /// A store that `cancel_stores` stopped, as a whole or in part.
    Cancelled,
    /// The engine had no answer in time: the leader's decision is unknown.
    Late,
    /// The leader never received it.
    Unsent,
    /// The leader refused it because it was not ready, busy or about to end. It is not sent again.
    NotServed,
}

/// The end of a request: the number of its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedEnd {
    /// The frame of the answer or failure; meaningless with [`Known::Nothing`].
    pub frame: u32,
    /// How it ended.
    pub known: Known,
}

/// A recording, as far as a replay has to know it beforehand.
#[derive(Debug)]
pub struct Plan {
    /// Sizes of the engine.
    pub header: Header,
    /// The last leader of the engine, if its sizes were recorded.
    pub leader: Option<LeaderFrame>,
    /// Number of leaders whose sizes were recorded.
    pub leaders: u64,
    /// Pages that the first of them had at that time.
    pub used_pages: u64,
    /// Frames, without the end mark.
    pub frames: u32,
    /// Calls of the engine.
    pub calls: u64,
    /// Ends of the requests, in the order of the requests.
    pub ends: Vec<PlannedEnd>,
    /// Pages of the engine's memory that requests name.
    pub device_pages: u32,
    /// Duration of the recording, in microseconds.
    pub us: u64,
    /// How the recording ends.
    pub ending: Ending,
}

/// An open request: its place in the order of requests, its kind, and the pages that it copies.
struct Open {
    index: usize,
    kind: RequestKind,
    pages: u64,
}

impl Plan {
    /// Reads a recording to its end.
    ///
    /// # Errors
    /// See [`CallsError`]. A file that was cut is no error.
    pub fn read(source: impl Read) -> Result<Self, CallsError> {
        let mut frames = Frames::new(source)?;
        let mut hashes = HashWindow::default();
        let mut slots = SlotHashes::default();
        let mut open: HashMap<u64, Open> = HashMap::new();
        let (mut cancels, mut open_pages) = (0_usize, 0_u64);
        let (mut header, mut leader, mut leaders, mut used_pages) = (None, None, 0, 0);
        let (mut calls, mut count, mut device_pages) = (0, 0_u32, 0_u32);
        let mut ends: Vec<PlannedEnd> = Vec::new();
        while let Some(frame) = frames.next()? {
            let number = u32::try_from(frame.number)
                .ok()
                .filter(|number| *number < u32::MAX - 1);
            let number = number.ok_or(CallsError::TooMany {
                frame: frame.number,
                what: "frames",
                max: u64::from(u32::MAX) - 1,
            })?;
            count = number + 1;
            match frame.kind {
                FrameKind::Header => {
                    let (read,) = frame.read::<(Header,)>()?;
                    check(&read).map_err(|why| frame.damaged(why))?;
                    header = Some(read);
                }
                FrameKind::Call => {
                    hashes.call(&frame)?;
                    calls += 1;
                }
                FrameKind::Return => {}
                FrameKind::Leader => {
                    let read: LeaderFrame = frame.read()?;
                    if leaders == 0 {
                        let used = read.tiers.iter().map(|(_, _, used)| *used);
                        used_pages = used.fold(0, u64::saturating_add);
                    }
                    leaders += u64::from(
                        leader
                            .as_ref()
                            .is_none_or(|before: &LeaderFrame| before.epoch != read.epoch),
                    );
                    leader = Some(read);
                }
                FrameKind::Request => {
                    let Requested { id, request } = hashes.request(&frame)?;
                    let too_many = |what, max: usize| CallsError::TooMany {
                        frame: frame.number,
                        what,
                        max: max as u64,
                    };
                    if ends.len() >= REQUESTS_MAX {
                        return Err(too_many("requests", REQUESTS_MAX));
                    }
                    if open.len() >= OPEN_MAX {
                        return Err(too_many("open requests", OPEN_MAX));
                    }
                    slots.note(&request).map_err(|why| frame.damaged(why))?;
                    if slots.bytes > SLOT_BYTES_MAX {
                        return Err(too_many(
                            "bytes of page hashes of open slots",
                            SLOT_BYTES_MAX,
                        ));
                    }
                    let (pages, end) = pages_of(&request).map_err(|why| frame.damaged(why))?;
                    device_pages = device_pages.max(end);
                    open_pages += pages;
                    if open_pages > OPEN_PAGES_MAX {
                        return Err(CallsError::TooMany {
                            frame: frame.number,
                            what: "pages of open requests",
                            max: OPEN_PAGES_MAX,
                        });
                    }
                    let kind = RequestKind::of(&request);
                    cancels += usize::from(kind == RequestKind::CancelStores);
                    let index = ends.len();
                    if open.insert(id, Open { index, kind, pages }).is_some() {
                        return Err(frame.damaged(format!("request {id} is open already")));
                    }
                    ends.push(PlannedEnd {
                        frame: 0,
                        known: Known::Nothing,
                    });
                }
                FrameKind::Answer | FrameKind::Failure => {
                    let id = ended_id(&frame)?;
                    let ended = open.remove(&id);
                    let ended =
                        ended.ok_or_else(|| frame.damaged(format!("request {id} is not open")))?;
                    open_pages -= ended.pages;
                    let is_store = ended.kind == RequestKind::Store;
                    let known = if frame.kind == FrameKind::Failure {
                        let failed = failure(&frame)?;
                        match (failed.reported, failed.over) {
                            (true, _) if failed.is_not_served() => Known::NotServed,
                            (true, _) if is_store && cancels > 0 => Known::Cancelled,
                            (true, _) => Known::Refused,
                            (false, true) => Known::Unsent,
                            (false, false) => Known::Late,
                        }
                    } else if is_store && cancels > 0 {
                        let (_, answer) = frame.read::<(u64, StoreAnswer)>()?;
                        match answer.failed_pages {
                            0 => Known::Answered,
                            _ => Known::Cancelled,
                        }
                    } else {
                        Known::Answered
                    };
                    cancels -= usize::from(ended.kind == RequestKind::CancelStores);
                    if let Some(end) = ends.get_mut(ended.index) {
                        *end = PlannedEnd {
                            frame: number,
                            known,
                        };
                    }
                }
            }
        }
        let us = frames.at_us();
        let ending = frames.ending().cloned().unwrap_or(Ending::Unmarked);
        Ok(Self {
            header: header.ok_or(CallsError::Empty)?,
            leader,
            leaders,
            used_pages,
            frames: count,
            calls,
            ends,
            device_pages,
            us,
            ending,
        })
    }
}

fn check(header: &Header) -> Result<(), String> {
    let Header {
        ranks,
        hash_tokens,
        hit_tokens,
        ref groups,
    } = *header;
    if !(1..=64).contains(&ranks) {
        return Err(format!("ranks is {ranks}, not 1 to 64"));
    }
    if groups.is_empty() || groups.len() > 64 {
        return Err(format!("{} groups, not 1 to 64", groups.len()));
    }
    if hash_tokens == 0 || hit_tokens == 0 {
        return Err(format!(
            "hash_tokens is {hash_tokens} and hit_tokens {hit_tokens}: both are at least 1"
        ));
    }
    for group in groups {
        if group.page_tokens == 0 || !group.page_tokens.is_multiple_of(hash_tokens) {
            return Err(format!(
                "pages of {} tokens with hashes of {hash_tokens}",
                group.page_tokens
            ));
        }
    }
    Ok(())
}

/// The number of pages that a request copies, and the pages of the engine's memory: the last one that it names, and those
/// before it.
fn pages_of(request: &Request) -> Result<(u64, u32), String> {
    let (Request::Load { parts, .. } | Request::Store { parts, .. }) = request else {
        return Ok((0, 0));
    };
    let runs = parts.iter().flat_map(|part| &part.pages.0);
    let last = runs.map(|run| run.end()).max().unwrap_or(0);
    let pages: u64 = parts.iter().map(|part| part.pages.pages()).sum();
    if pages > PAGES_MAX {
        return Err(format!("more than {PAGES_MAX} pages in one request"));
    }
    let last = u32::try_from(last).map_err(|_| format!("page {last} of the engine's memory"))?;
    Ok((pages, last))
}

/// The page hashes of the open slots, as the leader has them.
#[derive(Debug, Default)]
pub(super) struct SlotHashes {
    slots: HashMap<SlotId, PageHashes>,
    bytes: usize,
}

impl SlotHashes {
    /// Follows a request.
    pub(super) fn note(&mut self, request: &Request) -> Result<(), String> {
        let (Request::Lookup { slot, .. } | Request::Store { slot, .. } | Request::Finish { slot }) =
            request
        else {
            return Ok(());
        };
        let known = self.slots.remove(slot);
        self.bytes -= known.as_ref().map_or(0, |known| known.as_bytes().len());
        if matches!(request, Request::Finish { .. }) {
            return Ok(());
        }
        if let Some(hashes) = hashes_after(known, request)? {
            self.bytes += hashes.as_bytes().len();
            self.slots.insert(*slot, hashes);
        }
        Ok(())
    }

    pub(super) fn of(&self, slot: SlotId) -> Option<&PageHashes> {
        self.slots.get(&slot)
    }
}

/// Reads the end of a request, which is that of `frame`.
pub(super) fn outcome(
    frame: &super::file::Frame<'_>,
    kind: RequestKind,
) -> Result<Outcome, CallsError> {
    match frame.kind {
        FrameKind::Failure => Ok(Outcome::Failed(failure(frame)?)),
        _ => answer(frame, kind).map(Outcome::Answered),
    }
}

/// The answer of an outcome.
pub(super) fn answered(outcome: &Outcome) -> Option<Answer> {
    match outcome {
        Outcome::Answered(answer) => Some(*answer),
        Outcome::Failed(_) => None,
    }
}
