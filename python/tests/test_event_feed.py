"""Tests of the feed: what it takes for held is what a leader's log has, whatever happens to either."""

import random
from typing import Any

import pytest
from fake_log import Block, FakeLog, prefix
from fake_requests import Clock

from kvferry import event_feed, wire
from kvferry.event_feed import Feed
from kvferry.held_pages import BY_HASH, IN_FULL, NOT, HeldPages, key_of

MINE, OTHER, THIRD = b"mine....", b"other...", b"third..."


class Following:
    """A feed, its log, and a subscriber that counts what it is told, as a router may."""

    def __init__(self, clock: Clock, *namespaces: bytes, **log: Any):
        self.clock = clock
        self.log = FakeLog(**log)
        self.held = HeldPages()
        self.feed = Feed(self.log, self.held, lambda: None)
        self.feed.follow(namespaces)
        self.counts: dict[bytes, int] = {}

    def run(self, turns: int = 200) -> None:
        """Lets both go on until nothing is left to read."""
        for _ in range(turns):
            self.clock.now += 0.1
            self.log.turn()
            self.feed.turn()
            waits = self.log.open() and all(read.message.wait_ms for read in self.log.open())
            if waits and self.feed.complete:
                self.log.turn()
                if self.log.open():
                    return
        raise AssertionError("the feed does not come to an end")

    def tell(self, most: int = 1 << 30) -> None:
        """Announces due pages, and checks that each is announced once and taken back once."""
        while most > 0 and (key := self.held.first_due()) is not None:
            most -= 1
            is_held, how = self.held.take_due(key)
            assert (how != NOT) == (self.counts.get(key, 0) == 1)
            if is_held and how == NOT:
                self.counts[key] = self.counts.get(key, 0) + 1
                self.held.announced(key, IN_FULL)
            elif not is_held and how != NOT:
                self.counts[key] -= 1
                self.held.announced(key, NOT)

    def told(self) -> set[tuple[int, int, bytes]]:
        assert set(self.counts.values()) <= {0, 1}
        return {(key[0], key[1], key[2:]) for key, count in self.counts.items() if count}


