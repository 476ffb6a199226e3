//! The stretches of a load, and how far each of them is.
//!
//! A load may have thousands of stretches, each with a transfer of its own. [`OpenLoad`] counts those in flight and knows
//! the first one that did not get all of its pages, so that the end of one transfer costs no walk over all stretches.

use std::collections::BTreeSet;

use crate::Contradiction;
use crate::group::model::Sequence;
use crate::index::blocks::BlockRef;
use crate::pool::Pin;
use crate::pool::held::HeldPages;
use kvferry_types::{
    GroupId, PageCursor, PageList, PageRun, Replica, RequestId, TierId, TransferId,
};

use super::ReplyTo;

/// The place of a stretch in its load: the part, and the position of the stretch's first page. Stays when a stretch
/// before it is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StretchId {
    pub(super) part: usize,
    pub(super) first: u32,
}

/// Consecutive pages of one part of a load.
#[derive(Debug)]
pub(super) struct Stretch {
    pub(super) id: StretchId,
    pub(super) group: GroupId,
    pub(super) pages: u32,
    pub(super) destination: PageList,
    /// Pins on the pages, released when the stretch has ended: one for each run.
    pub(super) lease: Vec<(TierId, Pin)>,
    stage: Stage,
}

/// The progress of a stretch.
#[derive(Debug)]
pub(super) enum Stage {
    /// The pages lie in a slower tier.
    Below(Below),
    /// The transfers of these pages into host memory have not ended.
    Promoting(Promotion),
    /// The pages, or the first ones of them, lie in these runs of host memory.
    Present(Vec<PageRun>),
    /// The transfer of these runs into the engine's memory has not ended.
    Copying(TransferId, Vec<PageRun>),
    /// This many pages, from the first one on, were copied.
    Ended(u32),
}

/// Pages of a block in a slower tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Below {
    pub(super) tier: TierId,
    pub(super) block: BlockRef,
    pub(super) run: PageRun,
}

/// Transfers into host memory that a stretch waits for.
#[derive(Debug)]
pub(super) struct Promotion {
    pub(super) waits: BTreeSet<TransferId>,
    pub(super) source: Below,
    /// Another load or a setting ordered one of them, with a deadline of its own.
    pub(super) foreign: bool,
}

/// A step of a stretch whose last transfer has ended.
pub(super) enum Waited {
    Promotion,
    Copy,
}

impl Stretch {
    pub(super) fn new(id: StretchId, group: GroupId, pages: u32, stage: Stage) -> Self {
        Self {
            id,
            group,
            pages,
            destination: PageList::default(),
            lease: Vec::new(),
            stage,
        }
    }

    pub(super) fn end(&self) -> u32 {
        self.id.first + self.pages
    }

    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Adds a run of host memory that follows the others. Returns false if the stretch lies elsewhere.
    pub(super) fn extend(&mut self, run: PageRun) -> bool {
        match &mut self.stage {
            Stage::Present(runs) => {
                runs.push(run);
                self.pages += run.count;
                true
            }
            _ => false,
        }
    }

    pub(super) fn is_moving(&self) -> bool {
        matches!(self.stage, Stage::Promoting(_) | Stage::Copying(..))
    }

    /// True if not all of the pages were copied.
    fn is_short(&self) -> bool {
        matches!(self.stage, Stage::Ended(pages) if pages < self.pages)
    }

    /// The block and the arena page of page `index` of the stretch, while the stretch is copied.
    pub(super) fn source_of(&self, mut index: u32) -> Option<(BlockRef, u32)> {
        let Stage::Copying(_, runs) = &self.stage else {
            return None;
        };
        for (run, (_, pin)) in runs.iter().zip(&self.lease) {
            if index < run.count {
                return Some((pin.block(), run.start + index));
            }
            index -= run.count;
        }
        None
    }

    /// Cuts the stretch to its first `pages` pages. Returns the rest.
    fn split(&mut self, pages: u32) -> Self {
        let whole = std::mem::take(&mut self.destination);
        let mut cursor = PageCursor::new(&whole);
        self.destination = cursor.take(pages);
        let id = StretchId {
            first: self.id.first + pages,
            ..self.id
        };
        let mut rest = Self::new(id, self.group, self.pages - pages, Stage::Ended(0));
        rest.destination = cursor.take(rest.pages);
        self.pages = pages;
        rest
    }
}

/// A load that is not answered.
#[derive(Debug)]
pub(super) struct OpenLoad {
    pub(super) reply_to: ReplyTo,
    pub(super) replica: Replica,
    pub(super) after: RequestId,
    pub(super) sequence: Sequence,
    /// Counts its pages for those that hold them, until it has ended.
    pub(super) counted: [HeldPages; 2],
    /// Pages that the engine requested. The stretches have fewer where a load is cut to its first runs, or a block was
    /// forgotten.
    pub(super) wanted_pages: u64,
    /// Workers on which a transfer of the load failed.
    pub(super) failed: u32,
    /// A transfer of the load found a page that failed its checksum, or was not read.
    pub(super) bad: bool,
    /// In ascending order of their ids.
    stretches: Vec<Stretch>,
    /// The load is carried out as a whole: a hit of several groups is of no use without one of its pages.
    whole: bool,
    /// Stretches with a transfer in flight.
    moving: usize,
    /// The first stretch of which not all pages were copied.
    first_short: Option<StretchId>,
    /// The first stretch that may lie below host memory.
    first_below: usize,
}

