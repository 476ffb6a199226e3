"""Test that the reference engine keeps every rule of the contract for connectors."""

import json
import subprocess
from pathlib import Path
from typing import Any

from contract_engine import PAGE_TOKENS, tokens
from contract_run import Run, scripted
from daemon import PROGRAM, TIMEOUT_S, environment

from kvferry.contract.peers import Settings
from kvferry.contract.script import DEFAULT, Event, Script

#: Rules that this engine never exercises, and why.
NEVER = {"one-store-of-a-page": "each slot has one store"}
RANKS = 2
#: Pages of its own, so that most of what it computed before is loaded. Prompts of the built-in workload are longer.
DEVICE_PAGES = 64
HEARTBEAT_MS = 1000


def replay(run: Run, *flags: str) -> dict[str, Any]:
    """Runs the engine to its end; returns its report. Every byte that it loads is compared with what it computes."""
    command = [PROGRAM, "replay", "--socket-dir", str(run.socket_dir), "--ranks", str(RANKS)]
    command += ["--g1-pages", str(DEVICE_PAGES), "--json", "-", "--quiet", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def declared(
    run: Run, folder: Path, name: str, prompt: list[int], *, model: str = "tiny", again_ms: int | None = None
) -> None:
    """Runs the engine for one prompt, and for the same one again after some time.

    A page of the prompt is a block of a trace, whose number stands for its tokens.
    """
    pages = [prompt[at : at + PAGE_TOKENS] for at in range(0, len(prompt), PAGE_TOKENS)]
    numbers = [int.from_bytes(page, "big") for page in pages]
    trace = folder / "trace.jsonl"
    times = [0] if again_ms is None else [0, again_ms]
    request = {"input_length": len(prompt) + 1, "output_length": 1, "hash_ids": numbers}
    trace.write_text("".join(json.dumps({"timestamp": at, **request}) + "\n" for at in times))
    sizes = ["--trace-block-tokens", str(PAGE_TOKENS), "--engine-page-tokens", str(PAGE_TOKENS)]
    with run.declared(name, f"model {model}", prompt):
        replay(run, str(trace), *sizes, "--model", model)


def test_the_reference_engine_keeps_the_contract(tmp_path: Path) -> None:
    script = Script([*DEFAULT, Event("finish", 12, "drop")])
    settings = Settings(ranks=RANKS, request_credits=3, heartbeat_ms=HEARTBEAT_MS)
    with scripted(script, settings) as run:
        played = replay(run, "--requests", "30", "--concurrency", "4")
        assert played["tokens"]["hit_g2"] > 0
        assert played["waits"]["abandoned"] > 0, "pages that were refused as busy were taken back"
        abcd = tokens("a", "b", "c", "d")
        for number, prompt in enumerate((abcd, tokens("x", "b", "c", "d"), abcd)):
            if number == 2:
                # Nothing goes beside this prompt, so that its pages that the load leaves out are computed and stored.
                script.add(Event("load", script.received("load") + 1, "half"))
            declared(run, tmp_path, f"prompt {number}", prompt)
        # Idle for more than three heartbeats.
        declared(run, tmp_path, "of another model", abcd, model="deepseek-v3-mla", again_ms=7 * HEARTBEAT_MS // 2)
    assert run.broken == {}
    assert run.not_exercised == set(NEVER)
    assert run.report is not None
    assert not [note for note in run.report.notes if "not played" in note]
