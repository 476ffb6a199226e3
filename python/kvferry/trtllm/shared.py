"""What the scheduler and the worker of rank 0 share: both live in one process.

TensorRT-LLM creates them from one object of arguments, at the same time in two threads.
"""

import secrets
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.trtllm.side import SchedulerSide

#: Most engines of one process, one after another, that are remembered; 1 KB each. The oldest is dropped.
ENGINES_MAX = 64


class Shared:
    """The state of one engine in the process of rank 0; on other ranks of no use."""

    def __init__(self, llm_args: Any):
        #: Keeps the arguments, so that no other object gets their address.
        self.llm_args = llm_args
        #: Names this start of the engine, in all of its processes once rank 0 has sent it to the others.
        self.engine = secrets.token_bytes(16)
        #: None before the scheduler is created.
        self.side: SchedulerSide | None = None


_lock = threading.Lock()
_engines: dict[int, Shared] = {}


def shared_of(llm_args: Any) -> Shared:
    """Returns the state that belongs to these arguments; creates it for the first caller."""
    with _lock:
        shared = _engines.get(id(llm_args))
        if shared is None:
            shared = _engines[id(llm_args)] = Shared(llm_args)
            while len(_engines) > ENGINES_MAX:
                del _engines[next(iter(_engines))]
        return shared


def forget(shared: Shared) -> None:
    """Drops the state of an engine that has ended."""
    with _lock:
        if _engines.get(id(shared.llm_args)) is shared:
            del _engines[id(shared.llm_args)]
