"""vLLM with kvferry on one GPU: checks that loaded pages are right, and measures how long prompts take.

Usage, with the package kvferry in PYTHONPATH, and vLLM 0.32 with CUDA:

  vllm_engine.py --program PATH/kvferry check llama|gemma3 [--layout auto|engine]
  vllm_engine.py --program PATH/kvferry figures [--layout auto|engine|none] [--rounds 5]

``check`` compares answers from loaded pages with those from vLLM's own cache on the device, to the last bit.
``figures`` measures a model of the shape of Llama 3.1 8B. Both start kvferry themselves, and need no network. Standard
output has the results, standard error the logs. The exit code is 0 if every expectation is met.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import vllm_models
from vllm_session import Answer, Daemon, Engine, beside, expect, failed, machine, row, running, tokens

#: A request that neither loads nor stores pages.
OFF = {"load": False, "store": False}
#: Tokens of the prompts of ``check``, and how many of the first prompt's tokens another prompt begins with.
PROMPTS, BRANCH_TOKENS = (300, 377, 260, 40, 900), 160
#: Of ``figures``: requests that decode at once, and tokens of each one's prompt and answer.
DECODING, DECODING_PROMPT, DECODING_TOKENS = 16, 1024, 192
#: Numbers the prompts of ``figures``, so that none has been stored before.
seeds = itertools.count(1000)


def check(options: argparse.Namespace, folder: Path) -> None:
    """Compares answers from loaded pages with those of the device's own cache, and finds poisoned pages."""
    model = vllm_models.small(options.model, folder)
    extra = {"layout": options.layout, "verify": 100, "shared_after_reset": True, "store_pages_percent": 100}
    limits = {"gpu_memory_utilization": options.memory or 0.3, "num_gpu_blocks_override": 1024, "max_model_len": 2048}
    with running(options.program, options.g2 or "1GiB") as daemon:
        engine = Engine(model, daemon, extra, max_num_seqs=16, block_size=options.block_size, **limits)
        row(f"check {options.model}, layout {options.layout}: {machine()}")
        compare(engine, daemon)
        expect((code := daemon.stop()) == 0, "kvferry ends with 0", code)


def compare(engine: Engine, daemon: Daemon) -> None:
    """Compares. A computed prompt and a hit may differ in bits, because their passes differ in shape."""
    # No two have a common beginning: pages that another prompt has stored come from a pass of another shape.
    prompts = [tokens(count, seed) for seed, count in enumerate(PROMPTS, 1)]
    branch = prompts[0][:BRANCH_TOKENS] + tokens(100, 100)

    def alone(prompt: list[int], **kvferry: Any) -> Answer:
        return engine.generate([prompt], **kvferry)[0]

    def fresh(prompt: list[int], **kvferry: Any) -> Answer:
        engine.reset()
        return alone(prompt, **kvferry)

    cold = [fresh(prompt, **OFF) for prompt in prompts]
    device = []
    for prompt in prompts:
        fresh(prompt, **OFF)
        device.append(alone(prompt, **OFF))
    again = [fresh(prompt, **OFF) for prompt in prompts]
    fresh(prompts[0], **OFF)
    branched = alone(branch, **OFF)
    twice = [one.beside(two) for one, two in zip(again, cold, strict=True)]
    row(f"without kvferry: computed twice: {twice}; a hit on the device and computed: {beside(device, cold)}")
    expect(set(twice) == {"bits"}, "vLLM repeats its own answers to the last bit, or none can be compared", twice)
    expect(daemon.pages() == 0, "requests with store = false store no page", daemon.pages())

    # Each prompt alone, so that no stored page depends on a batch.
    for prompt in prompts:
        fresh(prompt, load=False)
    engine.drain()
    row(f"stored: {daemon.pages()} pages")

    warm, counts = [], []
    hits = engine.loaded()
    for prompt in prompts:
        before = engine.verified()
        warm.append(fresh(prompt, store=False))
        counts.append(engine.verified() - before)
    cached, hits, total = [each.cached for each in warm], engine.loaded() - hits, sum(counts).tolist()
    row(f"loaded by kvferry and a hit on the device: {beside(warm, device)}; and computed: {beside(warm, cold)}")
    row(f"loaded by kvferry: {cached} tokens; verified pages right, unknown, wrong: {total}")
    expect(
        set(beside(warm, device)) == {"bits"}, "loaded pages give the bits of a hit on the device", beside(warm, device)
    )
    expect(cached == [each.cached for each in device], "kvferry loads what the device would have", cached)
    expect(hits == sum(cached) > 0, "vLLM counts every cached token as loaded by kvferry", hits)
    expect(total[0] > 0 and total[1:] == [0, 0], "every loaded page is verified, and right", total)

    answer = fresh(branch, store=False)
    row(
        f"a branch after {BRANCH_TOKENS} tokens and a hit on the device: {answer.beside(branched)}; "
        f"cached {answer.cached} (device: {branched.cached})"
    )
    # With windows, vLLM's own cache may lack the pages before the branch, and computes what kvferry loads.
    if answer.cached == branched.cached:
        expect(answer.equals(branched), "a branch has the bits of a hit on the device", answer.beside(branched))
    engine.reset()
    hits = engine.loaded()
    together = engine.generate(prompts, store=False)
    hits = engine.loaded() - hits
    row(f"all at once and computed, each alone: {beside(together, cold)}; {hits} tokens loaded")
    expect(hits == sum(cached), "prompts at once load as many tokens as one after another", hits)

    engine.reset()
    daemon.poison()
    before = engine.verified()
    answer = fresh(prompts[0], store=False)
    found = (engine.verified() - before).tolist()
    row(f"poisoned, verified, and computed: {answer.beside(cold[0])}; pages right, unknown, wrong: {found}")
    expect(found == [0, 0, sum(counts[0])], f"all {sum(counts[0])} loaded pages are found wrong", found)
    expect(answer.tokens == cold[0].tokens, "an answer without the poisoned pages", answer.beside(cold[0]))
    with engine.unverified():
        hits = engine.loaded()
        answer = fresh(prompts[-1], store=False)
        hits = engine.loaded() - hits
    row(f"poisoned, unverified, and a hit on the device: {answer.beside(device[-1])}; {hits} tokens loaded")
    expect(hits == cached[-1], "poisoned pages are loaded while nothing verifies them", hits)
    expect(answer.tokens != device[-1].tokens, "poisoned pages change the answer", answer.beside(device[-1]))


