"""Test that the connector for vLLM, in a real engine, keeps every rule of the contract for connectors."""

import itertools
import tempfile
from pathlib import Path

from daemon import eventually
from engine import PAGE_TOKENS, Engine, config, said, tokens

from kvferry.contract.hash_checks import Prompt
from kvferry.contract.peers import Settings
from kvferry.contract.rules import Outcome
from kvferry.contract.script import DEFAULT, Event, Script
from kvferry.contract.scripted import ScriptedKvferry

BASE = tokens(PAGE_TOKENS * 5 + 7, seed=41)


def prompts(number: int) -> list[list[int]]:
    """Prompts of which one has the pages of another one behind a new beginning, and some continue others."""
    base = tokens(PAGE_TOKENS * 5 + 7, seed=100 + number)
    moved = tokens(PAGE_TOKENS, seed=200 + number) + base[PAGE_TOKENS:]
    longer = base[: PAGE_TOKENS * 5] + tokens(PAGE_TOKENS * 3, seed=300 + number)
    return [base, base[: PAGE_TOKENS * 3] + tokens(PAGE_TOKENS * 2 + 5, seed=400 + number), moved, base, longer, moved]


def test_the_connector_for_vllm_keeps_the_contract() -> None:
    halves = [Event("load", number, "half") for number in range(6, 60, 3)]
    script = Script([*DEFAULT, Event("finish", 12, "drop"), *halves])
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        socket_dir = Path(directory) / "s"
        kvferry = ScriptedKvferry(socket_dir, Settings(request_credits=3, heartbeat_ms=1000), script)
        kvferry.start()
        engine = Engine(config(socket_dir, extra={"load_timeout_ms": 2000, "shared_after_reset": True}))
        answers: dict[tuple[int, ...], object] = {}
        numbers = itertools.count()

        def settled() -> bool:
            engine.request("step")
            # A store that is under way at the reset is cancelled, and later prompts find none of its pages.
            return not kvferry.waits() and not kvferry.copies

        def run(name: str, prompt: list[int], salt: str = "") -> None:
            kvferry.begin(Prompt(name, f"model {salt}", tuple(prompt)))
            answer = said(engine.generate({"tokens": prompt, "salt": salt}, max_tokens=4))
            # A request that is repeated later would count as one of the next prompt.
            eventually("nothing is owed", settled)
            kvferry.end()
            assert answers.setdefault(tuple(prompt), answer) == answer, f"{name} has another result than before"
            # The next prompt finds nothing on the device.
            engine.reset()

        def exercised() -> bool:
            """Stores pause after one that was refused as busy, so that one round may not show everything."""
            number = next(numbers)
            for at, prompt in enumerate(prompts(number)):
                run(f"prompt {number}.{at}", prompt)
            engine.generate(*prompts(number), max_tokens=4)
            engine.reset()
            # Known at the end alone.
            return set(kvferry.report.named(Outcome.NOT_EXERCISED)) <= {"hits-used"}

        try:
            for salt in ("one", "two"):
                run(f"salted {salt}", BASE, salt)
            eventually("every rule is exercised", exercised)
            eventually("nothing is owed", settled)
            report = kvferry.stop()
        finally:
            engine.end()
            kvferry.stop()
            print(kvferry.report.as_text())
    assert {name: report.breaks(name) for name in report.named(Outcome.BROKEN)} == {}
    assert report.named(Outcome.NOT_EXERCISED) == []
