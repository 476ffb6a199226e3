"""Times of a real vLLM on the CPU, with kvferry and without, on a model whose steps take 50 ms and more.

``overhead``: an engine with the connector and two without do the same work in turn. The ratio of the two without
shows how much two engines differ by chance; so that one placement of memory does not decide, they are started again.

* No reuse: prompts that neither engine has seen. What is measured beside the model is the cost of the connector.
* Full reuse: the same prompts again. The engine with kvferry has no page of its own, and loads all; the other one
  has them in its own prefix cache. The copies' time, and the time of steps in which nothing else runs, are measured
  apart.

``gain``: the time to the first token of a prompt of 4,000 tokens, computed, loaded from host memory, and from the disk.

Weights are random numbers, and answers are compared: loaded pages give the tokens that computed ones give.
"""

import argparse
import functools
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import make_model
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually
from engine import Engine, config, settled, tokens

#: Deadline of one order of prompts.
LIMIT_S = 600.0
#: Tokens of an answer, in overhead.
ANSWER_TOKENS = 64

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@functools.cache
def model() -> str:
    return str(make_model.make("slow", MODEL))


def engine(socket_dir: Path | None, **extra: Any) -> Engine:
    changes = {"extra": {"verify": 0, **extra}} if socket_dir is not None else {}
    return Engine(
        config(
            socket_dir,
            model=model(),
            load_format="dummy",
            num_gpu_blocks_override=400,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            **changes,
        )
    )


