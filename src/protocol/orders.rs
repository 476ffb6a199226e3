//! Transfer orders: grouping of transfers into messages, and back.

use crate::body::{ErrorBody, RecordBody, TransferBody, TransferOrder};
use crate::error::ErrorCode;
use crate::limits::{BODY_BYTES_MAX, COPIES_MAX};
use kvferry_types::{
    DeviceEnd, Direction, Edge, EndedCopy, EngineId, Epoch, GroupId, RequestId, TierId, Time,
    Transfer, TransferId,
};

/// Bytes that one order moves between two tiers, at most, unless a single transfer has more: an order is answered after
/// its last transfer has ended, and what waits for its first pages waits as long.
const MOVE_ORDER_BYTES: u64 = 16 << 20;
/// Number of orders into which the moves of one step are divided for that reason, at most.
const MOVE_ORDERS: u64 = 64;

/// How full a transfer message is.
#[derive(Debug)]
struct MessageFill {
    transfers: usize,
    pages: u64,
    bytes: usize,
    /// Most pages of a message.
    pages_max: u64,
}

impl MessageFill {
    /// Most bytes of a transfer beside its pairs and fingerprints: field names and numbers.
    const TRANSFER_BYTES: usize = 256;
    /// Most bytes of a pair, and of an item in it: a run of two numbers of 5 bytes.
    const PAIR_BYTES: usize = 11;
    const ITEM_BYTES: usize = 11;
    /// Most pages of a message: as many as also fit when encoded page by page, as version 1 does.
    const PAGES_MAX: u64 = (BODY_BYTES_MAX / 2 / Self::ITEM_BYTES) as u64;

    /// Most pages of a message for consecutive transfers like these. A load or a store is answered as a whole, so that its
    /// transfers share a message as long as they fit.
    fn pages_max(transfers: &[&Transfer]) -> u64 {
        let pages = match transfers.first() {
            Some(first) if first.device.is_none() => {
                let pages = transfers.iter().flat_map(|transfer| &transfer.pairs);
                let pages: u64 = pages.map(|pair| pair.src.pages()).sum();
                (pages / MOVE_ORDERS).max(MOVE_ORDER_BYTES / first.page_bytes.max(1))
            }
            _ => u64::MAX,
        };
        pages.min(Self::PAGES_MAX)
    }

    /// An empty message for at most so many pages.
    fn new(pages_max: u64) -> Self {
        Self {
            transfers: 0,
            pages: 0,
            bytes: 0,
            pages_max,
        }
    }

    /// Adds a transfer. Returns false when it does not fit beside those before it. The first one always fits.
    fn take(&mut self, transfer: &Transfer) -> bool {
        let mut bytes = Self::TRANSFER_BYTES;
        let mut pages = 0;
        for pair in &transfer.pairs {
            let items = pair.src.0.len() + pair.dst.0.len();
            bytes += Self::PAIR_BYTES + items * Self::ITEM_BYTES;
            pages += pair.src.pages();
        }
        let record = transfer.record.as_ref();
        bytes += record.map_or(0, |record| record.fingerprints.len() * 16);
        let fits = self.transfers < COPIES_MAX
            && self.pages + pages <= self.pages_max
            && self.bytes + bytes <= BODY_BYTES_MAX / 2;
        if self.transfers > 0 && !fits {
            return false;
        }
        self.transfers += 1;
        self.pages += pages;
        self.bytes += bytes;
        true
    }
}

impl TransferOrder {
    /// Groups transfers into orders, each with its deadline: one order for consecutive transfers of one request, or
    /// several where they do not fit into one message, or would move more than [`MOVE_ORDER_BYTES`] between tiers. A
    /// single transfer that is too large for a message gets an order of its own, which cannot be encoded.
    pub fn all_of(transfers: &[&Transfer]) -> Vec<(Time, Self)> {
        let alike = |one: &&Transfer, other: &&Transfer| {
            (one.edge, one.device, one.page_bytes, one.deadline)
                == (other.edge, other.device, other.page_bytes, other.deadline)
        };
        let mut orders = Vec::new();
        for alike in transfers.chunk_by(alike) {
            let (mut rest, pages_max) = (alike, MessageFill::pages_max(alike));
            while let Some(first) = rest.first() {
                let mut room = MessageFill::new(pages_max);
                let fit = rest
                    .iter()
                    .take_while(|transfer| room.take(transfer))
                    .count();
                let (part, behind) = rest.split_at(fit);
                rest = behind;
                orders.push((first.deadline, Self::one_of(first, part)));
            }
        }
        orders
    }

    fn one_of(first: &Transfer, transfers: &[&Transfer]) -> Self {
        let bodies = transfers.iter().map(|transfer| TransferBody {
            id: transfer.id.0,
            pairs: transfer.pairs.clone().into(),
            record: transfer.record.as_ref().map(RecordBody::from),
        });
        let device = first.device.as_ref();
        Self {
            from: first.edge.from.number(),
            to: first.edge.to.number(),
            engine: device.map(|device| device.engine.0),
            request: device.map_or(0, |device| device.request.0),
            after: device.map_or(0, |device| device.after.0),
            group: device.map_or(0, |device| device.group.0),
            page_bytes: first.page_bytes,
            transfers: bodies.collect(),
        }
    }

