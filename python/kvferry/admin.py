"""The client of an operator or a probe: reads the state of a leader, resets pages, and flushes the disk."""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry import wire
from kvferry.client import Client, Failure, PendingRequest
from kvferry.wire import Code

#: Time after the deadline of a request in which the client's thread reports its end.
MARGIN_S = 5.0


class AdminClient:
    """A connection to the leader whose socket is in ``directory``. A context manager; calls wait for their answers."""

    def __init__(self, directory: Path, *, name: str = ""):
        # The leader recognises a request that is repeated over another connection by this identity.
        hello = wire.Hello(role="admin", engine=os.urandom(16), name=name)
        self._client = Client(directory, hello, first_id=1)
        self._client.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def status(self, *, check: bool = False, timeout_s: float = 5.0) -> wire.StatusAnswer:
        """Returns the state of the leader: the fields of ``docs/reference/status.md``.

        ``check``: the leader recounts its pages first, which it does at most once a second.

        Raises:
            kvferry.client.Failure: the error of the leader, or no answer in time.
        """
        return self._answer(self._client.request(wire.Status(check), timeout_s))

    def reset(self, namespace: bytes | None = None, *, tier: int = 0, timeout_s: float = 30.0) -> int:
        """Removes the pages of a namespace, or all pages with ``None``. Returns their number.

        With a ``tier``, 2 for host memory or 3 for the disk, the other tiers keep them.

        Raises:
            kvferry.client.Failure: ``leased`` while lookups or loads hold some of the pages; see also
                ``docs/reference/error-codes.md``.
        """
        answer: wire.ResetAnswer = self._answer(self._client.request(wire.Reset(namespace, tier=tier), timeout_s))
        return answer.pages

    def flush(self, *, timeout_s: float = 30.0) -> int:
        """Moves what is stored to the disk, waits until it is durable there, and returns the pages on the disk.

        Raises:
            kvferry.client.Failure: ``invalid`` without a disk tier, ``deadline`` when it takes longer.
        """
        answer: wire.FlushAnswer = self._answer(self._client.request(wire.Flush(), timeout_s))
        return answer.pages

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _answer(self, pending: PendingRequest) -> Any:
        # The client's thread ends every request by its deadline, and all of them when it ends itself.
        left_s = max(pending.expires - time.monotonic(), 0.0)
        if not pending.wait(left_s + MARGIN_S):
            raise Failure(Code.INTERNAL, "the thread of the connection does not answer", reported=False)
        if pending.failure is not None:
            raise pending.failure
        return pending.answer
