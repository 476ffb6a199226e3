"""Runs kvferry for one test: processes of the installed program, in a directory of their own."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvferry

#: The program that was installed with the package.
PROGRAM = str(Path(kvferry.__file__).parents[1] / "bin" / "kvferry")
#: Deadline of every wait in a test. Only a hanging process takes that long.
TIMEOUT_S = 60.0
#: Bytes of a depot's header and inventory.
DEPOT_HEADER_BYTES = 4096
PAGE_BYTES_AT = 24
SLOT_BYTES = 80


def eventually(what: str, check: Callable[[], Any], grace_s: float = TIMEOUT_S) -> Any:
    """Waits until ``check`` returns a true value, and returns that value."""
    until = time.monotonic() + grace_s
    while True:
        if found := check():
            return found
        assert time.monotonic() < until, f"{what}: not within {grace_s:.0f} s"
        time.sleep(0.02)


def environment() -> dict[str, str]:
    """The environment without the variables that vLLM needs here, and without settings of kvferry."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "KVFERRY_"))}


class Daemon:
    """``kvferry up``."""

    def __init__(self, socket_dir: Path, **settings: Any):
        self.socket_dir = socket_dir
        self._variables: dict[str, str] = settings.pop("variables", {})
        #: File of the processes' logs; otherwise they go to this process's errors.
        self._log: Path | None = settings.pop("log", None)
        self._settings = {"g2": "256MiB", **settings}
        self._up: subprocess.Popen | None = None

    def start(self) -> None:
        flags = [text for name, value in self._settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [PROGRAM, "up", *flags, "--socket-dir", str(self.socket_dir)]
        with contextlib.ExitStack() as files:
            log = files.enter_context(self._log.open("ab")) if self._log is not None else None
            variables = {**environment(), **self._variables}
            self._up = up = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=log)

        def answers() -> bool:
            assert up.poll() is None, f"kvferry up ended with {up.returncode}"
            return bool(self.status(missing=True))

        eventually("a leader answers", answers)

    def stop(self) -> None:
        if self._up is not None:
            self._up.send_signal(signal.SIGTERM)
            assert self._up.wait(TIMEOUT_S) == 0
        self._up = None

    def kill(self) -> None:
        """Kills the process in any state."""
        if self._up is not None:
            self._up.kill()
            self._up.wait(TIMEOUT_S)
        self._up = None

    def status(self, *flags: str, missing: bool = False) -> dict[str, Any]:
        """Returns the output of ``kvferry status --json``; empty if no leader answers and ``missing`` is set."""
        command = [PROGRAM, "status", "--json", *flags, "--socket-dir", str(self.socket_dir)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0 and missing:
            return {}
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def flush(self) -> int:
        """Waits until all stored pages are durable on the disk, and returns their number."""
        command = [PROGRAM, "flush", "--socket-dir", str(self.socket_dir)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[0])

    def counter(self, name: str) -> int:
        return self.status()["counters"][name]

    def wait_ready(self) -> None:
        """Whether lookups are served: every rank is attached, and the inventories have been read after that."""
        eventually("lookups are served", lambda: self.status(missing=True).get("ready"))

    def pid(self, replica: int = 0, rank: int = 0) -> int:
        """Returns the worker of a rank, once its engine's memory is attached."""

        def attached() -> int:
            ranks = self.status(missing=True).get("ranks", [])
            pids = [
                each["pid"]
                for each in ranks
                if (each["replica"], each["rank"], each["attached"]) == (replica, rank, True)
            ]
            return pids[0] if pids and pids[0] in self.workers else 0

        return eventually(f"rank {rank} of replica {replica} is attached", attached)

    def killed(self, pid: int) -> None:
        """Kills a process, and waits until it is gone."""
        os.kill(pid, signal.SIGKILL)
        eventually("the process is gone", lambda: pid not in [*self.children("leader"), *self.workers])

    def wait_idle(self) -> None:
        """Whether nothing is leased, pinned or in flight."""

        def idle() -> bool:
            status = self.status()
            return not (status["pins"] or status["copies_under_way"] or status["slots"])

        eventually("nothing is held", idle)

    def wait_moved(self) -> None:
        """Waits until every move between host memory and the disk has ended."""

        def moved() -> bool:
            moves = self.status()["moves"]
            return not (moves["under_way"] or moves["waiting"])

        eventually("the moves have ended", moved)

    def children(self, command: str) -> list[int]:
        assert self._up is not None
        found = []
        for pid in Path(f"/proc/{self._up.pid}/task/{self._up.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if command.encode() in words:
                    found.append(int(pid))
        return found

    @property
    def supervisor(self) -> int:
        assert self._up is not None
        return self._up.pid

    @property
    def leader(self) -> int:
        return self.children("leader")[0]

    @property
    def workers(self) -> list[int]:
        return self.children("worker")

    def poison(self) -> None:
        """Changes every byte of every page in the host memory that ``up`` holds."""
        assert self._up is not None
        depots = [
            path
            for path in Path(f"/proc/{self._up.pid}/fd").iterdir()
            if os.readlink(path).startswith("/memfd:kvferry-depot")
        ]
        assert depots
        for path in depots:
            _flip(path)


def _flip(path: Path) -> None:
    """Changes every byte of a depot's pages; src/memory/depot.rs describes where they are."""
    depot = np.memmap(path, np.uint8, "r+")
    page_bytes = int(depot[PAGE_BYTES_AT : PAGE_BYTES_AT + 8].view("<u8")[0])
    stride = -(-page_bytes // 64) * 64
    slots = (depot.size - 2 * DEPOT_HEADER_BYTES) // (SLOT_BYTES + stride)
    pages_at = -(-(DEPOT_HEADER_BYTES + slots * SLOT_BYTES) // 4096) * 4096
    depot[pages_at:] ^= 0x5A


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Daemon]:
    """A running daemon, which leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        daemon = Daemon(Path(directory) / "s", **settings)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.kill()
