"""The client of an operator or a probe: state, changes and log of a leader, resets, flushes, and drains."""

import time
from pathlib import Path
from typing import Any

from kvferry import engine_messages, wire
from kvferry.client import Client, Failure, PendingRequest
from kvferry.wire import Code

#: Time after the deadline of a request in which the client's thread reports its end.
MARGIN_S = 5.0


class AdminClient(Client):
    """The connection of an operator, or of a probe, to the leader whose socket is in ``directory``.

    Started when it is made, and a context manager. Calls wait for their answers, in any number of threads, and raise a
    :class:`kvferry.requests.Failure` with the error of the leader (``docs/reference/error-codes.md``), or with
    ``deadline`` where no answer came within ``timeout_s``.
    """

    def __init__(self, directory: Path, *, name: str = ""):
        super().__init__(directory, engine_messages.admin_hello(name), first_id=1)
        self.start()

    def status(self, *, check: bool = False, timeout_s: float = 5.0) -> wire.StatusAnswer:
        """Returns the state of the leader: the fields of ``docs/reference/status.md``.

        ``check``: the leader recounts its pages first, which it does at most once a second.
        """
        return self._answer(self.request(wire.Status(check), timeout_s))

    def reset(self, namespace: bytes, *, tier: int = 0, timeout_s: float = 30.0) -> int:
        """Removes the pages of a namespace; ``b""`` is that of requests that name none. Returns their number.

        With a ``tier``, 2 for host memory or 3 for the disk, the other tiers keep them. ``leased`` while lookups or
        loads hold some of the pages: then none is removed.
        """
        message = engine_messages.reset(namespace, tier=tier)
        answer: wire.ResetAnswer = self._answer(self.request(message, timeout_s))
        return answer.pages

    def reset_all(self, *, tier: int = 0, timeout_s: float = 30.0) -> int:
        """Removes the pages of all namespaces. Returns their number. The rest is as for :meth:`reset`."""
        answer: wire.ResetAnswer = self._answer(self.request(wire.reset(tier=tier), timeout_s))
        return answer.pages

    def flush(self, *, timeout_s: float = 30.0) -> int:
        """Moves what is stored to the disk, waits until it is durable there, and returns the pages on the disk.

        ``invalid`` without a disk tier, ``deadline`` when it takes longer.
        """
        answer: wire.FlushAnswer = self._answer(self.request(wire.Flush(), timeout_s))
        return answer.pages

    def read_events(
        self,
        epoch: int = 0,
        from_: int = 0,
        *,
        cursor: int | None = None,
        namespace: bytes | None = None,
        most: int = 4096,
        wait_s: float = 0.0,
        timeout_s: float = 5.0,
    ) -> wire.Events:
        """Reads which pages the tiers gained and lost: see :meth:`kvferry.engine_client.EngineRequests.read_events`.

        A later read of the same client ends the wait of an earlier one.
        """
        message = engine_messages.read_events(epoch, from_, cursor, namespace, most, wait_s)
        return self._answer(self.request(message, wait_s + timeout_s))

    def drain(self, *, resume: bool = False, timeout_s: float = 5.0) -> wire.DrainAnswer:
        """Makes the leader refuse lookups, loads and stores; with ``resume`` the leader takes them again.

        Returns what still runs: the leader is drained when ``drained`` is true. The numbers are for people.
        """
        return self._answer(self.request(wire.Drain(resume), timeout_s))

    def set_log(self, filter_: str, *, timeout_s: float = 5.0) -> str:
        """Changes the filter of the leader's log until the leader ends, and returns the one before.

        ``invalid`` for a filter that cannot be read.
        """
        answer: wire.SetLogAnswer = self._answer(self.request(wire.SetLog(filter_), timeout_s))
        return answer.before

    def _answer(self, pending: PendingRequest) -> Any:
        # The client's thread ends every request by its deadline, and all of them when it ends itself.
        left_s = max(pending.expires - time.monotonic(), 0.0)
        if not pending.wait(left_s + MARGIN_S):
            raise Failure(Code.INTERNAL, "the thread of the connection does not answer", reported=False)
        if pending.failure is not None:
            raise pending.failure
        return pending.answer
