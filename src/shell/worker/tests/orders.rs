//! Orders of the leader: which are carried out, and how each is answered.

use super::*;
use kvferry_protocol::{Empty, Invalidate};
use kvferry_types::{ResetId, TransferId};

impl World {
    /// A worker that the leader has admitted with an engine's memory.
    pub(super) fn attached() -> Self {
        let mut world = Self::new();
        world.connect(5, 1, 50);
        world.register(5, 1, 1);
        world.answer_memory(Ok(()));
        world
    }

    pub(super) fn order(&mut self, id: u64, message: Message) {
        let envelope = envelope(id, message);
        self.run(|shell, process| shell.order(process, LINK, envelope));
    }

    /// Returns the answers to the leader since the last call: the order, the kind, and the code of an error.
    fn answered(&mut self) -> Vec<(u64, MessageKind, Option<ErrorCode>)> {
        let sent = std::mem::take(&mut self.process.to_leader);
        let sent = sent.into_iter().map(|(_, order, message)| {
            let code = match &message {
                Message::Error(error) => Some(error.code()),
                _ => None,
            };
            (order.0, message.kind(), code)
        });
        sent.collect()
    }

    /// Carries out the slice of a reset that the shell requested.
    fn run_slice(&mut self) {
        self.process.slices_to_come -= 1;
        self.run(|shell, host| shell.continue_invalidations(host));
    }
}

#[test]
fn an_order_over_an_older_connection_is_not_carried_out() {
    let mut world = World::new();
    world.run(|shell, process| shell.leader_lost(process));
    world.run(|shell, process| shell.leader_found(process, EPOCH, LinkId(2)));
    let cancel = |id| envelope(id, Message::Cancel(Cancel { transfers: vec![1] }));
    world.run(|shell, process| shell.order(process, LINK, cancel(8)));
    assert!(world.process.to_leader.is_empty());
    world.run(|shell, process| shell.order(process, LinkId(2), cancel(9)));
    let answered = world.process.to_leader.iter();
    let answered: Vec<_> = answered.map(|(link, order, _)| (link.0, order.0)).collect();
    assert_eq!(answered, [(2, 9)]);
}

#[test]
fn the_inventory_of_another_depot_or_of_other_pages_is_not_read() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    world.answer_memory(Ok(()));
    let read = |reading, depot: DepotId, page_bytes| {
        let read = ReadInventory {
            read_id: reading,
            depot: depot.0.to_be_bytes(),
            page_bytes,
            from: 0,
        };
        envelope(reading, Message::ReadInventory(read))
    };
    let orders = [
        read(11, DepotId(8), PAGE_BYTES),
        read(12, DEPOT, 2 * PAGE_BYTES),
        read(13, DEPOT, PAGE_BYTES),
        read(13, DEPOT, PAGE_BYTES),
    ];
    for order in orders {
        world.run(|shell, process| shell.order(process, LINK, order));
    }
    let answers = world.process.to_leader.iter();
    let answers: Vec<_> = answers
        .map(|(_, order, message)| (order.0, message.kind()))
        .collect();
    assert_eq!(
        answers,
        [
            (11, MessageKind::Error),
            (12, MessageKind::Error),
            (13, MessageKind::Inventory),
            (13, MessageKind::Error),
        ]
    );
}

#[test]
fn every_order_of_another_epoch_is_refused() {
    let mut world = World::attached();
    let orders = [
        Message::FlushTier(FlushTier { flush: 1, tier: 3 }),
        Message::Cancel(Cancel { transfers: vec![4] }),
        // One that is also invalid.
        Message::Unregistered(Empty {}),
    ];
    for (id, message) in (7..).zip(orders) {
        let envelope = Envelope {
            epoch: Epoch(EPOCH.0 + 1),
            ..envelope(id, message)
        };
        world.run(|shell, process| shell.order(process, LINK, envelope));
    }
    let stale = |id| (id, MessageKind::Error, Some(ErrorCode::StaleEpoch));
    assert_eq!(world.answered(), [stale(7), stale(8), stale(9)]);
    world.order(10, Message::FlushTier(FlushTier { flush: 1, tier: 3 }));
    assert_eq!(world.answered(), [(10, MessageKind::TierFlushed, None)]);
}

