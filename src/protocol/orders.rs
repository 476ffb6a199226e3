//! Copy orders: grouping of copies into transfer messages, and back.

use crate::body::{CopyOrder, RecordBody, Transfer};
use crate::limits::{BODY_BYTES_MAX, COPIES_MAX};
use kvferry_types::{Copy, Direction, EndedCopy, EngineId, Epoch, RequestId, Time, TransferId};

/// How full a transfer message is.
#[derive(Debug, Default)]
struct MessageFill {
    copies: usize,
    pages: u64,
    bytes: usize,
}

impl MessageFill {
    /// Most bytes of a copy beside its pairs and fingerprints: field names and numbers.
    const COPY_BYTES: usize = 256;
    /// Most bytes of a pair, and of an item in it: a run of two numbers of 5 bytes.
    const PAIR_BYTES: usize = 11;
    const ITEM_BYTES: usize = 11;
    /// Most pages of a message: as many as also fit when encoded page by page, as version 1 does.
    const PAGES_MAX: u64 = (BODY_BYTES_MAX / 2 / Self::ITEM_BYTES) as u64;

    /// Adds a copy. Returns false when it does not fit beside those before it. The first copy always fits.
    fn take(&mut self, copy: &Copy) -> bool {
        let mut bytes = Self::COPY_BYTES;
        let mut pages = 0;
        for pair in &copy.pairs {
            let items = pair.src.0.len() + pair.dst.0.len();
            bytes += Self::PAIR_BYTES + items * Self::ITEM_BYTES;
            pages += pair.src.pages();
        }
        let record = copy.record.as_ref();
        bytes += record.map_or(0, |record| record.fingerprints.len() * 16);
        let fits = self.copies < COPIES_MAX
            && self.pages + pages <= Self::PAGES_MAX
            && self.bytes + bytes <= BODY_BYTES_MAX / 2;
        if self.copies > 0 && !fits {
            return false;
        }
        self.copies += 1;
        self.pages += pages;
        self.bytes += bytes;
        true
    }
}

impl Transfer {
    /// Groups copies into transfers, each with its deadline: one transfer for consecutive copies of one request, or
    /// several where they do not fit into one message. A single copy that is too large for a message gets a transfer of
    /// its own, which cannot be encoded.
    pub fn all_of(copies: &[&Copy]) -> Vec<(Time, Self)> {
        let one_request = |one: &&Copy, other: &&Copy| {
            (one.engine, one.direction, one.deadline)
                == (other.engine, other.direction, other.deadline)
                && (one.request, one.after) == (other.request, other.after)
        };
        let mut transfers = Vec::new();
        for mut rest in copies.chunk_by(one_request) {
            while let Some(first) = rest.first() {
                let mut room = MessageFill::default();
                let fit = rest.iter().take_while(|copy| room.take(copy)).count();
                let (part, behind) = rest.split_at(fit);
                rest = behind;
                transfers.push((first.deadline, Self::one_of(first, part)));
            }
        }
        transfers
    }

    fn one_of(first: &Copy, copies: &[&Copy]) -> Self {
        let orders = copies.iter().map(|copy| CopyOrder {
            transfer: copy.transfer.0,
            pairs: copy.pairs.clone().into(),
            record: copy.record.as_ref().map(RecordBody::from),
        });
        Self {
            engine: first.engine.0,
            store: first.direction == Direction::Store,
            request: first.request.0,
            after: first.after.0,
            copies: orders.collect(),
        }
    }

    /// The results of the copies of a transfer that was never sent: none has started.
    pub fn unsent(&self) -> Vec<EndedCopy> {
        let copies = self.copies.iter().map(|copy| EndedCopy {
            transfer: TransferId(copy.transfer),
            complete: false,
            complete_pages: 0,
            bytes: 0,
            copy_us: 0,
        });
        copies.collect()
    }

