"""Default signal handling for processes that the tests start, and stopping of processes.

A shell without job control starts its background jobs with SIGINT ignored, ``nohup`` with SIGHUP, and a child
inherits the signals that its parent ignores or blocks. Signals with a handler are reset to their defaults in children.
The tests therefore install a handler that does nothing for each signal that was ignored at their start.
"""

import os
import signal
from pathlib import Path

from daemon import eventually

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def set_to_defaults() -> None:
    """Installs the handlers. Must be called before any process is started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def stop(pid: int) -> None:
    """Stops a process, and waits until it is stopped.

    Its threads run until one of them is scheduled and receives the signal, which takes long on a busy machine.
    """
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}
        return bool(states) and states <= {"T", "Z"}

    eventually(f"process {pid} is stopped", stands)
