//! What the second count notices.

use super::*;
use crate::core::shards::RankSet;
use crate::types::{GroupId, PageHashes, Rank};

#[test]
fn a_pin_that_nobody_holds_is_noticed() {
    let ratio = Ratio::new(4).expect("in bounds");
    let mut pool = Pool::new(16, ratio);
    let domain = Domain::new(&AnchorKey([1; 32]), b"a", &[0; 16], GroupId(0));
    let hashes = PageHashes::packed(16, vec![3; 32]).expect("16 bytes a page");
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), 0);
    let room = pool.reserve(
        &domain,
        &hashes,
        0,
        2,
        None,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    assert_eq!(room, 2);
    let generation = reserved[0].generation;
    pool.start_filling(generation, RankSet::first(1));
    assert_eq!(pool.ended(generation, Rank(0), true), Some(true));
    let block = pool.view().next().expect("a block").index;

    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey([1; 32]));
    let mut leader = Leader::new(settings);
    assert_eq!(leader.check(), Ok(()));
    let pin = pool.pin(block, 2);
    leader.pool = Some(pool);
    let why = leader.check().expect_err("a pin is held by nobody");
    assert_eq!(why, "0 held and 0 leased, the pool counts 1");
    if let Some(pool) = &mut leader.pool {
        pool.unpin(pin);
    }
    assert_eq!(leader.check(), Ok(()));
}
