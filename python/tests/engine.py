"""Engines for tests: a real vLLM with a tiny model, in a process of its own or behind HTTP."""

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import make_model
import template
from daemon import TIMEOUT_S, Daemon, eventually

HERE = Path(__file__).parent
PAGE_TOKENS = 32
DEVICE_PAGES = 256
#: Deadline for an engine's start, on two busy cores.
START_LIMIT_S = 400.0
Answer = dict[str, Any]
#: The connector's metrics by name and label values, separated by slashes.
Statistics = dict[str, float]


def transfer_config(socket_dir: Path, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A short stall of the machine must not turn a hit into a miss.
        "kv_connector_extra_config": {
            "socket_dir": str(socket_dir),
            "lookup_timeout_ms": 30_000,
            "verify": 100,
            **extra,
        },
    }


def config(socket_dir: Path | None, **changes: Any) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; ``extra`` goes to the connector. Without a directory there is no connector."""
    extra = changes.pop("extra", {})
    wanted: dict[str, Any] = {
        "model": str(make_model.llama()),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": PAGE_TOKENS,
        "num_gpu_blocks_override": DEVICE_PAGES,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": False,
    }
    if socket_dir is not None:
        wanted["kv_transfer_config"] = transfer_config(socket_dir, **extra)
    return {**wanted, **changes}


def tokens(count: int, seed: int) -> list[int]:
    """Returns a prompt of this many tokens, equal for equal seeds."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, 500) for _ in range(count)]


class Process:
    """A process that leaves no child processes behind."""

    #: Whether processes are forked from one that has imported vLLM. Otherwise they start as those of a user do.
    forked = False

    def __init__(self, serve: list[str], env: dict[str, str], *pipes: int):
        """Runs ``vllm`` with these arguments; without any, the engine host with pipes for its orders and replies."""
        self.log = tempfile.TemporaryFile("a+")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **env}
        command = [str(Path(sys.executable).parent / "vllm"), *serve] if serve else [str(HERE / "engine_host.py")]
        self.process: subprocess.Popen | template.Forked
        with open(os.devnull) as nothing:
            orders, *replies = pipes or (nothing.fileno(),)
            if self.forked:
                output = self.log.fileno()
                self.process = template.of_engines().fork(command, environment, orders, output, output, *replies)
                return
            self.process = subprocess.Popen(
                [sys.executable, *command, *map(str, replies)],
                env=environment,
                stdin=orders,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=replies,
                start_new_session=True,
            )

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self, sent: int = signal.SIGKILL) -> None:
        """Sends a signal to the whole group, and waits until all of its processes are gone."""
        group = self.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, sent)
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Python then prints the stack of each thread.
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(TIMEOUT_S)
            raise AssertionError(f"the process does not end on signal {sent}:\n{self.logged()[-8000:]}") from None

        def gone() -> bool:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            # Not all processes of a group end by the signal.
            os.killpg(group, signal.SIGKILL)
            return False

        eventually("the engine's processes are gone", gone)


class Engine(Process):
    """``vllm.LLM`` in a process of its own."""

    def __init__(self, wanted: dict[str, Any], *, in_process: bool = True):
        theirs, ours = os.pipe()
        reply, reply_theirs = os.pipe()
        super().__init__([], {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}, theirs, reply_theirs)
        os.close(theirs)
        os.close(reply_theirs)
        self._orders, self._replies = os.fdopen(ours, "w"), os.fdopen(reply)
        self._say(wanted)
        self.started = self._receive(START_LIMIT_S)

    def _say(self, what: dict[str, Any]) -> None:
        self._orders.write(json.dumps(what) + "\n")
        self._orders.flush()

    def _receive(self, grace_s: float) -> Any:
        ready, _, _ = select.select([self._replies], [], [], grace_s)
        line = self._replies.readline() if ready else ""
        assert line, f"the engine does not answer:\n{self.logged()[-8000:]}"
        return json.loads(line)

    def request(self, do: str, *, within_s: float = 2 * TIMEOUT_S, **order: Any) -> Any:
        self._say({"do": do, **order})
        return self._receive(within_s)

    def generate(self, *prompts: list[int] | dict[str, Any], max_tokens: int = 16) -> list[Answer]:
        orders = [each if isinstance(each, dict) else {"tokens": each} for each in prompts]
        return self.request("generate", prompts=orders, max_tokens=max_tokens)

    def reset(self, *, connector: bool = False) -> None:
        """Resets the engine's own prefix cache; waits for copies that still read its pages."""
        eventually("the prefix cache is reset", lambda: self.request("reset", connector=connector))

    def external_hits(self) -> int:
        return int(self.request("metrics")["vllm:external_prefix_cache_hits"])

    def statistics(self) -> Statistics:
        """Returns the connector's metrics; of a histogram the number of values."""
        return {_short(name, labels): value for name, labels, value in self.request("statistics")}