impl OpenLoad {
    pub(super) fn new(
        (reply_to, replica): (ReplyTo, Replica),
        after: RequestId,
        sequence: Sequence,
        stretches: Vec<Stretch>,
        whole: bool,
    ) -> Self {
        let shorts = stretches.iter().filter(|stretch| stretch.is_short());
        Self {
            reply_to,
            replica,
            after,
            sequence,
            counted: Default::default(),
            wanted_pages: stretches
                .iter()
                .map(|stretch| u64::from(stretch.pages))
                .sum(),
            failed: 0,
            bad: false,
            first_short: shorts.map(|stretch| stretch.id).next(),
            stretches,
            whole,
            moving: 0,
            first_below: 0,
        }
    }

    pub(super) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    pub(super) fn stretch(&self, index: usize) -> &Stretch {
        &self.stretches[index]
    }

    pub(super) fn stretch_mut(&mut self, index: usize) -> &mut Stretch {
        &mut self.stretches[index]
    }

    /// The place of a stretch in the list.
    pub(super) fn index_of(&self, id: StretchId) -> Option<usize> {
        let found = self
            .stretches
            .binary_search_by_key(&id, |stretch| stretch.id);
        found.ok()
    }

    /// True while a transfer of the load is in flight.
    pub(super) fn is_moving(&self) -> bool {
        self.moving > 0
    }

    /// True if a stretch before this one was not copied completely, or any stretch of a load that is carried out as a
    /// whole.
    pub(super) fn is_useless(&self, index: usize) -> bool {
        let id = self.stretches[index].id;
        self.first_short
            .is_some_and(|short| self.whole || short < id)
    }

    /// The first stretch that may lie below host memory: those before it are in host memory, in flight, or have ended.
    pub(super) fn first_below(&self) -> usize {
        self.first_below
    }

    /// Notes that no stretch before `index` lies below host memory.
    pub(super) fn passed_to(&mut self, index: usize) {
        self.first_below = index;
    }

    /// Sets the stage of a stretch that has not ended.
    pub(super) fn set_stage(&mut self, index: usize, stage: Stage) {
        let stretch = &mut self.stretches[index];
        self.moving -= usize::from(stretch.is_moving());
        stretch.stage = stage;
        self.moving += usize::from(stretch.is_moving());
        if let Stage::Below(_) = stretch.stage {
            self.first_below = self.first_below.min(index);
        }
        if stretch.is_short() {
            let id = stretch.id;
            let first = self.first_short.map_or(id, |short| short.min(id));
            self.first_short = Some(first);
        }
    }

    /// Takes the runs of a stretch that is in host memory.
    pub(super) fn take_present(&mut self, index: usize) -> Option<Vec<PageRun>> {
        match &mut self.stretches[index].stage {
            Stage::Present(runs) => Some(std::mem::take(runs)),
            _ => None,
        }
    }

    /// Ends a stretch of which `pages` pages were copied, unless it has ended. Returns its pins, to be released.
    pub(super) fn end(&mut self, index: usize, pages: u32) -> Vec<(TierId, Pin)> {
        if !matches!(self.stretches[index].stage, Stage::Ended(_)) {
            self.set_stage(index, Stage::Ended(pages));
        }
        std::mem::take(&mut self.stretches[index].lease)
    }

    /// Cuts a stretch to its first `pages` pages, and lets the rest lie below host memory.
    pub(super) fn divide(&mut self, index: usize, pages: u32, rest: Below, pin: Pin) {
        let mut behind = self.stretches[index].split(pages);
        behind.stage = Stage::Below(rest);
        behind.lease.push((rest.tier, pin));
        self.stretches.insert(index + 1, behind);
    }

    /// Notes the end of a transfer that a stretch waits for. Returns for which step it was the last one.
    pub(super) fn waited_for(&mut self, index: usize, id: TransferId) -> Option<Waited> {
        match &mut self.stretches[index].stage {
            Stage::Copying(copy, _) if *copy == id => Some(Waited::Copy),
            Stage::Promoting(promotion) => {
                let waits = &mut promotion.waits;
                (waits.remove(&id) && waits.is_empty()).then_some(Waited::Promotion)
            }
            _ => None,
        }
    }

    /// Pages, from the first one on, that were copied completely; 0 for a load that is carried out as a whole and was not.
    pub(super) fn complete_pages(&self) -> u32 {
        if self.whole && self.first_short.is_some() {
            return 0;
        }
        let mut complete = 0;
        for stretch in &self.stretches {
            if let Stage::Ended(pages) = stretch.stage {
                complete += pages;
            }
            if stretch.is_short() {
                break;
            }
        }
        complete
    }

    /// Recounts what the load counts. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let stretches = || self.stretches.iter();
        let moving = stretches().filter(|stretch| stretch.is_moving()).count();
        let short = stretches().find(|stretch| stretch.is_short());
        let short = short.map(|stretch| stretch.id);
        if (moving, short) != (self.moving, self.first_short) {
            return Err(format!(
                "{moving} stretches in flight and {short:?} short, counted {} and {:?}",
                self.moving, self.first_short
            )
            .into());
        }
        let below = |stretch: &Stretch| matches!(stretch.stage, Stage::Below(_));
        let passed = self.stretches.get(..self.first_below).unwrap_or_default();
        match passed.iter().find(|stretch| below(stretch)) {
            None => Ok(()),
            Some(stretch) => Err(format!("{:?} lies below and was passed", stretch.id).into()),
        }
    }
}
