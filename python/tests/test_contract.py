"""Tests of the contract suite: a real kvferry and a reference engine pass, planted mistakes are found by name."""

import contextlib
import io
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from contract_engine import WAIT_S, ToyEngine, tokens
from contract_run import SETTINGS, Run, scripted
from daemon import TIMEOUT_S, eventually, running
from test_typed_clients import CLIENTS, Clients

from kvferry import wire
from kvferry.admin import AdminClient
from kvferry.contract import checks, leader_checks, page_checks, session_checks
from kvferry.contract.__main__ import CANNOT_RUN, FAILED, PASSED, main
from kvferry.contract.connector_rules import CONNECTOR_RULES
from kvferry.contract.leader_checks import LeaderChecks
from kvferry.contract.leader_rules import LEADER_RULES
from kvferry.contract.live import WORKER_SOCKETS, Connection, Rank, Unavailable
from kvferry.contract.loop import Loop
from kvferry.contract.pages import OwnMemory
from kvferry.contract.played import Target
from kvferry.contract.rules import Outcome
from kvferry.contract.script import ACTIONS, Event, Script
from kvferry.contract.scripted import Driver, ScriptedKvferry

ABCD = tokens("a", "b", "c", "d")
#: Prompts that share, branch and repeat pages: enough for every event of the default script.
PROMPTS = [
    ("abcd", ABCD),
    ("abef", tokens("a", "b", "e", "f")),
    ("xbcd", tokens("x", "b", "c", "d")),
    ("abcd", ABCD),
    ("abcdg", tokens("a", "b", "c", "d", "g")),
    ("h", tokens("h", "i", "j")),
    ("abefk", tokens("a", "b", "e", "f", "k")),
    ("l", tokens("l", "m")),
    ("lo", tokens("l", "m", "o")),
    ("xbcd", tokens("x", "b", "c", "d")),
    ("p", tokens("p", "q")),
    ("pr", tokens("p", "q", "r")),
]


# A running kvferry.


@pytest.mark.parametrize("settings", [{"ranks": 1}, {"ranks": 2, "kv_shards": 1}], ids=str)
def test_a_real_kvferry_keeps_every_rule(settings: dict[str, int]) -> None:
    with running(g2="64MiB", **settings) as daemon:
        report = LeaderChecks(Target(daemon.socket_dir, kv_shards=settings.get("kv_shards", 0))).run()
        print(report.as_text())
        assert report.named(Outcome.BROKEN) == []
        assert report.named(Outcome.NOT_EXERCISED) == []
        daemon.wait_idle()