    /// The results of the transfers of an order that was never sent: none has started.
    pub fn unsent(&self) -> Vec<EndedCopy> {
        let ended = self
            .transfers
            .iter()
            .map(|transfer| EndedCopy::failed(TransferId(transfer.id)));
        ended.collect()
    }

    /// The tiers that are read and written, and the engine's memory if it is one of them.
    fn ends(&self) -> Result<(Edge, Option<DeviceEnd>), ErrorBody> {
        let invalid = |text: String| ErrorBody::new(ErrorCode::Invalid, text);
        let tier = |field: &str, number: u8| {
            let tier = TierId::of_number(number);
            tier.ok_or_else(|| invalid(format!("{field} is {number}: name a tier from 1 to 4")))
        };
        let edge = Edge {
            from: tier("from", self.from)?,
            to: tier("to", self.to)?,
        };
        if edge.from == edge.to {
            return Err(invalid(format!(
                "from and to are {}: name two tiers",
                self.from
            )));
        }
        let direction = edge.direction();
        if direction.is_some() != self.engine.is_some() {
            let text = "engine: name it if from or to is 1, and leave it out if not";
            return Err(invalid(text.to_owned()));
        }
        // A store always waits for the work that writes its pages.
        let after = match direction {
            Some(Direction::Store) if self.after == 0 => self.request,
            _ => self.after,
        };
        let device = self.engine.map(|engine| DeviceEnd {
            engine: EngineId(engine),
            group: GroupId(self.group),
            request: RequestId(self.request),
            after: RequestId(after),
        });
        Ok((edge, device))
    }

