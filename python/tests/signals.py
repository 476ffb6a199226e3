"""Signals at their defaults for what the tests start, and processes that are known to stand still.

A shell without job control starts its background jobs with SIGINT ignored, ``nohup`` with SIGHUP, and a process passes
on what it ignores or blocks. What a process handles is at its default in the processes that it starts. So the tests
handle those signals that they were started with ignored, by doing nothing, as before.
"""

import os
import signal
from pathlib import Path

from daemon import eventually

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def set_to_defaults() -> None:
    """Must be called before any process is started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def stop(pid: int) -> None:
    """Stops a process, and waits until it stands.

    Its threads go on until one of them has had its turn and has seen the signal: on a busy machine that takes long.
    """
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}
        return bool(states) and states <= {"T", "Z"}

    eventually(f"process {pid} stands still", stands)