class Server(Process):
    """``vllm serve``."""

    def __init__(self, wanted: dict[str, Any]):
        self.port = free_port()
        flags = []
        for name, value in wanted.items():
            flag = f"--{name.replace('_', '-')}"
            match value:
                case True:
                    flags.append(flag)
                case False:
                    pass
                case dict():
                    flags += [flag, json.dumps(value)]
                case _ if name != "model":
                    flags += [flag, str(value)]
        serve = ["serve", wanted["model"], "--port", str(self.port), *flags]
        super().__init__(serve, {"VLLM_SERVER_DEV_MODE": "1"})
        eventually("the server answers", self._healthy, START_LIMIT_S)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.logged()[-8000:]
        try:
            self._call("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=2 * TIMEOUT_S) as answer:
            return answer.read().decode()

    def generate(self, *prompts: list[int], max_tokens: int = 16) -> list[Answer]:
        """Generates like :meth:`Engine.generate`, one prompt after another."""
        return [self._complete(prompt, max_tokens) for prompt in prompts]

    def _complete(self, prompt: list[int], max_tokens: int) -> Answer:
        body = {
            "model": self._model(),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        said = json.loads(self._call("/v1/completions", body))
        number = len("token_id:")
        made = said["choices"][0]["logprobs"]
        return {
            "tokens": [int(token[number:]) for token in made["tokens"]],
            "logprobs": [
                sorted([int(token[number:]), logprob] for token, logprob in step.items())
                for step in made["top_logprobs"]
            ],
        }

    def _model(self) -> str:
        return json.loads(self._call("/v1/models"))["data"][0]["id"]

    def post(self, path: str) -> str:
        return self._call(path, method="POST")

    def reset(self, *, connector: bool = False) -> None:
        path = f"/reset_prefix_cache?reset_external={str(connector).lower()}"
        self._call(path, method="POST")

    def external_hits(self) -> int:
        for line in self._call("/metrics").splitlines():
            if line.startswith("vllm:external_prefix_cache_hits_total"):
                return int(float(line.rsplit(" ", 1)[1]))
        return 0

    def statistics(self) -> Statistics:
        """Returns the connector's metrics, like :meth:`Engine.statistics`."""
        found = {}
        lines = re.findall(r"^(vllm:kvferry_\w+)\{(.*)\} (\S+)$", self._call("/metrics"), re.MULTILINE)
        for name, labels, value in lines:
            if not name.endswith(("_bucket", "_sum", "_created")):
                pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                found[_short(name.removesuffix("_total").removesuffix("_count"), pairs)] = float(value)
        return found


def _short(name: str, labels: dict[str, str]) -> str:
    own = [value for label, value in labels.items() if label not in ("engine", "model_name")]
    return "/".join([name.removeprefix("vllm:kvferry_"), *own])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def said(answers: list[Answer]) -> list[Any]:
    """Returns the tokens and log-probabilities that an engine computed, to the last bit."""
    return [(answer["tokens"], answer["logprobs"]) for answer in answers]


def shared_memory() -> set[str]:
    """Returns torch's KV memory in shared memory, without the small files of libraries."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("torch_")}


def settled(engine: Engine, daemon: Daemon) -> None:
    """Waits until all copies are over, so that every stored page is found."""
    eventually("copies are over", lambda: not daemon.status()["copies_under_way"])


def wait_steps(engine: Engine, what: str, check: Any, grace_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Runs steps of an engine in its own process until their results satisfy ``check``."""
    until = time.monotonic() + grace_s
    while True:
        state = engine.request("step")
        if check(state):
            return state
        assert time.monotonic() < until, f"{what}: not within {grace_s:.0f} s: {state}"