    /// Returns the copies, as ordered by the leader of `epoch` and due at `deadline`.
    pub fn into_copies(self, epoch: Epoch, deadline: Time) -> impl Iterator<Item = Copy> {
        let Self {
            engine,
            store,
            request,
            after,
            copies,
        } = self;
        // A store also waits for its own request, whatever `after` is.
        let after = match store {
            true => after.max(request),
            false => after,
        };
        let direction = if store {
            Direction::Store
        } else {
            Direction::Load
        };
        copies.into_iter().map(move |order| Copy {
            transfer: TransferId(order.transfer),
            engine: EngineId(engine),
            direction,
            pairs: order.pairs.list,
            request: RequestId(request),
            after: RequestId(after),
            record: order.record.map(|record| record.into_record(epoch)),
            deadline,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{PAGE_ITEMS_MAX, PAIRS_MAX};
    use crate::{Envelope, Message, VERSION, VERSION_MIN, encode};
    use kvferry_types::{
        Anchor, DomainId, Fingerprint, FragmentPair, PageList, PageRun, Record, Stored, TransferId,
    };

    fn copy(transfer: u64, request: u64, pages: u32) -> Copy {
        let record = Record {
            anchor: Anchor(u128::MAX),
            domain: DomainId(u128::MAX),
            block_start: u32::MAX / 2,
            first: 0,
            phase: u16::MAX,
            stored: Stored {
                epoch: Epoch(1),
                transfer: TransferId(u64::MAX),
            },
            fingerprints: vec![Fingerprint(u128::MAX); pages as usize],
        };
        let pair = FragmentPair {
            src: PageList(
                (0..pages)
                    .map(|page| PageRun::one(u32::MAX / 2 + 2 * page))
                    .collect(),
            ),
            dst: PageList::run(u32::MAX / 2, pages),
        };
        Copy {
            transfer: TransferId(u64::MAX / 2 + transfer),
            engine: EngineId([9; 16]),
            direction: Direction::Store,
            pairs: vec![pair],
            request: RequestId(request),
            after: RequestId(0),
            record: Some(record),
            deadline: Time(5),
        }
    }

    fn can_be_said(transfer: &Transfer, version: u16) -> bool {
        encode(&Envelope {
            version,
            correlation: RequestId(1),
            deadline_ms: 1,
            epoch: Epoch(1),
            message: Message::Transfer(transfer.clone()),
        })
        .is_ok()
    }

    fn ids_of(transfers: &[(Time, Transfer)]) -> Vec<u64> {
        let copies = transfers.iter().flat_map(|(_, transfer)| &transfer.copies);
        copies.map(|copy| copy.transfer).collect()
    }

    #[test]
    fn copies_of_several_requests_are_all_ordered() {
        let copies = [copy(1, 7, 1), copy(2, 7, 1), copy(3, 8, 1), copy(4, 7, 1)];
        let later = Copy {
            deadline: Time(6),
            ..copy(5, 7, 1)
        };
        let load = Copy {
            direction: Direction::Load,
            ..copy(6, 7, 1)
        };
        let mut list: Vec<&Copy> = copies.iter().collect();
        list.extend([&later, &load]);
        let transfers = Transfer::all_of(&list);
        let said: Vec<(u64, u64, bool, usize)> = transfers
            .iter()
            .map(|(at, it)| (at.0, it.request, it.store, it.copies.len()))
            .collect();
        let expected = [
            (5, 7, true, 2),
            (5, 8, true, 1),
            (5, 7, true, 1),
            (6, 7, true, 1),
        ];
        assert_eq!(said[..4], expected);
        assert_eq!(said[4..], [(5, 7, false, 1)]);
        let all: Vec<u64> = list.iter().map(|copy| copy.transfer.0).collect();
        assert_eq!(ids_of(&transfers), all);
        assert!(Transfer::all_of(&[]).is_empty());
    }

    #[test]
    fn copies_that_exceed_one_message_are_ordered_by_several() {
        for (count, pages) in [(70_000, 1), (2_000, 256)] {
            let copies: Vec<Copy> = (0..count)
                .map(|transfer| copy(transfer, 7, pages))
                .collect();
            let list: Vec<&Copy> = copies.iter().collect();
            let transfers = Transfer::all_of(&list);
            assert!(transfers.len() > 1, "{count} of {pages} pages in one");
            let all: Vec<u64> = list.iter().map(|copy| copy.transfer.0).collect();
            assert_eq!(ids_of(&transfers), all);
            for version in VERSION_MIN..=VERSION {
                for (_, transfer) in &transfers {
                    let copies = transfer.copies.len();
                    assert!(
                        can_be_said(transfer, version),
                        "{copies} in version {version}"
                    );
                }
            }
        }
    }

    #[test]
    fn copies_that_no_reader_accepts_are_not_ordered() {
        let with = |pairs: usize, items: usize| {
            let side = PageList(
                (0..items as u32)
                    .map(|page| PageRun::one(2 * page))
                    .collect(),
            );
            let pair = FragmentPair {
                src: side.clone(),
                dst: side,
            };
            let copy = Copy {
                pairs: vec![pair; pairs],
                record: None,
                ..copy(1, 7, 1)
            };
            let transfers = Transfer::all_of(&[&copy]);
            assert_eq!(transfers.len(), 1);
            let can = |version| can_be_said(&transfers[0].1, version);
            (can(1), can(2))
        };
        assert_eq!(with(PAIRS_MAX, 1), (true, true));
        assert_eq!(with(PAIRS_MAX + 1, 1), (false, false));
        assert_eq!(with(PAIRS_MAX / 2, 2), (true, true));
        assert_eq!(with(PAIRS_MAX / 2 + 1, 2), (false, true), "page by page");
        assert_eq!(with(1, PAGE_ITEMS_MAX), (false, true));
        assert_eq!(with(1, PAGE_ITEMS_MAX + 1), (false, false));
    }
}
