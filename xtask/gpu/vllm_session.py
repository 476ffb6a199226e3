"""vLLM with kvferry beside it, and the results of a run: what ``vllm_engine.py`` is made of."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Defaults of variables of vLLM, set before its import in :class:`Engine`.
VARIABLES = {
    # The checks read the scheduler's counts, so that the engine runs in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # Without a network, and without compiling a sampler: every token is the likeliest one.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update({name: os.environ.get(name, value) for name, value in VARIABLES.items()})

#: Deadline of every wait. Only a hanging process takes that long.
TIMEOUT_S = 60.0
#: Expectations that were not met.
failed: list[str] = []


def row(text: str) -> None:
    """Prints one line of the results."""
    print(f"vllm {text}", flush=True)


def expect(met: bool, rule: str, found: Any) -> None:
    """Reports an expectation that is not met. The run goes on, because more rows show more of a fault."""
    if not met:
        failed.append(rule)
        row(f"FAILED: {rule}: found {found}")


def eventually(what: str, check: Callable[[], Any]) -> Any:
    """Waits until ``check`` returns a true value, and returns that value."""
    until = time.monotonic() + TIMEOUT_S
    while not (found := check()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return found


class Daemon:
    """``kvferry up``."""

    def __init__(self, program: Path, folder: Path, g2: str):
        self.socket_dir = folder / "s"
        self._program = program
        # A setting in the environment would change what is checked.
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        command = [program, "up", "--ranks", "1", "--g2", g2, "--socket-dir", self.socket_dir]
        self._up = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=self._variables)

    def status(self) -> dict[str, Any]:
        """Returns the output of ``kvferry status --json``; empty while no leader answers."""
        if self._up.poll() is not None:
            raise RuntimeError(f"kvferry up ended with {self._up.returncode}: see its log above")
        command = [self._program, "status", "--json", "--socket-dir", self.socket_dir]
        done = subprocess.run(command, env=self._variables, capture_output=True, text=True, timeout=TIMEOUT_S)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def pages(self) -> int:
        """Returns how many pages the host memory holds."""
        return self.status()["tiers"][0]["page_states"]["ready"]

    def poison(self) -> None:
        """Changes the sign of every number in the host memory, which makes none infinite (bfloat16)."""
        depots = [
            path
            for path in Path(f"/proc/{self._up.pid}/fd").iterdir()
            if os.readlink(path).startswith("/memfd:kvferry-depot")
        ]
        expect(len(depots) == 1, "one depot is to be poisoned", len(depots))
        for path in depots:
            # src/memory/depot.rs describes where the pages are.
            depot = np.memmap(path, np.uint8, "r+")
            page_bytes = int(depot[24:32].view("<u8")[0])
            stride = -(-page_bytes // 64) * 64
            slots = (depot.size - 2 * 4096) // (80 + stride)
            pages_at = -(-(4096 + slots * 80) // 4096) * 4096
            depot[pages_at + 1 :: 2] ^= 0x80

    def stop(self) -> int:
        """Ends kvferry in order, and returns its exit code."""
        self._up.terminate()
        return self._up.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Ends kvferry in any state."""
        self._up.kill()
        self._up.wait(TIMEOUT_S)


