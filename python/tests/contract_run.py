"""A run of the contract suite against one connector."""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from contract_engine import ToyEngine
from daemon import eventually

from kvferry.contract.hash_checks import Prompt
from kvferry.contract.peers import Settings
from kvferry.contract.rules import Outcome, Report
from kvferry.contract.script import Script
from kvferry.contract.scripted import ScriptedKvferry

SETTINGS = Settings(heartbeat_ms=200)
#: Rules whose outcome is known at the end of a run alone.
_AT_THE_END = {"hits-used"}


class Run:
    """A scripted kvferry, and the report after it."""

    def __init__(self, socket_dir: Path, kvferry: ScriptedKvferry):
        self.socket_dir = socket_dir
        self.kvferry = kvferry
        self.report: Report | None = None

    @contextlib.contextmanager
    def declared(self, name: str, space: str, tokens: list[int]) -> Iterator[None]:
        """Only this prompt is computed meanwhile."""
        self.kvferry.begin(Prompt(name, space, tuple(tokens)))
        try:
            yield
        finally:
            self.kvferry.end()

    def prompt(self, engine: ToyEngine, name: str, prompt: list[int], salt: str = "") -> int:
        with self.declared(name, f"{engine.model} {salt}", prompt):
            return engine.run(prompt, salt)

    def rounds(self, play: Callable[[int], None], never: Collection[str]) -> int:
        """Plays rounds until the script is over, and every rule is exercised but those that the engine ``never`` shows.

        An engine may pause its lookups or its stores after a failure, so that one round does not show everything.
        Returns the number of rounds.
        """
        numbers = itertools.count()

        def exercised() -> bool:
            play(next(numbers))
            return self._not_seen() <= set(never) and not self.kvferry.events_left

        try:
            eventually("every rule is exercised", exercised)
        except AssertionError as error:
            error.add_note(f"not exercised: {sorted(self._not_seen() - set(never))}")
            error.add_note(f"not played: {self.kvferry.events_left}")
            raise
        return next(numbers)

    def _not_seen(self) -> set[str]:
        return set(self.kvferry.report.named(Outcome.NOT_EXERCISED)) - _AT_THE_END

    @property
    def not_exercised(self) -> set[str]:
        assert self.report is not None
        return set(self.report.named(Outcome.NOT_EXERCISED))

    @property
    def broken(self) -> dict[str, list[str]]:
        assert self.report is not None
        return {name: [each.text for each in self.report.breaks(name)] for name in self.report.named(Outcome.BROKEN)}


@contextlib.contextmanager
def scripted(
    script: Script | None = None, settings: Settings = SETTINGS, *, socket_dir: Path | None = None, **more: Any
) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        socket_dir = socket_dir or Path(directory) / "s"
        kvferry = ScriptedKvferry(socket_dir, settings, Script(()) if script is None else script, **more)
        kvferry.start()
        run = Run(socket_dir, kvferry)
        try:
            yield run
        finally:
            run.report = kvferry.stop()
            print(run.report.as_text())
