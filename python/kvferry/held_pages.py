"""Which pages kvferry holds in each tier, and how far that was announced to subscribers of events.

Plain data; not thread-safe. A page is a key of 18 bytes: its tier, its group as the engine registered it, and the last
16 bytes of its hash. Changes of one page between two announcements become one: the table keeps the pages whose
announcement is due, not the history, so that slow subscribers cost no memory beyond the table.
"""

from collections.abc import Iterator

#: How a page was announced: not at all; by its hash alone, because its tokens were unknown; in full.
NOT, BY_HASH, IN_FULL = 0, 1, 2

_LEVELS = 4


def key_of(tier: int, group: int, page_hash: bytes) -> bytes:
    """Returns the key of a page; of its hash, the last 16 bytes count."""
    return bytes((tier, group)) + page_hash[-16:]


class HeldPages:
    """The pages of the followed namespaces, those that were announced, and those whose announcement is due."""

    def __init__(self) -> None:
        #: For each page, how many places hold it, times 4, and how it was announced.
        self._entries: dict[bytes, int] = {}
        #: Pages whose announcement may be due, in the order of their changes.
        self._due: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return self._entries.get(key, 0) >= _LEVELS

    def __iter__(self) -> Iterator[bytes]:
        """Yields the pages that are held."""
        return (key for key, entry in self._entries.items() if entry >= _LEVELS)

    def gain(self, key: bytes) -> None:
        """Records that one more place holds a page."""
        entry = self._entries.get(key, 0)
        self._entries[key] = entry + _LEVELS
        if entry < _LEVELS:
            self._due[key] = None

    def lose(self, key: bytes) -> None:
        """Records that one place less holds a page."""
        entry = self._entries[key] - _LEVELS
        if entry < 0:
            raise ValueError("a page that is in no place cannot leave one")
        if entry:
            self._entries[key] = entry
        else:
            del self._entries[key]
            self._due.pop(key, None)
        if 0 < entry < _LEVELS:
            self._due[key] = None

    def described(self, key: bytes) -> None:
        """Records that the tokens of a page have become known: it can be announced in full."""
        if key in self and self._entries[key] % _LEVELS < IN_FULL:
            self._due[key] = None

    def announce_again(self) -> None:
        """Records that subscribers have forgotten every page."""
        for key, entry in list(self._entries.items()):
            if entry < _LEVELS:
                del self._entries[key]
                self._due.pop(key, None)
            else:
                self._entries[key] = entry - entry % _LEVELS
                self._due[key] = None

    def is_due(self, key: bytes) -> bool:
        """Whether the announcement of a page may be due."""
        return key in self._due

    def first_due(self) -> bytes | None:
        """Returns the page whose announcement has been due for the longest time."""
        return next(iter(self._due), None)

    def take_due(self, key: bytes) -> tuple[bool, int]:
        """Ends that a page is due; returns whether it is held, and how it was announced."""
        del self._due[key]
        entry = self._entries.get(key, 0)
        return entry >= _LEVELS, entry % _LEVELS

    def announced(self, key: bytes, how: int) -> None:
        """Records how a page was announced."""
        entry = self._entries.get(key, 0)
        entry += how - entry % _LEVELS
        if entry:
            self._entries[key] = entry
        else:
            self._entries.pop(key, None)
