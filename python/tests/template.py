"""Starts Python processes as forks of one process, the template, that has imported large modules once.

The imports of an engine take 15 s, and those of torch 3 s, in each process.

Usage: ``template.py SOCKET_FD MODULES...``. The socket carries a request in each message, and its file descriptors:

* ``fork``: runs a script (``command``: its path, or ``-c`` and its source, and arguments) in a new process, the leader
  of a session. Descriptors: its standard input, output and errors, and others, whose numbers are its last arguments.
  Answer: its id and a pidfd.
* ``wait``: waits for the end of such a process. Answer: its exit status.

The template has a single thread, and does not import kvferry: each process imports it itself.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

#: Deadline of the imports, on two busy cores.
IMPORTS_LIMIT_S = 200.0
#: Deadline of an answer after that.
ANSWER_LIMIT_S = 60.0
MESSAGE_MAX = 1 << 17
FDS_MAX = 4
#: Modules that every engine, or most of them, import at their start.
ENGINE = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
)


class Forked:
    """A process that the template forked, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, template: "Template", pid: int, pidfd: int):
        self.pid = pid
        self._template, self._pidfd = template, pidfd
        self._status: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float) -> int:
        """Waits for the end of the process, which keeps its id until then."""
        if self._status is None:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._status = self._template.request({"do": "wait", "pid": self.pid})[0]["status"]
            os.close(self._pidfd)
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            signal.pidfd_send_signal(self._pidfd, number)


class Template:
    """The process that forks others. It ends with the process that started it."""

    def __init__(self, modules: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._requests = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *modules],
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket.settimeout(IMPORTS_LIMIT_S)
        assert self._receive()[0] == {"threads": 1}, "a thread that a fork does not copy may hold a lock"
        self._socket.settimeout(ANSWER_LIMIT_S)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        message, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_MAX, 1)
        assert message, "the process that forks others has ended"
        return json.loads(message), fds

    def request(self, what: dict[str, Any], *fds: int) -> tuple[dict[str, Any], list[int]]:
        with self._requests:
            socket.send_fds(self._socket, [json.dumps(what).encode()], fds)
            return self._receive()

    def fork(self, command: list[str], env: dict[str, str], *fds: int) -> Forked:
        """Runs a script with these descriptors as its standard input, output and errors, and others if given.

        The loader reads ``LD_LIBRARY_PATH`` only when a program starts: the template must have been started with it.
        """
        answer, (pidfd,) = self.request({"do": "fork", "command": command, "env": env}, *fds)
        return Forked(self, answer["pid"], pidfd)

    def end(self) -> None:
        self._socket.close()
        self._process.wait(ANSWER_LIMIT_S)


_STARTS = threading.Lock()


@functools.cache
def _of_engines() -> Template:
    return Template(ENGINE)


def of_engines() -> Template:
    """Returns the template of engines, which the first call starts. Threads may call this at the same time."""
    with _STARTS:
        return _of_engines()


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert "kvferry" not in sys.modules, "each process imports it itself"
    if settings := sys.modules.get("vllm.envs"):
        # vLLM for the CPU spawns its other processes, which would import everything again. Engines on GPUs fork them.
        settings.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    # Collections of garbage need not look at what the imports have created.
    gc.collect()
    gc.freeze()
    requests.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_MAX, FDS_MAX)
        if not message:
            return
        request = json.loads(message)
        if request["do"] == "wait":
            _, status = os.waitpid(request["pid"], 0)
            requests.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            continue
        # The files of its model must be older than the engine, whose start is known in ticks, rounded down.
        time.sleep(2 / os.sysconf("SC_CLK_TCK"))
        pid = os.fork()
        if pid == 0:
            requests.close()
            begin(request, fds)
            return
        for each in fds:
            os.close(each)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(requests, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)


def begin(request: dict[str, Any], fds: list[int]) -> None:
    """Makes the process what a new interpreter would be, and runs its script."""
    os.setsid()
    standard, others = fds[:3], fds[3:]
    for number, each in enumerate(standard):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    script, *arguments = [*request["command"], *map(str, others)]
    source = arguments.pop(0) if script == "-c" else None
    sys.argv = [script, *arguments]
    if source is None:
        runpy.run_path(script, run_name="__main__")
    else:
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
