"""Engines of SGLang for tests: a real one with a tiny model, in processes of its own.

``KVFERRY_SGLANG_PYTHON`` names the Python of an environment with SGLang.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import make_model
from daemon import TIMEOUT_S, eventually
from engine import HERE, START_LIMIT_S, Answer

PYTHON = os.environ.get("KVFERRY_SGLANG_PYTHON", "")
#: SGLang compiles the function that hashes pages at its first use.
HASHING_NEEDS = b"#include <openssl/sha.h>\n"
PAGE_TOKENS = 32
#: Longest time in which an engine ends by itself.
END_LIMIT_S = 30.0
#: Tokens that the device holds.
DEVICE_TOKENS = 4096


def why_not() -> str:
    """Returns why SGLang cannot run here; empty if it can. In continuous integration it must."""
    if not PYTHON:
        return "KVFERRY_SGLANG_PYTHON names no Python with SGLang: cargo xtask test installs one"
    if os.environ.get("CI") == "true":
        return ""
    try:
        check = ["g++", "-x", "c++", "-fsyntax-only", "-"]
        compiles = subprocess.run(check, input=HASHING_NEEDS, capture_output=True, timeout=TIMEOUT_S).returncode == 0
    except OSError:
        compiles = False
    return "" if compiles else "SGLang needs g++ and the headers of OpenSSL (Debian: apt install g++ libssl-dev)"


def in_shared_memory() -> set[Path]:
    """Returns KV memory and files of SGLang in shared memory, of all engines."""
    folder = Path("/dev/shm")
    return {*folder.glob("torch_*"), *folder.glob("sgl*")}


def left_behind(paths: set[Path]) -> set[Path]:
    """Returns those of these files in shared memory that no process has open: other engines may run on this machine."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.update(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
            used.update(os.readlink(file) for file in (process / "fd").iterdir())
    return {path for path in paths if path.exists() and str(path) not in used}


def arguments(socket_dir: Path | None, **changes: Any) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``; ``extra`` goes to the linker. Without a directory there is no linker."""
    # A short stall of the machine must not turn a hit into a miss.
    patient = {"lookup_budget_ms": 1000, "step_budget_ms": 10_000, "lookup_timeout_ms": 30_000}
    extra = {"socket_dir": str(socket_dir), "keep_on_flush": True, **patient, **changes.pop("extra", {})}
    wanted: dict[str, Any] = {
        "model_path": str(make_model.llama()),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "page_size": PAGE_TOKENS,
        "max_total_tokens": DEVICE_TOKENS,
        "mem_fraction_static": 0.2,
        "disable_cuda_graph": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "log_level": "info",
    }
    if socket_dir is not None:
        wanted |= {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "Linker",
                "linker_module_path": "kvferry.sglang",
                "linker_extra_config": extra,
            },
        }
    return {**wanted, **changes}


class SglangEngine:
    """``sglang.Engine`` in a process of its own, which leaves no child processes behind."""

    def __init__(self, wanted: dict[str, Any]):
        self.log = tempfile.TemporaryFile("a+")
        orders_theirs, orders = os.pipe()
        replies, replies_theirs = os.pipe()
        ranks = wanted.get("tp_size", 1)
        variables = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(ranks)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            # SGLang compiles its hash of pages at the first use, with the tools of its environment.
            "PATH": f"{Path(PYTHON).parent}:{os.environ.get('PATH', '')}",
        }
        self.process = subprocess.Popen(
            [PYTHON, str(HERE / "sglang_host.py"), str(replies_theirs)],
            env={**os.environ, **variables},
            stdin=orders_theirs,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[replies_theirs],
            start_new_session=True,
        )
        os.close(orders_theirs)
        os.close(replies_theirs)
        self._orders, self._replies = os.fdopen(orders, "w"), os.fdopen(replies)
        try:
            self._say(wanted)
            self.started = self._receive(START_LIMIT_S)
        except BaseException:
            self.end()
            raise

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

    def begin(self, *prompts: list[int] | dict[str, Any], max_tokens: int = 8) -> None:
        """Begins to generate; :meth:`result` returns the answers."""
        orders = [each if isinstance(each, dict) else {"tokens": each} for each in prompts]
        self._say({"do": "generate", "prompts": orders, "max_tokens": max_tokens})

    def result(self, within_s: float = 2 * TIMEOUT_S) -> list[Answer]:
        return self._receive(within_s)

    def generate(self, *prompts: list[int] | dict[str, Any], max_tokens: int = 8) -> list[Answer]:
        self.begin(*prompts, max_tokens=max_tokens)
        return self.result()

    def flush(self) -> None:
        """Empties SGLang's own cache."""
        eventually("the cache is flushed", lambda: self.request("flush"))

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self) -> None:
        """Ends all processes, and waits until they are gone; removes what SGLang itself leaves in shared memory.

        Processes that do not end are killed: a crashed engine waits for core dumps.
        """
        left = self._shared_files()
        with contextlib.suppress(OSError):
            self._orders.close()
        group = self.process.pid

        def gone() -> bool:
            self.process.poll()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            return False

        try:
            eventually("the engine's processes are gone", gone, END_LIMIT_S)
        except AssertionError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            eventually("the engine's processes are gone", gone)
        finally:
            for path in left:
                path.unlink(missing_ok=True)

    def _shared_files(self) -> set[Path]:
        """Semaphores and SGLang's own files in shared memory that the engine's processes have open."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(process.name)) == self.process.pid:
                    maps = (process / "maps").read_text()
                    found.update(re.findall(r"/dev/shm/(?:sem\.mp-|sgl)\S+", maps))
        return {Path(path) for path in found}