def timed(one: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    before = cpu_s(one)
    done = one.request("timed", within_s=LIMIT_S, prompts=prompts, max_tokens=max_tokens)
    return {**done, "cpu_s": cpu_s(one) - before}


def cpu_s(one: Engine) -> float:
    """CPU time of all threads of an engine's process, from the system."""
    fields = Path(f"/proc/{one.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values: list[float]) -> str:
    text = f"median {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
    if len(values) >= 4:
        quarters = statistics.quantiles(values, n=4)
        text += f", middle half {quarters[0]:.3f} to {quarters[2]:.3f}"
    return text


class CopyLog:
    """The lines in which a worker says how long each copy took."""

    VARIABLES: ClassVar = {"KVFERRY_LOG": "error,kvferry_actors::transfer=debug"}

    def __init__(self, path: Path):
        self._path = path
        self._read = 0

    def loads_s(self) -> float:
        """Seconds of the loads that ended since the last call."""
        with self._path.open() as log:
            log.seek(self._read)
            lines = log.read()
            self._read = log.tell()
        loads = (line for line in lines.splitlines() if "copy ended" in line and "direction=Load" in line)
        return sum(int(re.findall(r"copy_us=(\d+)", line)[0]) for line in loads) / 1e6


#: Ratios and times of a bench, by what they measure.
Found = dict[str, list[float]]


def overhead(rounds: int, starts: int) -> None:
    found: Found = {}
    for start in range(starts):
        overhead_of_start(start, rounds, found)
    print(f"{starts} starts with {rounds} rounds of 6 prompts of 256 tokens and {ANSWER_TOKENS} steps")
    for name, values in found.items():
        print(f"{name}:", spread(values))


def overhead_of_start(start: int, rounds: int, found: Found) -> None:
    """Starts three engines, and lets them do the same work in turn."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        log = Path(folder) / "log"
        copies = CopyLog(log)
        daemon = Daemon(Path(folder) / "s", g2="2GiB", log=log, variables=CopyLog.VARIABLES)
        daemon.start()
        ours, theirs, again = engines = engine(daemon.socket_dir), engine(None), engine(None)
        try:
            daemon.pid()
            for number in range(rounds + 1):
                seed = 1000 * (rounds + 1) * start + 1000 * number
                prompts = [tokens(256, seed=seed + each) for each in range(6)]
                turn = number % len(engines)
                order = engines[turn:] + engines[:turn]
                cold = {id(one): timed(one, prompts, ANSWER_TOKENS) for one in order}
                settled(ours, daemon)
                # The engine with kvferry has no page of its own: every full page is loaded.
                ours.reset()
                warm = {id(one): timed(one, prompts, ANSWER_TOKENS) for one in order}
                loads_s = copies.loads_s()
                assert loads_s > 0, "no load was logged"
                for done in (*cold.values(), *warm.values()):
                    assert done["answers"] == cold[id(ours)]["answers"]
                if number:
                    line = compare(cold, warm, (ours, theirs, again), loads_s, found)
                    print(f"start {start + 1}, round {number}: {line}", flush=True)
        finally:
            for one in engines:
                one.end()
            daemon.kill()


def compare(
    cold: dict[int, Any], warm: dict[int, Any], engines: tuple[Engine, ...], loads_s: float, found: Found
) -> str:
    """Adds a round to what was found; returns it as a line. kvferry is compared with the mean of the two without."""

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    line = []
    for reuse, done in (("no reuse", cold), ("full reuse", warm)):
        ours, *without = (done[id(one)] for one in engines)
        for what, of in (("time", all_s), ("CPU time of the engine", cpu_time_s), ("time of a step", step_s)):
            theirs = [of(each) for each in without]
            add(f"{reuse}, {what}, kvferry / none", of(ours) / statistics.mean(theirs))
            add(f"{reuse}, {what}, none / none", theirs[1] / theirs[0])
        add(f"{reuse}, seconds of a step, none", statistics.mean(map(step_s, without)))
        times = " and ".join(f"{all_s(each):.2f} s" for each in without)
        line.append(f"{reuse} {all_s(ours):.2f} s, without {times}")
    ours, *without = (warm[id(one)] for one in engines)
    theirs_s = statistics.mean(map(all_s, without))
    apart_s = all_s(ours) - ours["waited_s"]
    add("full reuse, time without the wait for copies, kvferry / none", apart_s / theirs_s)
    # Loads end one by one, so that the first request may run a step before the others.
    further_s = (ours["steps"] - without[0]["steps"]) * step_s(ours)
    add("full reuse, time without that wait and further steps, kvferry / none", (apart_s - further_s) / theirs_s)
    add("full reuse, seconds of the wait for copies", ours["waited_s"])
    add("full reuse, seconds of the copies", loads_s)
    add("full reuse, steps more than without", ours["steps"] - without[0]["steps"])
    return "; ".join(line)


def all_s(done: dict[str, Any]) -> float:
    return done["all_s"]


def cpu_time_s(done: dict[str, Any]) -> float:
    return done["cpu_s"]


def step_s(done: dict[str, Any]) -> float:
    """Seconds of a step in which every request generates."""
    return (all_s(done) - max(done["first_s"])) / (ANSWER_TOKENS - 1)


def gain(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        daemon = Daemon(Path(folder) / "s", g2="2GiB", g3="4GiB", g3_dir=Path(folder) / "disk")
        daemon.start()
        ours = engine(daemon.socket_dir, shared_after_reset=True)
        try:
            daemon.pid()
            found: dict[str, list[float]] = {"computed": [], "host memory": [], "disk": [], "own pages": []}
            for number in range(rounds + 1):
                prompt = [tokens(4000, seed=77 + number)]
                answers = []
                for tier, before in (
                    ("computed", lambda: None),
                    ("own pages", lambda: None),
                    ("host memory", ours.reset),
                    ("disk", lambda: from_disk(ours, daemon)),
                ):
                    before()
                    done = timed(ours, prompt, 1)
                    answers.append(done["answers"])
                    if number:
                        found[tier].append(done["first_s"][0])
                    settled(ours, daemon)
                assert all(answer == answers[0] for answer in answers)
            print(f"{rounds} prompts of 4,000 tokens: seconds to the first token")
            for tier, times in found.items():
                ratio = statistics.median(times) / statistics.median(found["computed"])
                print(f"{tier}: {spread(times)}, {ratio:.3f} of a computed one")
        finally:
            ours.end()
            daemon.kill()


def from_disk(ours: Engine, daemon: Daemon) -> None:
    """Leaves the pages on the disk alone."""
    daemon.flush()
    ours.reset()
    command = [PROGRAM, "reset", "--tier", "g2", "--socket-dir", str(daemon.socket_dir)]

    def done() -> bool:
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        return ended.returncode == 0

    eventually("host memory is reset", done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "gain"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=2, help="of the engines, for overhead")
    arguments = parser.parse_args()
    if arguments.what == "overhead":
        overhead(arguments.rounds, arguments.starts)
    else:
        gain(arguments.rounds)


if __name__ == "__main__":
    main()