@contextlib.contextmanager
def running(program: Path, g2: str) -> Iterator[Daemon]:
    """A running daemon, which leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        daemon = Daemon(program, Path(folder), g2)
        try:
            eventually("a leader answers", daemon.status)
            yield daemon
        finally:
            daemon.kill()


@dataclass(frozen=True)
class Answer:
    """Tokens, for each the likeliest ones with their log-probabilities, and how many tokens of the prompt were hits."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    cached: int

    def equals(self, other: "Answer") -> bool:
        """Whether tokens and log-probabilities are equal to the last bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)

    def beside(self, other: "Answer") -> str:
        """Says in short how this answer differs from another one."""
        if self.equals(other):
            return "bits"
        pairs = zip(self.tokens, other.tokens, strict=True)
        same = next((at for at, (one, two) in enumerate(pairs) if one != two), len(self.tokens))
        # Behind the first other token the texts differ, and nothing can be compared.
        both = list(zip(self.logprobs, other.logprobs, strict=True))[: same + 1]
        apart = [abs(value - dict(two)[token]) for one, two in both for token, value in one if token in dict(two)]
        return f"{same} of {len(self.tokens)} tokens, log-probabilities within {max(apart, default=0.0):.4f}"


class Engine:
    """``vllm.LLM`` in this process, with one request or several at a time."""

    def __init__(self, model: Path, daemon: Daemon | None, extra: dict[str, Any], **changes: Any):
        from vllm import LLM

        wanted: dict[str, Any] = {
            "model": str(model),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            **{name: value for name, value in changes.items() if value is not None},
        }
        if daemon:
            # A short stall of the machine must not turn a hit into a miss.
            settings = {"socket_dir": str(daemon.socket_dir), "lookup_timeout_ms": 30_000, **extra}
            wanted["kv_transfer_config"] = {
                "kv_connector": "KvferryConnector",
                "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings,
            }
        self.daemon = daemon
        self._llm = LLM(**wanted)
        self._core = self._llm.llm_engine.engine_core.engine_core
        if daemon:
            eventually("lookups are served", lambda: daemon.status().get("ready"))

    def generate(
        self, prompts: list[list[int]], count: int = 16, logprobs: int | None = 5, **kvferry: Any
    ) -> list[Answer]:
        """Generates ``count`` tokens for each prompt. ``kvferry`` has parameters of requests to the connector."""
        from vllm import SamplingParams

        parameters = {"kv_transfer_params": {"kvferry": kvferry}} if kvferry else None
        sampling = SamplingParams(
            temperature=0, max_tokens=count, logprobs=logprobs, ignore_eos=True, detokenize=False, extra_args=parameters
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [_answer(output) for output in self._llm.generate(given, sampling, use_tqdm=False)]

    def timed(self, prompts: list[list[int]], count: int = 1) -> tuple[float, list[Answer]]:
        """Returns milliseconds until all answers are there, and the answers."""
        begun = time.perf_counter()
        answers = self.generate(prompts, count, None)
        return (time.perf_counter() - begun) * 1e3, answers

    def drain(self) -> None:
        """Runs idle steps, as a serving engine does by itself, until every store is over."""

        def over() -> bool:
            if self._core.scheduler.has_requests():
                self._core.step_fn()
                return False
            return self.daemon is None or not self.daemon.status()["copies_under_way"]

        eventually("stores are over", over)

    def reset(self) -> None:
        """Empties the engine's own cache, and leaves kvferry's pages as they are."""
        self.drain()
        eventually("the prefix cache is reset", lambda: self._llm.llm_engine.reset_prefix_cache(False, False))

    def loaded(self) -> int:
        """Returns how many tokens vLLM counts as loaded by the connector."""
        name = "vllm:external_prefix_cache_hits"
        return int(sum(metric.value for metric in self._llm.get_metrics() if metric.name == name))

    @property
    def _verification(self) -> Any:
        return self._core.scheduler.connector._scheduler.verification

    def verified(self) -> np.ndarray:
        """Returns how many loaded pages were right, could not be verified, and were wrong."""
        found = self._verification
        return np.array([found.verified_pages, found.unverified_pages, found.verify_mismatches])

    @contextlib.contextmanager
    def unverified(self) -> Iterator[None]:
        """Uses pages as they are loaded."""
        self._verification._must_check = lambda copy: False
        try:
            yield
        finally:
            del self._verification._must_check


def _answer(output: Any) -> Answer:
    (made,) = output.outputs
    logprobs = [sorted((token, one.logprob) for token, one in step.items()) for step in made.logprobs or []]
    return Answer(list(made.token_ids), logprobs, output.num_cached_tokens)


def beside(answers: list[Answer], others: list[Answer]) -> list[str]:
    """Says in short how each answer differs from its other one."""
    return [one.beside(two) for one, two in zip(answers, others, strict=True)]


def tokens(count: int, seed: int, below: int = 500) -> list[int]:
    """Returns a prompt of this many tokens, equal for equal seeds."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, below) for _ in range(count)]


def machine() -> str:
    """Describes device and versions."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    return f"{current_platform.get_device_name()}, vLLM {vllm.__version__}, torch {torch.__version__}"
