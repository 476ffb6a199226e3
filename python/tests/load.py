"""A mixed load for an engine: prompts that share, branch, grow and repeat, several at a time, some of them aborted."""

import random
import time
from dataclasses import dataclass
from typing import Any

#: Tokens of the longest prompt.
PROMPT_MAX = 480
#: Steps of an idle engine in which it must return its pages.
IDLE_STEPS = 2000


@dataclass
class Wanted:
    """One request; ``abort_after``: the number of steps after which its client leaves, None for never."""

    name: str
    tokens: list[int]
    max_tokens: int
    abort_after: int | None = None


def requests(count: int, seed: int, *, aborts: float = 0.0) -> list[Wanted]:
    """Returns requests, equal for equal arguments. ``aborts``: the share of clients that leave early."""
    draw = random.Random(seed)

    def fresh(least: int, most: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(draw.randint(least, most))]

    starts = [fresh(64, 200) for _ in range(3)]
    talks: list[list[int]] = []
    wanted = []
    for number in range(count):
        kind = draw.random()
        talk = draw.choice(talks) if talks else []
        if kind < 0.25 or not talk or len(talk) > PROMPT_MAX - 100:
            talk = draw.choice(starts) + fresh(5, 90)
        elif kind < 0.6:
            talk = talk + fresh(5, 90)
        elif kind < 0.85:
            talk = talk[: draw.randrange(1, len(talk))] + fresh(5, 60)
        talks = [*talks[-11:], talk]
        leaves = draw.randint(1, 40) if draw.random() < aborts else None
        wanted.append(Wanted(f"load-{seed}-{number}", talk, draw.randint(1, 70), leaves))
    return wanted


class Driver:
    """Sends requests to an engine in this process, a number at a time, and runs its steps."""

    def __init__(self, engine: Any, wanted: list[Wanted], sampling: Any, at_a_time: int):
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._left = list(reversed(wanted))
        self._sampling = sampling
        self._at_a_time = at_a_time
        #: Steps after which each running request is aborted.
        self._running: dict[str, int | None] = {}
        self._answers: dict[str, list[int]] = {}
        #: Log-probabilities of the likeliest tokens of each step.
        self._logprobs: dict[str, list[list[tuple[int, float]]]] = {}
        self._aborted: list[str] = []
        self._longest_step_s = self._longest_pause_s = 0.0

    def run(self) -> dict[str, Any]:
        """Returns answers and aborted requests, and the longest step, and the longest pause without any token."""
        preempted = self._preemptions()
        progress_at = time.monotonic()
        while self._left or self._running:
            self._begin()
            begun = time.monotonic()
            outputs = self._engine.step()
            now = time.monotonic()
            self._longest_step_s = max(self._longest_step_s, now - begun)
            if outputs:
                self._longest_pause_s = max(self._longest_pause_s, now - progress_at)
                progress_at = now
            for output in outputs:
                if output.finished and self._running.pop(output.request_id, 0) != 0:
                    (made,) = output.outputs
                    self._answers[output.request_id] = list(made.token_ids)
                    self._logprobs[output.request_id] = [
                        [(token, one.logprob) for token, one in step.items()] for step in made.logprobs
                    ]
            self._abort()
        return {
            "answers": self._answers,
            "logprobs": self._logprobs,
            "aborted": self._aborted,
            "longest_step_s": self._longest_step_s,
            "longest_pause_s": self._longest_pause_s,
            "preemptions": self._preemptions() - preempted,
            "held": self._pages_held(),
        }

    def _begin(self) -> None:
        while self._left and len(self._running) < self._at_a_time:
            wanted = self._left.pop()
            prompt = {"prompt_token_ids": wanted.tokens}
            self._engine.add_request(wanted.name, prompt, self._sampling({"max_tokens": wanted.max_tokens}))
            self._running[wanted.name] = wanted.abort_after

    def _abort(self) -> None:
        for name, after in list(self._running.items()):
            if after is not None:
                self._running[name] = after - 1
                if after <= 1:
                    self._engine.abort_request([name])
                    del self._running[name]
                    self._aborted.append(name)

    def _preemptions(self) -> int:
        for metric in self._engine.get_metrics():
            if metric.name == "vllm:num_preemptions":
                return int(metric.value)
        raise AssertionError("vLLM counts no preemptions")

    def _pages_held(self) -> int:
        """Runs steps until the engine has returned all of its pages; returns how many it has not."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        held = 0
        for _ in range(IDLE_STEPS):
            # One page is vLLM's own placeholder.
            held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            if held == 0:
                break
            if self._core.scheduler.has_requests():
                self._core.step_fn()
            time.sleep(0.01)
        return held


def timed(engine: Any, prompts: list[list[int]], sampling: Any) -> dict[str, Any]:
    """Sends prompts at once. Returns seconds to the first token of each and to the last of all, and tokens.

    ``steps``: the number of steps that gave tokens. ``waited_s``: the time of the others, in which nothing ran but
    copies, or a chunk of a prompt.
    """
    begun = time.monotonic()
    first: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(f"timed-{number}", {"prompt_token_ids": prompt}, sampling)
    steps, waited_s = 0, 0.0
    while engine.has_unfinished_requests():
        step_begun = time.monotonic()
        outputs = engine.step()
        if outputs:
            steps += 1
        else:
            waited_s += time.monotonic() - step_begun
        for output in outputs:
            first.setdefault(output.request_id, time.monotonic() - begun)
            answers[output.request_id] = list(output.outputs[0].token_ids)
    names = [f"timed-{number}" for number in range(len(prompts))]
    return {
        "first_s": [first[name] for name in names],
        "all_s": time.monotonic() - begun,
        "steps": steps,
        "waited_s": waited_s,
        "answers": [answers[name] for name in names],
    }