def figures(options: argparse.Namespace, folder: Path) -> None:
    """Measures prompts and decoding with made-up weights."""
    config = json.loads(options.config.read_text()) if options.config else vllm_models.LLAMA_8B
    model = vllm_models.described(folder, config)
    with contextlib.ExitStack() as stack:
        daemon = None
        if options.layout != "none":
            daemon = stack.enter_context(running(options.program, options.g2 or "20GiB"))
        engine = Engine(
            model,
            daemon,
            {"layout": options.layout},
            load_format="dummy",
            block_size=options.block_size,
            gpu_memory_utilization=options.memory or 0.6,
            max_model_len=max(*options.tokens, DECODING_PROMPT) + 512,
            max_num_batched_tokens=8192,
            max_num_seqs=64,
        )
        name = options.config or "the shape of Llama 3.1 8B"
        row(f"figures, {name}, layout {options.layout}: {machine()}")
        row(f"milliseconds to the first token: median (min..max) of {options.rounds} rounds")
        row(f"{'tokens':>8} {'computed':>24} {'hit on the device':>24} {'loaded by kvferry':>24} {'MB':>7}")
        # Kernels are compiled and tuned by shape.
        for size in options.tokens:
            prompt_times(engine, size, 1, config)
        decoding(engine, 1, config)
        for size in options.tokens:
            took, cached = prompt_times(engine, size, options.rounds, config)
            megabytes = f"{cached * vllm_models.kv_bytes_per_token(config) / 1e6:.0f}" if daemon else "-"
            row(f"{size:>8} " + " ".join(f"{spread(each):>24}" for each in took) + f" {megabytes:>7}")
        steps = decoding(engine, options.rounds, config)
        rate = DECODING / statistics.median(steps) * 1e3
        turns = f"{options.rounds} turns of {DECODING} requests of {DECODING_TOKENS} tokens"
        row(f"decoding, {turns}: {spread(steps)} ms a step, {rate:.0f} tokens/s")
        if daemon:
            engine.drain()
            row(f"stored: {daemon.pages()} pages")
            expect((code := daemon.stop()) == 0, "kvferry ends with 0", code)


def prompt_times(engine: Engine, size: int, rounds: int, config: dict[str, Any]) -> tuple[list[list[float]], int]:
    """Returns milliseconds of each round, computed, as a hit on the device, and loaded; and the loaded tokens."""
    computed, hit, loaded, cached = [], [], [], 0
    for _ in range(rounds):
        prompt = tokens(size, next(seeds), config["vocab_size"])
        engine.reset()
        computed.append(engine.timed([prompt])[0])
        engine.drain()
        took, (device,) = engine.timed([prompt])
        hit.append(took)
        if engine.daemon:
            engine.reset()
            took, (answer,) = engine.timed([prompt])
            loaded.append(took)
            cached = answer.cached
            expect(cached == device.cached, "kvferry loads what the device would have", cached)
    return [computed, hit, loaded], cached


def decoding(engine: Engine, turns: int, config: dict[str, Any]) -> list[float]:
    """Returns milliseconds of a step in each turn. New prompts begin it, whose stores may run beside the steps."""
    steps = []
    for _ in range(turns):
        engine.reset()
        prompts = [tokens(DECODING_PROMPT, next(seeds), config["vocab_size"]) for _ in range(DECODING)]
        engine.timed(prompts)
        # The prompts are hits on the device, so that nearly all of this is decoding.
        steps.append(engine.timed(prompts, DECODING_TOKENS)[0] / DECODING_TOKENS)
    return steps


def spread(values: list[float]) -> str:
    """Returns median, minimum and maximum."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})" if values else "-"


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="the program kvferry")
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("check", help="compare answers, and poison host memory")
    checks.add_argument("model", choices=sorted(vllm_models.SMALL))
    checks.add_argument("--layout", choices=("auto", "engine"), default="auto", help="of KV memory (default: auto)")
    measures = commands.add_parser("figures", help="measure prompts and decoding")
    measures.add_argument("--layout", choices=("auto", "engine", "none"), default="auto", help="none: without kvferry")
    measures.add_argument("--rounds", type=int, default=5)
    measures.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384], help="lengths of the prompts")
    measures.add_argument("--config", type=Path, help="config.json of another model with full attention in each layer")
    for command in (checks, measures):
        command.add_argument("--g2", help="host memory of kvferry (check: 1GiB, figures: 20GiB)")
        command.add_argument("--memory", type=float, help="share of the GPU's memory (check: 0.3, figures: 0.6)")
        command.add_argument("--block-size", type=int, help="tokens of a page (default: the engine's choice)")
    options = parser.parse_args()
    options.program = options.program.resolve()
    return options


def main() -> int:
    """Runs the command, and returns the exit code."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="kvferry-model-") as folder:
        (check if options.command == "check" else figures)(options, Path(folder))
    row(f"expectations that are not met: {len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    # Threads of the engine and of the connector in it do not hold up the end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