def block(name: int, place: int, *, pages: int = 3, tier: int = 2, namespace: bytes = MINE, group: int = 0) -> Block:
    hashes = tuple(name.to_bytes(8, "big") + bytes([tier, group, page]).ljust(8, b"h") for page in range(pages))
    return Block(tier, namespace, group, place, hashes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(event_feed, "time", clock)
    return clock


@pytest.mark.parametrize("seed", range(30))
def test_what_is_held_is_what_the_log_has(seed: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(event_feed, "READ_PAGES", draw.choice((1, 5, 100)))
    namespaces = draw.choice(((MINE,), (MINE, OTHER)))
    following = Following(clock, *namespaces, keeps=draw.choice((5, 1000)))
    log, names = following.log, iter(range(100_000))
    for _ in range(150):
        match draw.randrange(20):
            case 0:
                log.lose()
            case 1:
                log.restart(keeps=draw.random() < 0.7)
            case 2:
                log.clear(draw.choice((2, 3)))
            case 3:
                log.fail()
            case 4:
                namespaces = draw.choice(((), (MINE,), (OTHER,), (MINE, OTHER), (MINE, OTHER, b"empty...")))
                following.feed.follow(namespaces)
            case 5 | 6 | 7 if present := [each for each in log.slab if each]:
                log.remove(draw.choice(present))
            case _:
                free = [
                    (tier, place)
                    for tier in (2, 3)
                    for place in range(0, 40, 4)
                    if not any(each and (each.tier, each.place) == (tier, place) for each in log.slab)
                ]
                if free:
                    tier, place = draw.choice(free)
                    namespace = draw.choice((MINE, OTHER, THIRD))
                    # The same page may lie in two places.
                    name = draw.choice((next(names), 1_000_000))
                    log.store(block(name, place, pages=draw.randrange(1, 5), tier=tier, namespace=namespace))
        for _ in range(draw.randrange(4)):
            clock.now += draw.choice((0, 0.1, 1.5))
            log.turn()
            following.feed.turn()
        following.tell(draw.randrange(30))
    namespaces = namespaces or (MINE,)
    following.feed.follow(namespaces)
    following.run()
    following.tell()
    assert following.told() == log.held(*namespaces)
    assert {(key[0], key[1], key[2:]) for key in following.held} == log.held(*namespaces)
    assert len(following.held) == len(log.held(*namespaces)), "nothing is kept of pages that are gone"


def test_pages_that_a_new_leader_finds_again_are_not_taken_back(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.run()
    following.tell()
    before = dict(following.counts)
    pages, following.log.slab = following.log.slab, []
    following.log.restart(keeps=False)
    for _ in range(6):
        # It reads the inventories first.
        following.log.turn()
        following.feed.turn()
        clock.now += 0.5
    following.tell()
    assert following.counts == before
    following.log.store(pages[0])
    for _ in range(6):
        following.log.turn()
        following.feed.turn()
    clock.now += event_feed.RECOVERY_S
    following.feed.turn()
    following.run()
    assert following.held.first_due() is None, "nothing has changed"
    assert following.told() == following.log.held(MINE)


def test_pages_that_a_new_leader_does_not_find_are_taken_back_in_time(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.run()
    following.tell()
    following.log.restart(keeps=False)
    for _ in range(6):
        following.log.turn()
        at = following.feed.turn()
    assert at <= clock.now + event_feed.RECOVERY_S
    following.tell()
    assert following.told()
    clock.now += event_feed.RECOVERY_S
    following.feed.turn()
    following.tell()
    assert not following.told()


def test_an_absent_leader_holds_nothing_after_a_while(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.run()
    following.tell()
    for _ in range(int(event_feed.ABSENT_S) - 1):
        following.log.fail()
        following.feed.turn()
        clock.now += 1
    following.tell()
    assert following.told() == following.log.held(MINE)
    following.log.fail()
    clock.now += 2
    following.feed.turn()
    following.tell()
    assert not following.told()
    clock.now += event_feed.RETRY_S
    following.run()
    following.tell()
    assert following.told() == following.log.held(MINE), "it is back"


def test_a_read_that_is_refused_to_wait_is_repeated_without_a_wait(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.run()
    following.log.fail()
    following.feed.turn()
    following.log.store(block(1, 0))
    clock.now += event_feed.RETRY_S
    following.feed.turn()
    assert [read.message.wait_ms for read in following.log.open()] == [0]


def test_nothing_is_read_while_nothing_changes(clock: Clock) -> None:
    for namespaces in ((MINE,), (MINE, OTHER)):
        following = Following(clock, *namespaces)
        following.run()
        before = following.log.answered
        for _ in range(50):
            clock.now += 0.1
            following.feed.turn()
            following.log.turn()
        assert following.log.answered == before


def test_only_the_reader_whose_pages_change_is_asked(clock: Clock) -> None:
    following = Following(clock, MINE, OTHER)
    following.log.store(block(1, 0))
    following.log.store(block(2, 4, namespace=OTHER))
    following.run()
    asked = []
    request = following.log.request
    following.log.request = lambda message, *rest, **named: (  # type: ignore[method-assign]
        asked.append(message.namespace) or request(message, *rest, **named)
    )
    following.log.store(block(3, 8, namespace=OTHER))
    following.run()
    assert set(asked) == {None, OTHER}
    asked.clear()
    for number in range(3):
        following.log.store(block(4 + number, 12 + 4 * number, namespace=THIRD))
        following.run()
    assert asked == [None, None, None], "a foreign namespace costs nothing more"


def test_changes_of_several_namespaces_are_found_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "ASK_ALL_S", 1e9)
    monkeypatch.setattr(event_feed, "READ_PAGES", 1)
    following = Following(clock, MINE, OTHER)
    log, namespaces = following.log, [MINE, OTHER]

    def agrees() -> None:
        following.run()
        following.tell()
        assert following.told() == log.held(*namespaces)

    agrees()
    for number in range(3):
        # The first pages of a namespace, then some more, then several blocks at once.
        for at in range(number + 1):
            log.store(block(10 * number + at, 100 * number + 4 * at, namespace=OTHER, pages=1))
        agrees()
    log.store(block(50, 1000, namespace=THIRD))
    agrees()
    log.remove(next(each for each in log.slab if each and each.namespace == THIRD))
    namespaces.append(THIRD)
    following.feed.follow(namespaces)
    agrees()
    log.store(block(51, 1004, namespace=THIRD))
    agrees()
    assert THIRD in [each.namespace for each in log.slab if each]
    log.clear(2)
    agrees()
    assert not following.told()


def test_every_reader_is_asked_now_and_then(clock: Clock) -> None:
    following = Following(clock, MINE, OTHER)
    following.run()
    asked = []
    request = following.log.request
    following.log.request = lambda message, *rest, **named: (  # type: ignore[method-assign]
        asked.append(message.namespace) or request(message, *rest, **named)
    )
    clock.now += event_feed.ASK_ALL_S
    following.run()
    assert asked == [MINE, OTHER, None]


def test_a_page_in_a_place_replaces_the_one_before(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.run()
    following.log.slab.clear()
    following.log.store(block(2, 0))
    following.run()
    following.tell()
    assert following.told() == following.log.held(MINE)


def test_records_of_a_later_kind_are_skipped(clock: Clock) -> None:
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.run()
    hashes = b"".join(block(1, 0).hashes)
    for place, event in ((0, "moved"), (4, {"moved": {"to": 3}})):
        record = wire.EventRecord(event, 2, prefix(MINE), b"layout.", 0, place, hashes)
        following.log.records.append(record)
    following.log.store(block(2, 4))
    following.run()
    following.tell()
    assert following.told() == following.log.held(MINE)


def test_further_places_are_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "PLACES_MAX", 4)
    following = Following(clock, MINE)
    following.log.store(block(1, 0))
    following.log.store(block(2, 4))
    following.run()
    assert (len(following.held), following.feed.left_out) == (4, 2)
    following.log.remove(following.log.slab[1])
    following.log.store(block(3, 8, pages=1))
    following.run()
    assert len(following.held) == 4


def test_further_namespaces_are_left_out(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_feed, "NAMESPACES_MAX", 2)
    following = Following(clock, MINE, OTHER, THIRD)
    for name, namespace in enumerate((MINE, OTHER, THIRD)):
        following.log.store(block(name, 4 * name, namespace=namespace))
    following.run()
    following.tell()
    assert following.told() == following.log.held(MINE, OTHER)
    assert "those of 1 more are not published" in caplog.text


def test_a_page_is_held_while_it_is_in_a_place_and_changes_back_are_no_change() -> None:
    held, key = HeldPages(), key_of(2, 0, b"h" * 32)
    held.gain(key)
    held.gain(key)
    assert held.take_due(key) == (True, NOT)
    held.announced(key, BY_HASH)
    held.lose(key)
    assert held.first_due() is None
    held.described(key)
    assert held.take_due(key) == (True, BY_HASH)
    held.announced(key, IN_FULL)
    held.described(key)
    assert not held.is_due(key)
    held.lose(key)
    assert key not in held
    held.gain(key)
    assert held.take_due(key) == (True, IN_FULL)
    held.lose(key)
    held.announce_again()
    assert (len(held), held.first_due()) == (0, None)
    with pytest.raises(KeyError):
        held.lose(key)
