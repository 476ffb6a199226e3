"""Requests to the leader to remove single pages, which are retried until the leader has removed them."""

import time

from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient

#: Deadline of a request, and pause after a failed one: the leader refuses to remove pages that a load holds.
REMOVAL_LIMIT_S = 1.0
#: Most pages that wait for their removal, 0.2 KB each: 13 MB. Beyond that the oldest are dropped.
REMOVALS_MAX = 65_536
#: Most pages in one request.
_TOGETHER = 4_096


class Removals:
    """Removes pages, given by namespace and hash, at the leader. For the scheduler's thread alone."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._to_remove: dict[tuple[bytes, bytes], None] = {}
        self._open: tuple[list[tuple[bytes, bytes]], PendingRequest] | None = None
        self._not_before = 0.0

    def add(self, pages: list[tuple[bytes, bytes]]) -> None:
        """Adds pages to remove, also if the leader has removed them before."""
        if self._open is not None:
            # The running request answers only for pages from before this call.
            added = set(pages)
            self._open = [page for page in self._open[0] if page not in added], self._open[1]
        self._to_remove.update(dict.fromkeys(pages))
        while len(self._to_remove) > REMOVALS_MAX:
            self._to_remove.pop(next(iter(self._to_remove)))

    def clear(self) -> None:
        """Gives all removals up: the whole namespaces are removed. Pages that are stored there later must stay."""
        self._to_remove.clear()
        self._open, self._not_before = None, 0.0

    def __len__(self) -> int:
        return len(self._to_remove)

    def turn(self) -> None:
        """Processes a received answer, and sends the next request. Does not wait."""
        if self._open is not None and self._open[1].done:
            pages, pending = self._open
            self._open = None
            if pending.answer is None:
                self._not_before = time.monotonic() + REMOVAL_LIMIT_S
            for page in pages:
                self._to_remove.pop(page, None)
                if pending.answer is None:
                    # Last: a page that is always held must not keep the others.
                    self._to_remove[page] = None
        if self._to_remove and self._open is None and self._client.listening and time.monotonic() >= self._not_before:
            namespace = next(iter(self._to_remove))[0]
            # A request is refused as a whole while one of its pages is held: after a refusal, one page at a time.
            most = 1 if self._not_before else _TOGETHER
            pages = [page for page in self._to_remove if page[0] == namespace][:most]
            hashes = [page_hash for _, page_hash in pages]
            self._open = pages, self._client.reset(namespace, hashes=hashes, timeout_s=REMOVAL_LIMIT_S)
        elif not self._to_remove:
            self._not_before = 0.0
