"""Times of a real vLLM on the CPU, with kvferry and without, on a model whose steps take 50 ms and more.

``overhead``: two engines, one with the connector and one without, do the same work in turn.

* No reuse: prompts that neither engine has seen. What is measured beside the model is the cost of the connector.
* Full reuse: the same prompts again. The engine with kvferry has no page of its own, and loads all; the other one
  has them in its own prefix cache.

``gain``: the time to the first token of a prompt of 4,000 tokens, computed, loaded from host memory, and from the disk.

Weights are random numbers, and answers are compared: loaded pages give the tokens that computed ones give.
"""

import argparse
import functools
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import make_model
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually
from engine import Engine, config, settled, tokens

#: Deadline of one order of prompts.
LIMIT_S = 600.0

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
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


def overhead(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        daemon = Daemon(Path(folder) / "s", g2="2GiB")
        daemon.start()
        ours, theirs = engine(daemon.socket_dir), engine(None)
        try:
            daemon.pid()
            ratios: dict[tuple[str, str], list[float]] = {}
            for number in range(rounds + 1):
                prompts = [tokens(256, seed=1000 * number + each) for each in range(6)]
                order = (ours, theirs) if number % 2 else (theirs, ours)
                cold = {id(one): timed(one, prompts, 24) for one in order}
                settled(ours, daemon)
                # The engine with kvferry has no page of its own: every full page is loaded.
                ours.reset()
                warm = {id(one): timed(one, prompts, 24) for one in order}
                for one in order:
                    assert warm[id(one)]["answers"] == cold[id(one)]["answers"] == cold[id(ours)]["answers"]
                if number == 0:
                    continue
                line = []
                for reuse, done in (("no reuse", cold), ("full reuse, copies included", warm)):
                    for what, field in (("time", "all_s"), ("CPU time of the engine", "cpu_s")):
                        with_it, without = done[id(ours)][field], done[id(theirs)][field]
                        ratios.setdefault((reuse, what), []).append(with_it / without)
                        line.append(f"{reuse}, {what}: {with_it:.2f} s / {without:.2f} s")
                print(f"round {number}:", "; ".join(line), flush=True)
            print(f"{rounds} rounds of 6 prompts of 256 tokens and 24 steps, kvferry / none")
            for (reuse, what), values in ratios.items():
                print(f"{reuse}, {what}:", spread(values))
        finally:
            ours.end()
            theirs.end()
            daemon.kill()


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
    arguments = parser.parse_args()
    {"overhead": overhead, "gain": gain}[arguments.what](arguments.rounds)


if __name__ == "__main__":
    main()
