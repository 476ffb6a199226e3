"""Checks of a running kvferry, with an engine that is played here. Nothing of other engines is touched."""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from kvferry import wire
from kvferry.contract.bodies import name_of
from kvferry.contract.copy_checks import CopyChecks
from kvferry.contract.leader_rules import LEADER_RULES
from kvferry.contract.live import WORKER_SOCKETS, Broken, Connection, Rank, Unavailable, worker_dir
from kvferry.contract.pages import OwnMemory
from kvferry.contract.played import (
    PAGE_BYTES,
    PAGES,
    READY_LIMIT_S,
    WORKERS_LIMIT_S,
    PlayedEngine,
    Target,
    pause,
    refused,
    shown,
    want,
)
from kvferry.contract.rules import Report
from kvferry.wire import Code, Error, Kind

#: Error codes of docs/wire.md that have no name in :class:`Code`.
_MALFORMED, _HELLO_FIRST, _UNCONFIRMED, _STALE_EPOCH = 1, 15, 19, 13
_CODES = {*map(int, Code), _MALFORMED, _HELLO_FIRST, _UNCONFIRMED, _STALE_EPOCH}


class LeaderChecks:
    """The checks. :meth:`run` does all of them, in their order."""

    def __init__(self, target: Target):
        self.report = Report(LEADER_RULES)
        self._engine = PlayedEngine(target)
        #: An id that is lower than those of each check.
        self._began: list[tuple[int, str]] = []

    # Running.

    def run(self) -> Report:
        """Runs all checks.

        Raises:
            Unavailable: kvferry is in use, cannot be reached, or does not become ready.
        """
        try:
            self._prepare()
            idle = self._engine.connect("admin").opened()
            idle.silent = True
            idle_since = time.monotonic()
            self._sessions()
            self._memory()
            if self._engine.scheduler is not None and self._engine.ranks:
                self._copies()
            self._check("silent-client", lambda: self._silent(idle, idle_since))
            self._sums()
        finally:
            self._clean_up()
        return self.report

    def _check(self, rule: str, action: Callable[[], None]) -> bool:
        self._began.append((next(self._engine.ids), rule))
        try:
            action()
        except Broken as broken:
            self.report.broken(rule, str(broken))
            self._start_over()
            return False
        self.report.exercised(rule)
        return True

    def _start_over(self) -> None:
        """Frees what a failed check has left, so that the next one fails for reasons of its own alone."""
        if self._engine.scheduler is None:
            return
        with contextlib.suppress(Broken, Unavailable):
            self._engine.scheduler.spoiled = True
            self._engine.reconnect()
            for slot in list(self._engine.open_slots):
                self._engine.finish(slot)

    def _prepare(self) -> None:
        """Refuses to run where an engine, or pages of one, would suffer."""
        target = self._engine.target
        if not (self._engine.leader_dir / "kvferry.sock").exists():
            raise Unavailable(f"socket_dir is {target.socket_dir}, where no leader listens: start kvferry first")
        with Connection(self._engine.leader_dir, "admin", secrets.token_bytes(16)) as admin:
            answer = admin.opened().ask(Kind.STATUS, 1, wire.Status())
        if not isinstance(answer, wire.StatusAnswer):
            raise Unavailable(f"the leader answers no status: {shown(answer)}")
        used = [rank for rank in answer.ranks if rank.attached]
        if used:
            first = used[0]
            raise Unavailable(
                f"rank {first.rank} of replica {first.replica} has the memory of an engine (worker {first.pid}): stop "
                "the engine, or check a kvferry of your own"
            )
        held = sum(tier.used_pages for tier in answer.tiers)
        if held and not target.discard_pages:
            raise Unavailable(
                f"kvferry holds {held} pages of an engine that is not connected, which a registration of other memory "
                "removes: check a kvferry of your own, or give --discard-pages"
            )
        if any(tier.tier > 2 for tier in answer.tiers) and not target.discard_pages:
            raise Unavailable(
                "kvferry has a disk tier, whose pages may be of an engine and get lost: check a kvferry of your own "
                "without g3, or give --discard-pages"
            )
        ranks = [rank.rank for rank in answer.ranks if rank.replica == target.replica]
        self._engine.count = target.ranks or max(ranks, default=0) + 1
        self._engine.page_tokens = target.page_tokens or answer.hash_tokens or 16
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Waits until the worker of each rank listens: the leader answers before its workers have started."""
        target = self._engine.target
        until = time.monotonic() + WORKERS_LIMIT_S
        for rank in range(self._engine.count):
            directory = worker_dir(target.socket_dir, rank, target.replica)
            while not all((directory / name).exists() for name in WORKER_SOCKETS):
                if time.monotonic() > until:
                    raise Unavailable(
                        f"no worker of rank {rank} of replica {target.replica} listens in {directory} after "
                        f"{WORKERS_LIMIT_S:.0f} s: give the ranks and replica that kvferry was started with"
                    )
                pause()

    def _clean_up(self) -> None:
        with contextlib.suppress(Broken, Unavailable):
            if self._engine.scheduler is not None and not self._engine.scheduler.gone:
                for slot in list(self._engine.open_slots):
                    self._engine.finish(slot)
                self._engine.ask(Kind.RESET, wire.reset(self._engine.namespace))
        for rank in self._engine.ranks:
            rank.close()
        for connection in self._engine.connections:
            connection.close()

    # Sessions.

    def _sessions(self) -> None:
        self._check("welcome", self._welcome)
        self._check("hello-comes-first", self._hello_first)
        self._check(
            "versions-without-overlap",
            lambda: self._refused_hello(Code.UNSUPPORTED_VERSION, version_min=900, version_max=901),
        )
        self._check("unknown-role", lambda: self._refused_hello(Code.INVALID, role="contract"))
        if self._engine.scheduler is None:
            return
        self._check("pong", lambda: want(not self._engine.talk.answered(-1), "pong"))
        self._check("unknown-request", self._unknown_request)
        self._check("unknown-answer", self._unknown_answer)
        self._check("required-bit", self._required)
        self._check("malformed-body", self._malformed)
        self._check("wrong-role", self._wrong_role)

    def _welcome(self) -> None:
        talk = self._engine.connect(engine=self._engine.name)
        answer = talk.hello()
        welcome = answer.body
        if not isinstance(welcome, wire.Welcome):
            raise Broken(f"hello was answered by {shown(welcome)}")
        self._engine.scheduler = talk
        if talk.welcome_version != wire.HELLO_VERSION:
            raise Broken(f"the welcome has version {talk.welcome_version} in its header: always {wire.HELLO_VERSION}")
        if not 1 <= welcome.version <= wire.VERSION:
            raise Broken(f"version is {welcome.version}, this side offered 1 to {wire.VERSION}")
        if min(welcome.heartbeat_ms, welcome.request_credits, welcome.byte_credits) <= 0:
            raise Broken(f"heartbeat_ms, request_credits and byte_credits are above 0: {shown(welcome)}")

    def _hello_first(self) -> None:
        answer = self._engine.connect().ask(Kind.STATUS, 7, wire.Status())
        refused(answer, _HELLO_FIRST, "a status before hello")

    def _refused_hello(self, code: int, **fields: Any) -> None:
        answer = self._engine.connect().hello(**fields)
        refused(answer.body, code, f"hello with {fields}")

    def _unknown_request(self) -> None:
        refused(self._engine.ask(900, {"a": 1}), Code.UNKNOWN_KIND, "kind 900")
        self._engine.talk.answered(-1)

    def _unknown_answer(self) -> None:
        identity = next(self._engine.ids)
        self._engine.talk.send(901, identity, {"a": 1}, deadline_ms=0)
        if self._engine.talk.answered(identity):
            raise Broken("an answer of kind 901 was answered")

    def _required(self) -> None:
        identity = next(self._engine.ids)
        self._engine.talk.send(Kind.STATUS, identity, wire.Status(), required=1 << 15)
        refused(self._engine.talk.answer(identity), Code.UNSUPPORTED, "a status with bit 15 of bytes 20 and 21")
        self._engine.talk.answered(-1)

    def _malformed(self) -> None:
        identity = next(self._engine.ids)
        self._engine.talk.send(Kind.LOOKUP, identity, b"\xc1")
        error = refused(self._engine.talk.answer(identity), _MALFORMED, "a lookup with a body that is no MessagePack")
        if error.retry:
            raise Broken("malformed has retry: true, and the same request never succeeds")
        self._engine.talk.answered(-1)

    def _wrong_role(self) -> None:
        answer = self._engine.ask(Kind.WRITTEN, wire.Written(1))
        want(isinstance(answer, Error), f"written, sent by a scheduler to the leader, was answered by {shown(answer)}")
        self._engine.talk.answered(-1)

    # Memory.

    def _memory(self) -> None:
        ranks = self._engine.count
        shards = self._engine.target.kv_shards or ranks
        content = b"kvferry-contract-" + secrets.token_bytes(16)
        for number in range(ranks):
            memory = OwnMemory(
                pages=PAGES,
                page_tokens=self._engine.page_tokens,
                page_bytes=PAGE_BYTES,
                rank=number,
                ranks=ranks,
                shard=number * shards // ranks,
                content=content,
            )
            self._engine.ranks.append(
                Rank(self._engine.target.socket_dir, self._engine.name, memory, number, self._engine.target.replica)
            )
            self._engine.beside(self._engine.ranks[-1].connection)
        first = self._engine.ranks[0]

        def without_content(registration: dict[str, Any]) -> None:
            del registration["content"]

        def contradiction(registration: dict[str, Any]) -> None:
            registration["groups"][0]["tensors"][0]["page_bytes"] += 1

        def without_proof(registration: dict[str, Any]) -> None:
            registration["nonce"]["bytes"] = secrets.token_bytes(32)

        def is_refused(change: Callable[[dict[str, Any]], None], *codes: int) -> None:
            until = time.monotonic() + READY_LIMIT_S
            answer = first.register(change)
            # A worker whose host memory is not ready yet examines nothing.
            while isinstance(answer, Error) and answer.code not in codes and answer.retry and time.monotonic() < until:
                pause()
                answer = first.register(change)
            want(
                isinstance(answer, Error) and answer.code in codes, f"the registration was answered by {shown(answer)}"
            )

        self._check("register-content", lambda: is_refused(without_content, Code.INVALID, _MALFORMED))
        self._check("register-contradiction", lambda: is_refused(contradiction, Code.INVALID))
        self._check("register-proof", lambda: is_refused(without_proof, Code.INVALID, Code.NOT_READY))
        if not self._check("register", self._engine.register):
            for rank in self._engine.ranks:
                rank.close()
            self._engine.ranks = []

    # Copies.

    def _copies(self) -> None:
        for rule, action in CopyChecks(self._engine).all():
            self._check(rule, action)

    # The end.

    def _silent(self, idle: Connection, since: float) -> None:
        assert idle.welcome is not None
        beats_s = idle.welcome.heartbeat_ms / 1000
        limit_s = 3 * beats_s + 2.0 - (time.monotonic() - since)
        want(idle.ends(max(limit_s, 0.5)), f"a client that sent nothing for {3 * beats_s + 2:.1f} s is still connected")

    def _named(self, answer: wire.Envelope) -> str:
        """Names an answer, and the check that has sent its request."""
        checks = [rule for began, rule in self._began if began < answer.correlation]
        return f"{name_of(answer.kind)} {answer.correlation} of the check {checks[-1] if checks else 'of none'}"

    def _sums(self) -> None:
        connections = self._engine.connections
        left = [envelope for each in connections if not each.spoiled for envelope in each.unread]
        if left:
            first = ", ".join(self._named(each) for each in left[:10])
            self.report.broken("one-answer", f"{len(left)} answers came to no request, or a second time: {first}")
        elif any(connection.answers for connection in connections):
            self.report.exercised("one-answer")
        errors = [error for connection in connections for error in connection.errors]
        for error in errors:
            if error.code not in _CODES or "\n" in error.message or not error.message:
                self.report.broken("errors-typed", shown(error))
            else:
                self.report.exercised("errors-typed")