LIES = {
    "": (),
    "never_over": ("load-pinned", "hashes-of-a-slot", "finish-closes", "deadline-of-a-store"),
    "keeps_slots": ("finish-closes",),
    "reads_early": ("store-waits", "load-after"),
    "wrong_bytes": ("load-bytes",),
    "ignores_holds": ("held-pages",),
    "forgets_answers": ("retry-answer", "retry-reconnect"),
    "answers_twice": ("one-answer",),
    "closes_unknown": ("unknown-request",),
    "one_page_less": ("store-found",),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_checks_of_a_leader_find_its_mistakes(lie: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        kvferry = ScriptedKvferry(Path(directory) / "s", SETTINGS, Script(()), lies=frozenset([lie]) - {""})
        kvferry.start()
        report = LeaderChecks(Target(Path(directory) / "s")).run()
        kvferry.stop()
        print(report.as_text())
        broken = report.named(Outcome.BROKEN)
        assert set(LIES[lie]) <= set(broken)
        assert bool(broken) == bool(lie)


# A connector.


@pytest.mark.parametrize("clients", CLIENTS.values(), ids=CLIENTS)
def test_a_correct_engine_keeps_every_rule(clients: Clients) -> None:
    with scripted(Script()) as run:
        engine = ToyEngine(run.socket_dir, client=clients.engine)
        loaded = [run.prompt(engine, name, prompt) for name, prompt in PROMPTS]
        run.prompt(engine, "salted", ABCD, "salt")
        assert sum(loaded) > 10, loaded
        eventually("heartbeats pass", lambda: run.kvferry.report.outcome("heartbeats") is Outcome.KEPT)
        engine.close()
    assert run.report is not None
    assert run.broken == {}
    assert not any("not played" in note for note in run.report.notes), run.report.notes
    not_seen = {"credits", "load-after-lower", "written-again"}
    assert set(run.report.named(Outcome.NOT_EXERCISED)) <= not_seen


def late(kind: str, *numbers: int) -> Script:
    return Script([Event(kind, number, "late", 400) for number in numbers])


def test_a_request_that_is_repeated_counts_once_for_the_script() -> None:
    script = Script([Event("finish", 1, "drop"), Event("finish", 2, "late", 1000), Event("store", 1, "busy")])
    with scripted(script) as run:
        raw = Raw(run.socket_dir)
        raw.send(wire.Kind.FINISH, 1, wire.Finish(1), deadline_ms=60_000)
        raw.again()
        raw.send(wire.Kind.FINISH, 1, wire.Finish(1), deadline_ms=60_000)
        assert raw.receive().kind == wire.Kind.FINISH_ANSWER
        assert [event.number for event in run.kvferry.events_left] == [2, 1], "the second finish has not come"
        raw.close()
    assert run.broken == {}


def test_requests_without_an_answer_and_failed_loads_are_no_mistakes_of_the_engine() -> None:
    script = Script([Event("store", 3, "silent"), Event("load", 1, "fail"), Event("lookup", 4, "not_ready")])
    with scripted(script) as run:
        engine = ToyEngine(run.socket_dir, wait_s=1.0)
        loaded = [run.prompt(engine, name, prompt) for name, prompt in PROMPTS[:6]]
        assert loaded[1] == 0, "the load failed"
        engine.close()
    assert run.report is not None
    assert run.broken == {}
    assert run.report.outcome("failed-pages-computed") is Outcome.KEPT
    assert run.report.notes == [], "every event was played"


#: A mistake of the engine, the rule that it breaks, and the script that shows it.
MISTAKES: dict[str, tuple[str, Script]] = {
    "page_hashes": ("hashes-chained", Script(())),
    "constant_hashes": ("hashes-cover-tokens", Script(())),
    "other_hashes": ("hashes-agree", Script(())),
    "frees_on_busy": ("busy-keeps-pages", Script([Event("store", 1, "busy")])),
    "store_twice": ("one-store-of-a-page", Script(())),
    "ignores_load_answer": ("failed-pages-computed", Script([Event("load", 2, "half")])),
    "ignores_hits": ("hits-used", Script(())),
    "loads_more": ("load-within-hit", Script(())),
    "loads_before": ("load-within-hit", Script(())),
    "written_early": ("written-after-the-bytes", late("store", 1, 2)),
    "overwrites": ("pages-kept", late("store", 1, 2)),
    "no_finish": ("slots-finished", Script(())),
    "random_hashes": ("hashes-repeat", Script(())),
    "waits_for_nothing": ("load-after-lower", Script(())),
    "writes_on_busy": ("busy-keeps-pages", Script([Event("store", 1, "busy")])),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_an_engine_is_named_by_its_rule(mistake: str) -> None:
    rule, script = MISTAKES[mistake]
    with scripted(script, owed_limit_s=1.0) as run:
        engine = ToyEngine(run.socket_dir, mistake, wait_s=1.0 if mistake == "waits_for_nothing" else WAIT_S)
        prompts = PROMPTS[:4]
        if mistake == "ignores_load_answer":
            prompts = [("abcd", ABCD), ("abcd", ABCD), ("abcdg", tokens("a", "b", "c", "d", "g"))]
        elif mistake == "constant_hashes":
            prompts = [("abcd", ABCD), ("efgh", tokens("e", "f", "g", "h"))]
        for name, prompt in prompts:
            run.prompt(engine, name, prompt)
        # The engine is still connected: its slots are open, or finished.
        run.kvferry.stop()
        engine.close()
    assert list(run.broken) == [rule]


def test_an_engine_that_names_tails_and_numbers_its_works_keeps_every_rule() -> None:
    script = Script([Event("store", 2, "busy"), Event("load", 2, "half"), Event("load", 3, "fail")])
    with scripted(script) as run:
        engine = ToyEngine(run.socket_dir, tails=True, works=True)
        loaded = [run.prompt(engine, name, prompt) for name, prompt in PROMPTS]
        run.prompt(engine, "salted", ABCD, "salt")
        assert sum(loaded) > 5, loaded
        engine.close()
    assert run.broken == {}
    assert run.report is not None
    of_hashes = {"hashes-chained", "hashes-cover-tokens", "hashes-repeat", "spaces-apart", "hashes-agree"}
    of_pages = {"pages-kept", "busy-keeps-pages", "one-store-of-a-page", "written-after-the-bytes", "hits-used"}
    assert not (of_hashes | of_pages | {"failed-pages-computed", "slots-finished"}) & run.not_exercised


#: The same for an engine that names tails and numbers its works.
MISTAKES_WITH_TAILS: dict[str, tuple[str, Script]] = {
    "page_hashes": ("hashes-chained", Script(())),
    "random_hashes": ("hashes-repeat", Script(())),
    "stores_what_failed": ("failed-pages-computed", Script([Event("load", 1, "half")])),
    "writes_on_busy": ("busy-keeps-pages", Script([Event("store", 1, "busy")])),
}


@pytest.mark.parametrize("mistake", MISTAKES_WITH_TAILS)
def test_a_mistake_of_an_engine_that_names_tails_is_named_by_its_rule(mistake: str) -> None:
    rule, script = MISTAKES_WITH_TAILS[mistake]
    with scripted(script, owed_limit_s=1.0) as run:
        engine = ToyEngine(run.socket_dir, mistake, tails=True, works=True)
        for name, prompt in PROMPTS[:3]:
            run.prompt(engine, name, prompt)
        run.kvferry.stop()
        engine.close()
    assert list(run.broken) == [rule]


def test_hashes_of_single_pages_are_found_without_declared_prompts_also_among_tails() -> None:
    with scripted() as run:
        engine = ToyEngine(run.socket_dir, "page_hashes", tails=True)
        for prompt in (ABCD, tokens("x", "b", "c")):
            engine.run(prompt)
        engine.close()
    assert list(run.broken) == ["hashes-chained"]


def test_pages_of_two_models_in_one_namespace_and_content_are_found() -> None:
    with scripted() as run:
        for model in ("one", "two"):
            engine = ToyEngine(run.socket_dir, "one_namespace", "one_content", model=model)
            run.prompt(engine, model, ABCD)
            engine.close()
    assert list(run.broken) == ["spaces-apart"]


def test_pages_of_two_salts_in_one_namespace_are_found() -> None:
    with scripted() as run:
        engine = ToyEngine(run.socket_dir, "one_namespace")
        for salt in ("one", "two"):
            run.prompt(engine, salt, ABCD, salt)
        engine.close()
    assert list(run.broken) == ["spaces-apart"]


def test_ids_that_go_back_after_a_restart_are_found() -> None:
    name = secrets.token_bytes(16)
    with scripted() as run:
        for prompt in (ABCD, tokens("x", "y")):
            engine = ToyEngine(run.socket_dir, engine=name, ids=1)
            with contextlib.suppress(AssertionError):
                run.prompt(engine, "a", prompt)
            engine.close()
    assert list(run.broken) == ["ids-grow"]


def test_ids_that_grow_over_a_restart_are_right() -> None:
    name = secrets.token_bytes(16)
    with scripted() as run:
        for ids in (1, 1000):
            engine = ToyEngine(run.socket_dir, engine=name, ids=ids)
            run.prompt(engine, "a", ABCD)
            engine.close()
    assert run.broken == {}


class Raw:
    """A client without good manners: it sends what the test says, and reads only when it is asked to."""

    def __init__(self, socket_dir: Path, *, first_kind: int = wire.Kind.HELLO):
        self._directory = socket_dir / "leader"
        self._connect()
        self.engine = secrets.token_bytes(16)
        if first_kind == wire.Kind.HELLO:
            self.hello()

    def _connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(f"ipc://{self._directory}/kvferry.sock")

    def hello(self) -> None:
        self.send(wire.Kind.HELLO, 0, wire.Hello(role="engine", engine=self.engine), version=1)
        assert self.receive().kind == wire.Kind.WELCOME

    def send(self, kind: int, identity: int, body: object, *, version: int = 2, deadline_ms: int = 5000) -> None:
        payload = body if isinstance(body, bytes) else wire.body_of(body)
        self._socket.send_multipart([wire.header(version, kind, identity, deadline_ms, 0), payload])

    def lookup(self, identity: int, slot: int = 1) -> None:
        self.send(wire.Kind.LOOKUP, identity, wire.Lookup(slot=slot, namespace=b"", hash_bytes=16, hashes=bytes(16)))

    def again(self) -> None:
        """Connects again, as the same engine."""
        self._socket.close(0)
        self._connect()
        self.hello()

    def receive(self) -> wire.Envelope:
        assert self._socket.poll(int(TIMEOUT_S * 1000))
        return wire.read(self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(0)


def no_hello(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.STATUS, 1, wire.Status())
    assert raw.receive().body.code == 15


def silence(run: Run, raw: Raw) -> None:
    eventually("the report has the silence", lambda: run.kvferry.report.named(Outcome.BROKEN))


def until_broken(run: Run, send: Callable[[], Any]) -> None:
    """Sends again and again until the report names a broken rule."""

    def broken() -> bool:
        send()
        return bool(run.kvferry.report.named(Outcome.BROKEN))

    eventually("a rule is broken", broken)


def no_rehello(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.STATUS, 1, wire.Status())
    raw.receive()
    run.kvferry.drop_leader()
    # The socket connects again by itself, and the client does not notice.
    until_broken(run, lambda: raw.send(wire.Kind.PING, 0, wire.Empty()))


def never_back(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.STATUS, 1, wire.Status())
    raw.receive()
    raw._socket.setsockopt(zmq.RECONNECT_IVL, -1)
    run.kvferry.drop_leader()
    eventually("the report has the missing hello", lambda: run.kvferry.report.named(Outcome.BROKEN))


def beyond_credits(run: Run, raw: Raw) -> None:
    for identity in range(1, SETTINGS.request_credits + 2):
        run.kvferry.add(Event("lookup", identity, "late", 1000))
    for identity in range(1, SETTINGS.request_credits + 2):
        raw.lookup(identity)


def another_body(run: Run, raw: Raw) -> None:
    run.kvferry.add(Event("lookup", 1, "late", 500))
    raw.lookup(7)
    raw.lookup(7, slot=9)


class Calls(Loop):
    """A thread that only runs calls."""

    def _tick(self, now: float) -> None: ...

    def _ended(self) -> None: ...


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_fails_on_the_thread_of_the_checks_names_its_reason() -> None:
    def fails() -> None:
        raise LookupError("planted")

    for _ in range(20):
        calls = Calls()
        calls.begin()
        with pytest.raises(RuntimeError, match=r"the call failed: LookupError\('planted'\)"):
            calls.call(fails)
        calls.end_loop()


def no_answer_to_unknown(run: Run, raw: Raw) -> None:
    run.kvferry._server.call(lambda: [run.kvferry._server.ask(peer, 900) for peer in run.kvferry._server.peers()])
    until_broken(run, lambda: raw.send(wire.Kind.PING, 0, wire.Empty()))


def not_repeated(run: Run, raw: Raw) -> None:
    run.kvferry.add(Event("finish", 1, "drop"))
    raw.send(wire.Kind.FINISH, 1, wire.Finish(1), deadline_ms=60_000)
    raw.again()
    until_broken(run, lambda: raw.send(wire.Kind.PING, 0, wire.Empty()))


def stray_answer(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.PONG, 77, wire.Empty(), deadline_ms=0)


def other_version(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.STATUS, 1, wire.Status(), version=1)
    raw.receive()


def no_deadline(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.STATUS, 1, wire.Status(), deadline_ms=0)
    raw.receive()


def hello_of_version_2(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.HELLO, 0, wire.Hello(role="engine", engine=raw.engine), version=2)
    raw.receive()


def no_pong(run: Run, raw: Raw) -> None:
    run.kvferry.add(Event("hello", 2, "probe"))
    raw.again()
    until_broken(run, lambda: raw.send(wire.Kind.STATUS, 1, wire.Status()))


def ends_at_unknown_answer(run: Run, raw: Raw) -> None:
    run.kvferry.add(Event("hello", 2, "probe"))
    raw.again()
    while (received := raw.receive()).kind != 901:
        raw.send(wire.Kind.PONG, received.correlation, wire.Empty(), deadline_ms=0)
    raw.close()


def ends_at_unknown_field(run: Run, raw: Raw) -> None:
    """The client connects again and again, because it does not understand the welcome."""
    raw.again()
    raw.close()


def wrong_kind(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.WRITTEN, 1, wire.Written(1))
    raw.receive()


def unreadable(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.LOOKUP, 1, b"\xc1")
    raw.receive()


def load_of_no_slot(run: Run, raw: Raw) -> None:
    raw.send(wire.Kind.LOAD, 1, wire.Load(5, [wire.part(0, [1])]))
    raw.receive()


#: A client's mistake, and the rule that it breaks.
CLIENTS: dict[str, tuple[str, Callable[[Run, Raw], None]]] = {
    "no_hello": ("hello-first", no_hello),
    "no_rehello": ("hello-again", no_rehello),
    "never_back": ("hello-again", never_back),
    "silence": ("heartbeats", silence),
    "stray_answer": ("no-stray-answers", stray_answer),
    "other_version": ("agreed-version", other_version),
    "no_deadline": ("deadlines", no_deadline),
    "wrong_kind": ("accepted-kinds", wrong_kind),
    "beyond_credits": ("credits", beyond_credits),
    "another_body": ("one-request-per-id", another_body),
    "no_answer_to_unknown": ("unknown-requests-answered", no_answer_to_unknown),
    "not_repeated": ("unanswered-repeated", not_repeated),
    "hello_of_version_2": ("hello-fields", hello_of_version_2),
    "no_pong": ("pings-answered", no_pong),
    "ends_at_unknown_answer": ("unknown-answers-dropped", ends_at_unknown_answer),
    "ends_at_unknown_field": ("unknown-fields-skipped", ends_at_unknown_field),
    "unreadable": ("well-formed", unreadable),
    "load_of_no_slot": ("slots-opened", load_of_no_slot),
}


@pytest.mark.parametrize("mistake", CLIENTS)
def test_a_mistake_of_a_client_is_named_by_its_rule(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, plays = CLIENTS[mistake]
    # Nobody answers late here.
    monkeypatch.setattr(session_checks, "RETURN_S", 1.0)
    monkeypatch.setattr(session_checks, "REPEAT_S", 0.5)
    with scripted() as run:
        no_hello_yet = mistake in ("no_hello", "hello_of_version_2")
        raw = Raw(run.socket_dir, first_kind=wire.Kind.STATUS if no_hello_yet else wire.Kind.HELLO)
        plays(run, raw)
        eventually("the break is seen", lambda: run.kvferry.report.named(Outcome.BROKEN))
        raw.close()
    assert list(run.broken) == [rule]


def without_content(registration: dict[str, Any]) -> None:
    del registration["content"]


def without_proof(registration: dict[str, Any]) -> None:
    registration["nonce"]["bytes"] = bytes(32)


def with_other_stride(registration: dict[str, Any]) -> None:
    registration["groups"][0]["tensors"][1]["page_stride_bytes"] *= 2


def beyond_the_end(registration: dict[str, Any]) -> None:
    registration["groups"][0]["tensors"][3]["offset_bytes"] += 1 << 20


@contextlib.contextmanager
def raw_rank(run: Run) -> Iterator[Rank]:
    memory = OwnMemory(pages=4, page_tokens=4, page_bytes=4096, rank=0, ranks=1, shard=0, content=b"c")
    rank = Rank(run.socket_dir, secrets.token_bytes(16), memory, 0, 0)
    try:
        yield rank
    finally:
        rank.close()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without_content, "content-given"),
        (without_proof, "registration-proven"),
        (with_other_stride, "registration-consistent"),
        (beyond_the_end, "registration-consistent"),
    ],
)
def test_a_mistake_of_a_registration_is_named_by_its_rule(change: Callable[[dict[str, Any]], None], rule: str) -> None:
    with scripted() as run, raw_rank(run) as rank:
        assert isinstance(rank.register(change), wire.Error)
        run.kvferry.stop()
    assert list(run.broken) == [rule]


@pytest.mark.parametrize("mistake", ["no_registration", "no_written", ""])
def test_a_rank_that_lost_its_connection_registers_and_reports_again(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "RETURN_S", 0.5)
    monkeypatch.setattr(checks, "WRITTEN_AGAIN_S", 0.5)
    with scripted(owed_limit_s=0.5) as run, raw_rank(run) as rank:
        assert isinstance(rank.register(), wire.Registered)
        assert isinstance(rank.wrote(5), wire.Empty)
        run.kvferry.drop_worker()
        rank.connection.close()
        rank.connection = Connection(rank.directory, "rank", rank.name, rank=0).opened()
        connections = [rank.connection]
        if mistake != "no_registration":
            assert isinstance(rank.register(), wire.Registered)
            if not mistake:
                assert isinstance(rank.wrote(5), wire.Empty)
            engine = Connection(run.socket_dir / "leader", "engine", rank.name).opened()
            connections.append(engine)
            # A store of pages that work 5 has written.
            hashes = bytes(16)
            found = engine.ask(wire.Kind.LOOKUP, 6, wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=hashes))
            assert found == wire.LookupAnswer(0)
            engine.send(wire.Kind.STORE, 7, wire.Store(1, [wire.part(0, [1])], after=5))
        rule = {"no_registration": "registers-again", "no_written": "written-again"}.get(mistake)
        if rule:

            def broken() -> bool:
                for each in connections:
                    each.beat()
                return bool(run.kvferry.report.named(Outcome.BROKEN))

            eventually("the break is seen", broken)
        else:
            assert engine.answer(7) == wire.StoreAnswer(1, 0)
        if mistake != "no_registration":
            assert engine.ask(wire.Kind.FINISH, 8, wire.Finish(1)) == wire.Empty()
        run.kvferry.stop()
        for each in connections:
            each.close()
    assert list(run.broken) == ([rule] if rule else [])
    if not mistake:
        assert run.report is not None
        assert {run.report.outcome(each) for each in ("registers-again", "written-again")} == {Outcome.KEPT}


@pytest.mark.parametrize(
    ("identity", "slot", "lost_s", "broken"),
    [
        (7, 1, 10, []),
        (9, 1, 10, ["slots-opened"]),
        (6, 1, 10, ["slots-opened"]),
        (7, 2, 10, ["slots-opened"]),
        (7, 1, 0, ["slots-opened"]),
    ],
)
def test_a_store_of_a_finished_slot_may_be_repeated_to_the_next_leader(
    identity: int, slot: int, lost_s: float, broken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader before may have answered it, and the answer may be lost. Any other copy must name an open slot."""
    monkeypatch.setattr(page_checks, "_ANSWER_LOST_S", lost_s)
    with scripted() as run, raw_rank(run) as rank:
        assert isinstance(rank.register(), wire.Registered)
        assert isinstance(rank.wrote(5), wire.Empty)
        engine = Connection(run.socket_dir / "leader", "engine", rank.name).opened()
        lookup = wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=bytes(16))
        assert engine.ask(wire.Kind.LOOKUP, 6, lookup) == wire.LookupAnswer(0)
        store = wire.Store(1, [wire.part(0, [1])], after=5)
        assert engine.ask(wire.Kind.STORE, 7, store) == wire.StoreAnswer(1, 0)
        assert engine.ask(wire.Kind.FINISH, 8, wire.Finish(1)) == wire.Empty()
        run.kvferry.restart()
        engine.close()
        engine = Connection(run.socket_dir / "leader", "engine", rank.name).opened()
        repeated = wire.Store(slot, [wire.part(0, [1])], after=5)
        refused = engine.ask(wire.Kind.STORE, identity, repeated)
        assert isinstance(refused, wire.Error)
        assert refused.code == wire.Code.UNKNOWN_SLOT
        run.kvferry.stop()
        engine.close()
    assert list(run.broken) == broken


def test_every_rule_of_a_connector_has_a_mistake_that_breaks_it() -> None:
    found = {rule for rule, _ in (*MISTAKES.values(), *CLIENTS.values())}
    # Those of the tests above.
    found |= {"content-given", "registration-proven", "registration-consistent", "registers-again", "written-again"}
    found |= {"spaces-apart", "ids-grow"}
    assert found == {rule.name for rule in CONNECTOR_RULES}


def test_credits_that_are_used_up_and_not_exceeded_are_right() -> None:
    numbers = range(1, SETTINGS.request_credits + 1)
    with scripted(Script([Event("lookup", number, "late", 100) for number in numbers])) as run:
        raw = Raw(run.socket_dir)
        for identity in numbers:
            raw.lookup(identity)
        for _ in numbers:
            raw.receive()
        raw.close()
    assert run.report is not None
    assert run.report.outcome("credits") is Outcome.KEPT
    assert run.broken == {}


# The command line, and what the author's driver says.


def test_the_command_checks_a_kvferry_and_refuses_one_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as run:
        where = ["leader", "--socket-dir", str(run.socket_dir)]
        assert main([*where, "--json"]) == PASSED
        report = json.loads(capsys.readouterr().out)
        assert report["passed"]
        assert {rule["outcome"] for rule in report["rules"]} == {"kept"}
        engine = ToyEngine(run.socket_dir)
        engine.run(ABCD)
        assert main(where) == CANNOT_RUN
        assert "rank 0 of replica 0 has the memory of an engine" in capsys.readouterr().err
        engine.close()
        eventually("the rank has left", lambda: not _attached(run.socket_dir))
        assert main(where) == CANNOT_RUN
        assert "holds 4 pages of an engine that is not connected" in capsys.readouterr().err
        assert main([*where, "--discard-pages"]) == PASSED


def test_pages_of_an_engine_are_not_put_at_risk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running(ranks=1, g2="16MiB") as daemon:
        where = ["leader", "--socket-dir", str(daemon.socket_dir)]
        engine = ToyEngine(daemon.socket_dir)
        engine.run(ABCD)
        assert main(where) == CANNOT_RUN
        assert "rank 0 of replica 0 has the memory of an engine" in capsys.readouterr().err
        assert engine.run(ABCD) == 4, "the engine has its pages still"
        engine.close()
        eventually("the rank has left", lambda: not _attached(daemon.socket_dir))
        assert main(where) == CANNOT_RUN
        assert "holds 4 pages of an engine that is not connected" in capsys.readouterr().err
    with running(ranks=1, g2="16MiB", g3="16MiB", g3_dir=tmp_path / "disk") as daemon:
        assert main(["leader", "--socket-dir", str(daemon.socket_dir)]) == CANNOT_RUN
        assert "has a disk tier, whose pages may be of an engine" in capsys.readouterr().err


def _attached(socket_dir: Path) -> bool:
    with AdminClient(socket_dir / "leader") as admin:
        return admin.status().ranks[0].attached


def test_the_command_without_a_kvferry_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leader", "--socket-dir", str(tmp_path)]) == CANNOT_RUN
    assert "no leader listens: start kvferry first" in capsys.readouterr().err


def test_the_checks_wait_for_a_worker_that_starts_after_its_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ranks=1, g2="16MiB") as daemon:
        worker = daemon.socket_dir / "worker-0-0"
        eventually("the worker listens", lambda: all((worker / name).exists() for name in WORKER_SOCKETS))
        late = [worker / name for name in WORKER_SOCKETS]
        for path in late:
            path.rename(path.with_suffix(".late"))

        def next_socket() -> None:
            path = late.pop(0)
            path.with_suffix(".late").rename(path)

        with monkeypatch.context() as patched:
            patched.setattr(leader_checks, "pause", next_socket)
            LeaderChecks(Target(daemon.socket_dir))._prepare()
        assert late == []

        monkeypatch.setattr(leader_checks, "WORKERS_LIMIT_S", 0.1)
        with pytest.raises(Unavailable, match="no worker of rank 1 of replica 0 listens in"):
            LeaderChecks(Target(daemon.socket_dir, ranks=2))._prepare()


def test_a_driver_declares_prompts_and_gets_the_report(tmp_path: Path) -> None:
    script, messages = tmp_path / "script", tmp_path / "messages"
    script.write_text('# a comment\n{"on": "store", "number": 1, "do": "late", "ms": 50}\n')
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        socket_dir = Path(directory) / "s"
        command = [sys.executable, "-m", "kvferry.contract", "serve", "--socket-dir", str(socket_dir), "--driver"]
        command += ["--json", "--script", str(script), "--record", str(messages), "--heartbeat-ms", "500"]
        serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert serving.stdin is not None
        assert serving.stdout is not None

        def say(**said: Any) -> dict[str, Any]:
            serving.stdin.write(json.dumps(said) + "\n")
            serving.stdin.flush()
            return json.loads(serving.stdout.readline())

        try:
            assert say(do="begin", prompt="one", space="a", tokens=ABCD) == {"ok": True}
            engine = ToyEngine(socket_dir, "page_hashes")
            engine.run(ABCD)
            assert say(do="end") == {"ok": True}
            assert say(do="begin", prompt="two", space="a", tokens=tokens("x", "b")) == {"ok": True}
            engine.run(tokens("x", "b"))
            broken = [each["rule"] for each in say(do="report")["report"]["rules"] if each["outcome"] == "broken"]
            assert broken == ["hashes-chained"]
            assert "on is 'x'" in say(do="event", event={"on": "x"})["problem"]
            assert "tokens: give" in say(do="begin", prompt="three", tokens=[])["problem"]
            engine.close()
            assert say(do="stop") == {"ok": True}
            report = json.loads(serving.stdout.readline())
            assert serving.wait(TIMEOUT_S) == FAILED
            assert not report["passed"]
        finally:
            serving.kill()
            serving.wait()
    recorded = [json.loads(line) for line in messages.read_text().splitlines()]
    (number,) = {n for rule in report["rules"] for each in rule["breaks"] for n in each["messages"]}
    assert [each["received"] for each in recorded if each["number"] == number and "received" in each] == ["lookup"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1", "a line is a JSON object"),
        ("{", "Expecting"),
        ('{"do": "jump"}', "do is 'jump': give one of begin, end"),
        ('{"do": "begin", "tokens": [1]}', "prompt is None"),
        ('{"do": "event", "event": {"on": "load", "number": 0, "do": "half"}}', "number is 0"),
        ('{"do": "event", "event": {"on": "load", "number": 1, "do": "probe"}}', "do is 'probe': at a load"),
    ],
)
def test_a_line_of_the_driver_that_is_wrong_is_refused_with_the_remedy(line: str, problem: str) -> None:
    with scripted() as run:
        answers = io.StringIO()
        Driver(run.kvferry).run(io.StringIO(line + "\n"), answers)
        assert problem in json.loads(answers.getvalue())["problem"]


def test_a_rule_that_nothing_has_shown_is_not_kept() -> None:
    with scripted() as run:
        pass
    assert run.report is not None
    assert run.report.named(Outcome.KEPT) == []
    assert not run.report.passed


def test_a_second_server_in_one_directory_is_refused() -> None:
    with scripted() as run, pytest.raises(OSError, match="served by another process"):
        ScriptedKvferry(run.socket_dir, SETTINGS).start()


def test_the_page_of_the_contract_names_every_rule_and_every_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    for rule in (*LEADER_RULES, *CONNECTOR_RULES):
        assert f"| `{rule.name}` | {rule.text} | {rule.where} |" in page
    for do in {do for each in ACTIONS.values() for do in each}:
        assert f"| `{do}` |" in page


def test_every_rule_names_a_place_that_the_wire_page_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    for rule in (*LEADER_RULES, *CONNECTOR_RULES):
        place = rule.where
        found = place in page if not place.startswith("Conversation ") else f"\n{place.split()[1]}. **" in page
        assert found, f"{rule.name}: docs/wire.md has no {place}"
