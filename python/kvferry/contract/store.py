"""The pages that the scripted leader has stored, and its change log."""

import collections
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import wire

#: Most records of the change log that are kept; a reader of older ones begins again.
RECORDS_MAX = 65_536
#: Namespace, layout, and the last 16 bytes of the page hash.
Key = tuple[bytes, bytes, bytes]
HASH_BYTES = 16


@dataclass
class _Page:
    """The bytes of a page, by rank, and its place in the log's terms."""

    data: list[bytes]
    place: int


class StoredPages:
    """Pages by key. Not thread-safe."""

    def __init__(self, bytes_max: int):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._pages: dict[Key, _Page] = {}
        self._places = itertools.count()
        self._records: collections.deque[wire.EventRecord] = collections.deque(maxlen=RECORDS_MAX)
        #: Number of the next record; records are numbered from 1 on.
        self.next = 1

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def of(self, key: Key) -> list[bytes]:
        """Returns the bytes of a page, by rank."""
        return self._pages[key].data

    def add(self, key: Key, data: list[bytes]) -> bool:
        """Adds a page; False if there is no room."""
        size = sum(map(len, data))
        if self._bytes + size > self._bytes_max:
            return False
        self._pages[key] = page = _Page(data, next(self._places))
        self._bytes += size
        self._log(self._record("stored", key, page))
        return True

    def remove(self, keys: Iterable[Key], why: str) -> int:
        """Removes pages; returns their number."""
        removed = 0
        for key in list(keys):
            page = self._pages.pop(key, None)
            if page is not None:
                removed += 1
                self._bytes -= sum(map(len, page.data))
                self._log(self._record("gone", key, page, why))
        return removed

    def keys(self, namespace: bytes | None, hashes: set[bytes] | None = None) -> list[Key]:
        """Returns the keys of a namespace, or all; with ``hashes`` only those that have one of them."""
        return [
            key
            for key in self._pages
            if (namespace is None or key[0] == namespace) and (hashes is None or key[2] in hashes)
        ]

    def _record(self, event: str, key: Key, page: _Page, why: str | None = None) -> wire.EventRecord:
        return wire.EventRecord(event, 2, short(key[0], 8), key[1][:7], 0, page.place, key[2], why)

    def _log(self, record: wire.EventRecord) -> None:
        self._records.append(record)
        self.next += 1

    def begun_again(self) -> None:
        """Drops the log, as a new leader does. The numbers of records begin again."""
        self._records.clear()
        self.next = 1

    def present(self, namespace: bytes | None) -> list[wire.EventRecord]:
        """Returns all pages as records."""
        found = self._pages.items()
        return [self._record("stored", key, page) for key, page in found if namespace in (None, key[0])]

    def since(self, first: int, most: int, namespace: bytes | None) -> tuple[list[wire.EventRecord], int] | None:
        """Returns records from number ``first`` on, and the number to go on with; None if some are missing."""
        oldest = self.next - len(self._records)
        if not oldest <= first <= self.next:
            return None
        records = list(itertools.islice(self._records, first - oldest, first - oldest + max(most, 1)))
        wanted = None if namespace is None else short(namespace, 8)
        return [each for each in records if wanted in (None, each.namespace)], first + len(records)


def short(text: bytes, size: int) -> bytes:
    """Bytes that stand for a longer text."""
    return hashlib.sha256(text).digest()[:size]