#[test]
fn an_order_that_cannot_be_carried_out_is_answered_with_an_error() {
    let mut world = World::attached();
    let order = kvferry_protocol::TransferOrder {
        group: 0,
        page_bytes: PAGE_BYTES,
        from: 1,
        to: 2,
        engine: Some([1; 16]),
        request: 1,
        after: 1,
        transfers: Vec::new(),
    };
    world.order(7, Message::Transfer(order));
    world.order(8, Message::Unregistered(Empty {}));
    assert_eq!(
        world.answered(),
        [
            (7, MessageKind::Error, Some(ErrorCode::Invalid)),
            (8, MessageKind::Error, Some(ErrorCode::UnknownKind)),
        ]
    );
}

#[test]
fn resets_take_turns_of_one_slice_with_messages_in_between() {
    let mut world = World::attached();
    let invalidate = |id| {
        let scope = Scope::Everything;
        Message::Invalidate(Invalidate::new(ResetId(id), &scope, None, TransferId(9)))
    };
    for (order, reset) in [(7, 1), (8, 2), (9, 1)] {
        world.order(order, invalidate(reset));
        assert_eq!(world.process.slices_to_come, 1, "one is requested");
    }
    for _ in 0..3 {
        world.run_slice();
        assert_eq!(world.process.slices_to_come, 1);
    }
    world.run_slice();
    assert_eq!(world.process.slices_to_come, 0, "no reset is left");
    assert_eq!(world.process.unlisted_from, [0, 32, 0, 32]);
    let done = |order| (order, MessageKind::Invalidated, None);
    assert_eq!(world.answered(), [done(7), done(8)]);
    // A new leader's resets begin with a queue of their own.
    world.order(10, invalidate(3));
    world.run(|shell, process| shell.leader_lost(process));
    world.run_slice();
    assert_eq!(
        (world.process.slices_to_come, world.answered()),
        (0, Vec::new())
    );
}

#[test]
fn a_reset_of_one_tier_visits_the_inventory_of_that_tier_alone() {
    let mut world = World::attached();
    let orders = [(7, 1, TierId::Disk), (8, 2, TierId::Host)];
    for (order, reset, tier) in orders {
        let (id, scope) = (ResetId(reset), Scope::Everything);
        let invalidate = Invalidate::new(id, &scope, Some(tier), TransferId(9));
        world.order(order, Message::Invalidate(invalidate));
    }
    // The worker has no disk: its answer to the first order comes without a look into any inventory.
    world.run_slice();
    assert_eq!(world.process.unlisted_tiers, []);
    (0..2).for_each(|_| world.run_slice());
    assert_eq!(world.process.unlisted_tiers, [TierId::Host, TierId::Host]);
    let done = |order| (order, MessageKind::Invalidated, None);
    assert_eq!(world.answered(), [done(7), done(8)]);
}

#[test]
fn a_reset_of_a_disk_is_answered_once_its_pages_are_removed_durably() {
    let mut world = World::attached();
    let failed = Unlisted::Failed("the reset is not durable".to_owned());
    world.process.disk = Some(vec![
        failed,
        Unlisted::Later,
        Unlisted::Done,
        Unlisted::Later,
    ]);
    for (order, reset) in [(7, 1), (8, 2)] {
        let (id, scope) = (ResetId(reset), Scope::Everything);
        let invalidate = Invalidate::new(id, &scope, Some(TierId::Disk), TransferId(9));
        world.order(order, Message::Invalidate(invalidate));
    }
    world.run_slice();
    assert_eq!(world.answered(), []);
    assert_eq!(
        world.process.slices_to_come, 0,
        "the disk calls when it has ended"
    );
    world.run(|shell, process| shell.continue_invalidations(process));
    assert_eq!(world.answered(), [(7, MessageKind::Invalidated, None)]);
    world.run_slice();
    world.run(|shell, process| shell.continue_invalidations(process));
    let failed = (8, MessageKind::Error, Some(ErrorCode::Internal));
    assert_eq!(world.answered(), [failed]);
    assert_eq!(world.process.slices_to_come, 0);
}