    /// Returns the transfers, as ordered by the leader of `epoch` and due at `deadline`.
    ///
    /// # Errors
    /// `invalid` if the order names no transfer, or tiers between which none is possible.
    pub fn into_transfers(self, epoch: Epoch, deadline: Time) -> Result<Vec<Transfer>, ErrorBody> {
        let (edge, device) = self.ends()?;
        if self.transfers.is_empty() {
            let text = "an order without transfers";
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
        let transfers = self.transfers.into_iter().map(|transfer| Transfer {
            id: TransferId(transfer.id),
            edge,
            device,
            page_bytes: self.page_bytes,
            pairs: transfer.pairs.list,
            record: transfer.record.map(|record| record.into_record(epoch)),
            deadline,
        });
        Ok(transfers.collect())
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

    fn transfer(id: u64, request: u64, pages: u32) -> Transfer {
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
        let device = DeviceEnd {
            engine: EngineId([9; 16]),
            group: GroupId(0),
            request: RequestId(request),
            after: RequestId(0),
        };
        Transfer {
            id: TransferId(u64::MAX / 2 + id),
            edge: Edge::STORE,
            device: Some(device),
            page_bytes: u64::MAX,
            pairs: vec![pair],
            record: Some(record),
            deadline: Time(5),
        }
    }

    fn can_be_said(order: &TransferOrder, version: u16) -> bool {
        encode(&Envelope {
            version,
            correlation: RequestId(1),
            deadline_ms: 1,
            epoch: Epoch(1),
            message: Message::Transfer(order.clone()),
        })
        .is_ok()
    }

    fn ids_of(orders: &[(Time, TransferOrder)]) -> Vec<u64> {
        let transfers = orders.iter().flat_map(|(_, order)| &order.transfers);
        transfers.map(|transfer| transfer.id).collect()
    }

    #[test]
    fn copies_of_several_requests_are_all_ordered() {
        let first = [
            transfer(1, 7, 1),
            transfer(2, 7, 1),
            transfer(3, 8, 1),
            transfer(4, 7, 1),
        ];
        let later = Transfer {
            deadline: Time(6),
            ..transfer(5, 7, 1)
        };
        let load = Transfer {
            edge: Edge::LOAD,
            ..transfer(6, 7, 1)
        };
        let moved = Transfer {
            edge: Edge {
                from: TierId::Host,
                to: TierId::Disk,
            },
            device: None,
            ..transfer(7, 0, 1)
        };
        let mut list: Vec<&Transfer> = first.iter().collect();
        list.extend([&later, &load, &moved]);
        let orders = TransferOrder::all_of(&list);
        let said: Vec<(u64, u64, u8, usize)> = orders
            .iter()
            .map(|(at, order)| (at.0, order.request, order.to, order.transfers.len()))
            .collect();
        let expected = [
            (5, 7, 2, 2),
            (5, 8, 2, 1),
            (5, 7, 2, 1),
            (6, 7, 2, 1),
            (5, 7, 1, 1),
            (5, 0, 3, 1),
        ];
        assert_eq!(said, expected);
        let all: Vec<u64> = list.iter().map(|transfer| transfer.id.0).collect();
        assert_eq!(ids_of(&orders), all);
        assert!(TransferOrder::all_of(&[]).is_empty());
    }

    #[test]
    fn copies_that_exceed_one_message_are_ordered_by_several() {
        for (count, pages) in [(70_000, 1), (2_000, 256)] {
            let transfers: Vec<Transfer> = (0..count).map(|id| transfer(id, 7, pages)).collect();
            let list: Vec<&Transfer> = transfers.iter().collect();
            let orders = TransferOrder::all_of(&list);
            assert!(orders.len() > 1, "{count} of {pages} pages in one");
            let all: Vec<u64> = list.iter().map(|transfer| transfer.id.0).collect();
            assert_eq!(ids_of(&orders), all);
            for version in VERSION_MIN..=VERSION {
                for (_, order) in &orders {
                    let transfers = order.transfers.len();
                    assert!(
                        can_be_said(order, version),
                        "{transfers} in version {version}"
                    );
                }
            }
        }
    }

    #[test]
    fn moves_between_tiers_are_divided_by_bytes_and_copies_of_an_engine_are_not() {
        let of = |count: u64, pages: u32, moved: bool| {
            let transfers = (0..count).map(|id| Transfer {
                device: transfer(id, 7, pages).device.filter(|_| !moved),
                page_bytes: 1 << 20,
                ..transfer(id, 7, pages)
            });
            let transfers: Vec<Transfer> = transfers.collect();
            let list: Vec<&Transfer> = transfers.iter().collect();
            let orders = TransferOrder::all_of(&list);
            let all: Vec<u64> = list.iter().map(|transfer| transfer.id.0).collect();
            assert_eq!(ids_of(&orders), all);
            let sizes = orders.iter().map(|(_, order)| order.transfers.len());
            sizes.collect::<Vec<usize>>()
        };
        assert_eq!(of(9, 4, true), [4, 4, 1]);
        assert_eq!(of(9, 4, false), [9]);
        assert_eq!(of(3, 32, true), [1, 1, 1], "a transfer is not divided");
        let many = of(10_000, 4, true);
        assert!(many.len() <= 2 * MOVE_ORDERS as usize, "{}", many.len());
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
            let transfer = Transfer {
                pairs: vec![pair; pairs],
                record: None,
                ..transfer(1, 7, 1)
            };
            let orders = TransferOrder::all_of(&[&transfer]);
            assert_eq!(orders.len(), 1);
            let can = |version| can_be_said(&orders[0].1, version);
            (can(1), can(2))
        };
        assert_eq!(with(PAIRS_MAX, 1), (true, true));
        assert_eq!(with(PAIRS_MAX + 1, 1), (false, false));
        assert_eq!(with(PAIRS_MAX / 2, 2), (true, true));
        assert_eq!(with(PAIRS_MAX / 2 + 1, 2), (false, true), "page by page");
        assert_eq!(with(1, PAGE_ITEMS_MAX), (false, true));
        assert_eq!(with(1, PAGE_ITEMS_MAX + 1), (false, false));
    }

    #[test]
    fn an_order_comes_back_as_its_transfers_and_impossible_ends_are_refused() {
        let store = transfer(1, 7, 2);
        let [(deadline, order)] = &TransferOrder::all_of(&[&store])[..] else {
            panic!("one order");
        };
        let again = order.clone().into_transfers(Epoch(1), *deadline);
        let waits = store.device.map(|device| DeviceEnd {
            after: device.request,
            ..device
        });
        let expected = Transfer {
            device: waits,
            ..store
        };
        assert_eq!(again, Ok(vec![expected]));
        let mut earlier = order.clone();
        earlier.after = 5;
        let again = earlier.into_transfers(Epoch(1), *deadline);
        let device = again.ok().and_then(|transfers| transfers[0].device);
        assert_eq!(device.map(|device| device.after), Some(RequestId(5)));
        let refused = |change: fn(&mut TransferOrder)| {
            let mut order = order.clone();
            change(&mut order);
            let refused = order.into_transfers(Epoch(1), Time(5));
            refused.expect_err("it is impossible").message
        };
        let zero = refused(|order| order.from = 0);
        assert!(zero.starts_with("from is 0:"), "{zero}");
        let five = refused(|order| order.to = 5);
        assert!(five.starts_with("to is 5:"), "{five}");
        let same = refused(|order| order.to = 1);
        assert!(same.starts_with("from and to are 1:"), "{same}");
        for change in [
            |order: &mut TransferOrder| order.engine = None,
            |order: &mut TransferOrder| (order.from, order.to) = (3, 2),
        ] {
            let text = refused(change);
            assert!(text.starts_with("engine:"), "{text}");
        }
        let empty = refused(|order| order.transfers.clear());
        assert_eq!(empty, "an order without transfers");
    }
}
