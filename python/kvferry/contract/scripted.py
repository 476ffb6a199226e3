"""A scripted kvferry for one connector: a leader and workers in a directory, and the report on the connector."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from kvferry.contract.checks import Checks
from kvferry.contract.hash_checks import Prompt
from kvferry.contract.leader import Leader
from kvferry.contract.peers import Endpoint, Settings
from kvferry.contract.rules import Report
from kvferry.contract.script import Event, Script
from kvferry.contract.server import Server
from kvferry.contract.worker import Tickets, Worker

#: Longest wait at the end for what the connector still owes.
OWED_LIMIT_S = 6.0
#: Most tokens of a declared prompt.
TOKENS_MAX = 1 << 20


class ScriptedKvferry:
    """A leader and ``settings.ranks`` workers below ``socket_dir``, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        socket_dir: Path,
        settings: Settings | None = None,
        script: Script | None = None,
        *,
        lies: frozenset[str] = frozenset(),
        record: Callable[[dict[str, Any]], None] | None = None,
        owed_limit_s: float = OWED_LIMIT_S,
    ):
        """``record``: receives each message, for a file. ``lies``: mistakes of the leader, for tests of its checks."""
        self.settings = settings or Settings()
        self._checks = Checks()
        self._owed_limit_s = owed_limit_s
        self._stopped = False
        self._server = server = Server(self.settings, self._checks, record, lies)
        self._tickets: list[Tickets] = []
        workers: list[Worker] = []
        for rank in range(self.settings.ranks):
            directory = socket_dir / f"worker-0-{rank}"
            tickets = Tickets(server, directory / "fds.sock")
            worker = Worker(server, self._checks.report, self._checks, rank, self.settings.ranks, tickets)
            worker.peers_of_other_ranks = lambda: workers
            workers.append(worker)
            self._tickets.append(tickets)
            server.endpoints.append(Endpoint(f"worker-0-{rank}", directory, worker))
        self._leader = Leader(server, workers, self._checks, script or Script())
        server.endpoints.append(Endpoint("leader", socket_dir / "leader", self._leader))
        self._checks.serve(server, workers, self._leader)
        self._socket_dir = socket_dir

    def start(self) -> None:
        """Listens.

        Raises:
            OSError: the directory cannot be used, or another process listens there.
        """
        self._socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server.start(self._tickets)

    def begin(self, prompt: Prompt) -> None:
        """Declares that lookups from now on are of this prompt."""
        self._server.call(lambda: self._checks.hashes.begin(prompt))

    def end(self) -> None:
        """Ends :meth:`begin`."""
        self._server.call(lambda: self._checks.hashes.begin(None))

    def restart(self) -> None:
        """Plays the restart of the leader."""
        self._server.call(self._leader.restart)

    def drop_leader(self) -> None:
        """Closes the connections of engines to the leader."""
        self._server.call(self._leader.drop)

    def drop_worker(self) -> None:
        """Closes the connections of the ranks."""
        self._server.call(self._leader.drop_worker)

    def add(self, event: Event) -> None:
        """Adds an event to the script."""
        self._server.call(lambda: self._leader.script.add(event))

    @property
    def events_left(self) -> list[Event]:
        """The events of the script that were not played yet."""
        return self._server.call(self._leader.script.left)

    @property
    def report(self) -> Report:
        """What was seen so far."""
        if self._stopped:
            return self._checks.report
        return self._server.call(lambda: self._checks.report)

    def waits(self) -> bool:
        """Whether the connector still owes something, such as the finish of a slot."""
        return self._server.call(self._checks.waits)

    @property
    def copies(self) -> int:
        """Loads and stores that are under way. An engine that drops its own cache meanwhile cancels the stores."""
        return self._server.call(lambda: self._leader.copies)

    def stop(self) -> Report:
        """Waits for what the connector still owes, within a limit; stops, and returns the report.

        Raises:
            RuntimeError: the thread of the sockets has failed, which is a defect of these checks.
        """
        if self._stopped:
            return self._checks.report
        self._stopped = True
        until = time.monotonic() + self._owed_limit_s
        while self.waits() and time.monotonic() < until:
            time.sleep(0.05)
        self._server.call(lambda: self._checks.finish(self._server.peers()))
        self._server.stop()
        for tickets in self._tickets:
            tickets.close()
        return self._checks.report


class Driver:
    """Reads what the author's driver says: a JSON object a line, each answered by a line."""

    def __init__(self, kvferry: ScriptedKvferry):
        self._kvferry = kvferry
        self.stopped = False

    def say(self, line: str) -> dict[str, Any]:
        """Carries out one line, and returns its answer."""
        try:
            said = json.loads(line)
            if not isinstance(said, dict):
                raise ValueError("a line is a JSON object")
            return self._do(said)
        except ValueError as error:
            return {"ok": False, "problem": str(error)}

    def _do(self, said: dict[str, Any]) -> dict[str, Any]:
        kvferry, do = self._kvferry, said.get("do")
        match do:
            case "begin":
                kvferry.begin(_prompt(said))
            case "end":
                kvferry.end()
            case "event":
                kvferry.add(Event.of(_event(said)))
            case "restart":
                kvferry.restart()
            case "drop":
                kvferry.drop_leader()
            case "drop_worker":
                kvferry.drop_worker()
            case "report":
                return {"ok": True, "report": kvferry.report.as_dict()}
            case "stop":
                self.stopped = True
            case _:
                known = "begin, end, event, restart, drop, drop_worker, report, stop"
                raise ValueError(f"do is {do!r}: give one of {known}")
        return {"ok": True}

    def run(self, lines: TextIO, answers: TextIO) -> None:
        """Carries out all lines, to the end of the input or a line that stops."""
        for line in lines:
            if not line.strip():
                continue
            print(json.dumps(self.say(line)), file=answers, flush=True)
            if self.stopped:
                return


def _event(said: dict[str, Any]) -> dict[str, Any]:
    event = said.get("event")
    if not isinstance(event, dict):
        raise ValueError(f"event is {event!r}: give an object with on, number and do")
    return event


def _prompt(said: dict[str, Any]) -> Prompt:
    name, space, tokens = said.get("prompt"), said.get("space", ""), said.get("tokens")
    if not isinstance(name, str) or not name:
        raise ValueError(f"prompt is {name!r}: give the prompt a name")
    if not isinstance(space, str):
        raise ValueError(f"space is {space!r}: give a text, the same for prompts that may share pages")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        raise ValueError("tokens: give the numbers of the prompt's tokens, at least one")
    if len(tokens) > TOKENS_MAX:
        raise ValueError(f"tokens: {len(tokens)} of them, at most {TOKENS_MAX}")
    return Prompt(name, space, tuple(tokens))
