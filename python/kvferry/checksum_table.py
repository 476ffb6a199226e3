"""The checksums of stored pages, in a file that every engine of a host maps.

An entry of the table has a key, which stands for a page, and *values*: the checksums of every content of the page that
may be in kvferry. A page may have several: an engine that computes it again may get other bytes, and the first store
wins. A *mark* in an entry says that some process stores the page, so that there may be a content whose checksum is not
in the entry yet. :mod:`kvferry.vllm.verify` has the rules.

Entries are changed under a lock of the file, for microseconds; a process that does not get it at once goes on without.
Readers take no lock: each entry has a check of its own bytes, and one that does not fit, such as a half-written one,
counts as absent.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Entries of a table. A bucket that is full loses the entry that was written first. 18 MiB with one rank, 46 MiB with
#: 8, which the file takes from its start.
ENTRIES = 1 << 18
#: Entries among which a key is searched.
_BUCKET = 8
KEY_BYTES = 16
#: Values of each rank, and further places for marks and values, in an entry: two different contents of every page.
_VALUES_PER_RANK = 2
_PLACES_MORE = 3
#: Set in a mark, and not in a value.
_MARK = 1 << 63
#: A mark that is never removed: some content of the page may be in kvferry whose checksum is not known.
LOST = (1 << 64) - 1
_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"KVFYSUMS"
_VERSION = 1
_HEADER_BYTES = 4096


class Unusable(OSError):
    """A table that cannot be used. The text names the file, the reason and the remedy."""


@dataclass(frozen=True)
class Known:
    """The entry of a page: values of contents, and marks of processes that store it."""

    values: frozenset[int] = frozenset()
    marks: frozenset[int] = frozenset()


def value_of(checksum: int, shard: int) -> int:
    """Returns the value of a checksum of 64 bits in one shard. The lowest bit of the checksum is left out."""
    return (((checksum & LOST) >> 1) ^ (shard + 1) * 0x9E3779B97F4A7C15) & (_MARK - 1) or 1


def mark_of(process: int) -> int:
    """Returns the mark of a process with this random number of 64 bits."""
    return (process | _MARK) & ~1


class ChecksumTable:
    """A table of checksums of pages on ``ranks`` ranks."""

    def __init__(self, path: Path, ranks: int, *, entries: int = ENTRIES):
        """Opens the file, and makes it if there is none.

        Raises:
            Unusable: for a file of another user or format, or in a directory that cannot be written.
        """
        self.path = path
        self._places = _VALUES_PER_RANK * ranks + _PLACES_MORE
        self._entry = struct.Struct(f"<{KEY_BYTES}sQQ{self._places}Q")
        self._buckets = entries // _BUCKET
        self._header = _HEADER.pack(_MAGIC, _VERSION, self._places, self._buckets)
        size = _HEADER_BYTES + self._buckets * _BUCKET * self._entry.size
        try:
            self._fd = self._open(size)
            try:
                self._map = self._check(size)
            except BaseException:
                os.close(self._fd)
                raise
        except Unusable:
            raise
        except OSError as error:
            why = error.strerror or error
            raise Unusable(f"{path}: {why}: let the engine's user make files there, and read and write them") from error

    def _open(self, size: int) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError):
            return os.open(self.path, flags)
        # Under a name of its own until it is whole: another process never sees a part of a header.
        made = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        fd = os.open(made, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # A write to a mapped page for which there is no room would end the process.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, self._header, 0)
            with contextlib.suppress(FileExistsError):
                os.link(made, self.path)
        finally:
            os.close(fd)
            os.unlink(made)
        return os.open(self.path, flags)

    def _check(self, size: int) -> mmap.mmap:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise Unusable(f"{self.path} is not a file of this user: remove it")
        if found.st_size != size or os.pread(self._fd, _HEADER.size, 0) != self._header:
            raise Unusable(f"{self.path} is a table of another format or number of ranks: remove it")
        self._file = found.st_dev, found.st_ino
        return mmap.mmap(self._fd, size)

    def is_current(self) -> bool:
        """Whether the path still leads to this file, which has its size."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (found.st_dev, found.st_ino, found.st_size) == (*self._file, len(self._map))

    def close(self) -> None:
        """Closes the file."""
        self._map.close()
        os.close(self._fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Locks the table against other processes; False, at once, if one of them has it locked."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def look(self, key: bytes) -> Known:
        """Returns what is known of a page: nothing without an entry."""
        _, places = self._find(key) or (0, [])
        marks = frozenset(place for place in places if place & _MARK)
        return Known(frozenset(places) - marks, marks)

    # With the lock.

    def mark(self, key: bytes, mark: int) -> None:
        """Marks a page that a process is about to store."""
        at, places = self._find(key) or (self._room(key), [])
        self._write(at, key, _with(places, [mark], self._places))

    def settle(self, key: bytes, mark: int, values: Iterable[int], *, first: bool, over: bool, lost: bool) -> None:
        """Adds values of contents that a process stores, and removes its mark once there is no need for it.

        Values are added to those of an entry that has some, or if ``first`` is set: kvferry had no content of the page
        before. The mark stays until the entry has values or the stores are ``over``. With ``lost`` the entry is marked
        forever instead. A page whose mark is gone has lost its entry meanwhile, and gets none.
        """
        found = self._find(key)
        if found is None or mark not in found[1]:
            return
        at, places = found
        known = any(not place & _MARK for place in places)
        if known or first:
            places = _with(places, values, self._places)
        if known or first or over or lost:
            places = [place for place in places if place != mark]
        if lost:
            places = _with(places, [LOST], self._places)
        if places:
            self._write(at, key, places)
        else:
            self._map[at : at + self._entry.size] = bytes(self._entry.size)

    def _bucket(self, key: bytes) -> range:
        bucket = int.from_bytes(key[:8], "little") % self._buckets
        first = _HEADER_BYTES + bucket * _BUCKET * self._entry.size
        return range(first, first + _BUCKET * self._entry.size, self._entry.size)

    def _find(self, key: bytes) -> tuple[int, list[int]] | None:
        """Returns the place of a page's entry in the file, and the values and marks in it."""
        for at in self._bucket(key):
            if self._map[at : at + KEY_BYTES] == key:
                _, _, check, *places = self._entry.unpack(self._map[at : at + self._entry.size])
                if check == _check(key, places):
                    return at, [place for place in places if place]
        return None

    def _room(self, key: bytes) -> int:
        """Returns the place of an unused entry, or of the one that was written first."""
        used: list[tuple[int, int]] = []
        for at in self._bucket(key):
            held, stamp, check, *places = self._entry.unpack(self._map[at : at + self._entry.size])
            if check != _check(held, places) or not any(places):
                return at
            used.append((stamp, at))
        return min(used)[1]

    def _write(self, at: int, key: bytes, places: list[int]) -> None:
        padded = [*places, *([0] * (self._places - len(places)))]
        packed = self._entry.pack(key, time.time_ns(), _check(key, padded), *padded)
        self._map[at : at + self._entry.size] = packed


def _with(places: list[int], more: Iterable[int], most: int) -> list[int]:
    """Adds values or marks to an entry; one that has no place for them is marked forever."""
    added = list(dict.fromkeys([*places, *more]))
    return added if len(added) <= most else [LOST, *(place for place in places if place != LOST)][:most]


def _check(key: bytes, places: Iterable[int]) -> int:
    packed = b"".join(place.to_bytes(8, "little") for place in places)
    return int.from_bytes(hashlib.blake2b(key + packed, digest_size=8).digest(), "little")
