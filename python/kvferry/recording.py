"""Records every call of an engine and every request to the leader, with their answers, into one file in one order.

``docs/recording.md`` describes the file. A frame gets its number when it is added, and frames are written in this
order by a thread of its own: no caller waits for the disk. Recording ends as a whole: after a frame that cannot be kept
(the queue or the file is full, the disk fails) no later frame is recorded, and the file ends with the reason.
"""

import collections
import contextlib
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.wire import Kind

logger = logging.getLogger("kvferry")

MAGIC = b"KVFCALLS"
#: Version of the format, in the first bytes of the file.
FORMAT = 1
#: Bytes of the frames that wait to be written or are being written, with :data:`_WAITING_BYTES` for each: 64 MiB of
#: memory at worst. One more ends the recording.
QUEUE_BYTES_MAX = 64 << 20
#: Longest frame, without its head. The longest message of the wire has 8 MiB.
FRAME_BYTES_MAX = 16 << 20
#: Number of the last page hashes that frames may refer to instead of repeating them: 26 MB of memory at worst, with
#: 200 bytes each.
HASH_WINDOW = 131_072
#: Bytes at the end of the largest file that only the end mark may use.
END_BYTES = 512
#: Memory of a waiting frame beside its bytes.
_WAITING_BYTES = 256
#: Longest text of a failure that is recorded.
_TEXT_MAX = 256
#: Pause before the leader is requested to state its sizes again.
_LEADER_PAUSE_S = 1.0
_LEADER_LIMIT_S = 5.0

_START = struct.Struct(">8sI")
#: Length of the body, its checksum together with the rest of the head, number, microseconds since the start, kind.
_HEAD = struct.Struct(">IIQQB")
_CHECKED = struct.Struct(">IQQB")
_encode = msgspec.msgpack.Encoder().encode


class Frame(IntEnum):
    """Kinds of frames."""

    HEADER = 0
    CALL = 1
    RETURN = 2
    REQUEST = 3
    ANSWER = 4
    FAILURE = 5
    LEADER = 6
    END = 7


class End(IntEnum):
    """Why a recording ends."""

    CLOSED = 0
    FULL = 1
    SLOW = 2
    DISK = 3
    FAULT = 4


#: Requests that are recorded: those that change what the leader keeps, and those that depend on it.
RECORDED = (Kind.LOOKUP, Kind.LOAD, Kind.STORE, Kind.FINISH, Kind.CANCEL_STORES, Kind.RESET)


class _Waiting(msgspec.Struct, gc=False):
    """A frame that waits to be written. ``hashes``: page hashes of ``hash_bytes`` each, which are made compact."""

    number: int
    at_us: int
    kind: int
    fields: tuple[Any, ...]
    hash_bytes: int = 0
    hashes: bytes | None = None


class HashWindow:
    """The last :data:`HASH_WINDOW` different page hashes of a file, by number: each new hash gets the next one.

    A reader keeps the same window, so that a list of hashes is written as runs ``[first number, count]`` of known ones,
    and bytes with the new ones.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._ring: list[bytes] = []
        self._next = 0

    def compact(self, hashes: bytes, hash_bytes: int) -> list[Any]:
        """Returns the runs and the new hashes of a packed list, in its order."""
        items: list[Any] = []
        fresh: list[bytes] = []
        for at in range(0, len(hashes), hash_bytes):
            page = hashes[at : at + hash_bytes]
            number = self._numbers.get(page)
            if number is None:
                fresh.append(page)
                self._add(page)
                continue
            if fresh:
                items.append(b"".join(fresh))
                fresh = []
            if items and isinstance(items[-1], list) and sum(items[-1]) == number:
                items[-1][1] += 1
            else:
                items.append([number, 1])
        if fresh:
            items.append(b"".join(fresh))
        return items

    def _add(self, page: bytes) -> None:
        if self._next >= HASH_WINDOW:
            slot = self._next % HASH_WINDOW
            del self._numbers[self._ring[slot]]
            self._ring[slot] = page
        else:
            self._ring.append(page)
        self._numbers[page] = self._next
        self._next += 1


class Recorder:
    """Writes a recording. Frames may be added by any thread, and no call waits for the disk.

    Raises:
        OSError: when the file cannot be created.
    """

    def __init__(self, path: Path, *, bytes_max: int, header: dict[str, Any], file: int | None = None):
        self.path = path
        self._bytes_max = bytes_max
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) if file is None else file
        self._begun_ns = time.monotonic_ns()
        self._changed = threading.Condition(threading.Lock())
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._queue_bytes = 0
        #: Those of the batch that is being written, which are part of them.
        self._taken_bytes = 0
        self._next = 0
        #: Why no more frames are added; None while recording.
        self._end: tuple[End, str] | None = None
        self._hashes = HashWindow()
        # What the writer's thread has written: bytes and frames.
        self._bytes = 0
        self._frames = 0
        #: The same after each of the last frames, of 25 bytes at least: further back than an end mark is long.
        self._earlier: collections.deque[tuple[int, int]] = collections.deque(maxlen=END_BYTES // 16)
        self._thread = threading.Thread(target=self._run, name="kvferry recorder", daemon=True)
        self._add(Frame.HEADER, (msgspec.Raw(_encode(header)),), 0)
        self._thread.start()

    @property
    def recording(self) -> bool:
        """Whether frames are still added."""
        return self._end is None

    # Frames.

    def called(self, name: str, arguments: dict[str, Any], hashes: Sequence[bytes] = ()) -> int:
        """Records that the engine calls ``name``; returns the number of the call."""
        if self._end is not None:
            return 0
        body = _encode(arguments)
        packed = b"".join(hashes)
        return self._add(
            Frame.CALL, (name, msgspec.Raw(body)), len(body), hashes=packed, hash_bytes=len(hashes[0]) if hashes else 0
        )

    def returned(self, call: int, answer: Any) -> None:
        """Records the answer of a call."""
        if self._end is None:
            body = _encode(answer)
            self._add(Frame.RETURN, (call, msgspec.Raw(body)), len(body))

    def requested(self, pending: PendingRequest) -> None:
        """Records a request to the leader, before it can be answered."""
        if self._end is None and pending.kind in RECORDED:
            limit_ms = max(int((pending.deadline - time.monotonic()) * 1000), 0)
            try:
                body = pending.body
            except Exception as error:
                # The client reports it to the caller.
                self.fault(f"a request of kind {pending.kind}: {error!r}")
                return
            self._add(Frame.REQUEST, (pending.id, int(pending.kind), limit_ms, body), len(body))

    def ended(self, pending: PendingRequest) -> None:
        """Records the answer or failure of a request, before any caller can see it."""
        if self._end is not None or pending.kind not in RECORDED:
            return
        if pending.failure is not None:
            failure = pending.failure
            text = failure.message[:_TEXT_MAX]
            fields = (pending.id, int(failure.code), text, failure.reported, failure.retry, failure.over)
            self._add(Frame.FAILURE, fields, len(text))
        else:
            body = _encode(pending.answer)
            self._add(Frame.ANSWER, (pending.id, msgspec.Raw(body)), len(body))

    def leader(self, epoch: int, status: wire.StatusAnswer) -> None:
        """Records the sizes of a leader."""
        tiers = [[tier.tier, tier.pages, tier.used_pages] for tier in status.tiers]
        ranks = len({rank.rank for rank in status.ranks})
        replicas = len({rank.replica for rank in status.ranks})
        fields = (epoch, status.version, status.ratio, ranks, replicas, tiers)
        self._add(Frame.LEADER, fields, 16 * len(tiers))

    def fault(self, what: str) -> None:
        """Ends the recording because something cannot be recorded."""
        with self._changed:
            self._stop(End.FAULT, what)

    def close(self, timeout_s: float) -> None:
        """Writes what was added and the end mark; waits at most ``timeout_s``."""
        with self._changed:
            self._stop(End.CLOSED, "")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("kvferry: %s is not written %.0f s after its end: it may be cut", self.path, timeout_s)

    def _add(
        self, kind: Frame, fields: tuple[Any, ...], size: int, *, hashes: bytes | None = None, hash_bytes: int = 0
    ) -> int:
        size += _WAITING_BYTES + len(hashes or b"")
        with self._changed:
            if self._end is not None:
                return 0
            if self._queue_bytes + size > QUEUE_BYTES_MAX:
                self._stop(End.SLOW, f"{QUEUE_BYTES_MAX} bytes wait to be written")
                return 0
            number = self._next
            self._next += 1
            at_us = (time.monotonic_ns() - self._begun_ns) // 1000
            self._queue.append(_Waiting(number, at_us, kind, fields, hash_bytes, hashes))
            self._queue_bytes += size
            self._changed.notify()
            return number

    def _stop(self, why: End, text: str) -> None:
        """Adds no more frames. With the lock."""
        if self._end is None:
            self._end = why, text
            self._changed.notify()

    # The writer's thread.

    def _run(self) -> None:
        try:
            self._write([_START.pack(MAGIC, FORMAT)])
            while batch := self._take():
                if not self._write_batch(batch):
                    break
                self._written()
        except OSError as error:
            self._fail(End.DISK, str(error))
        except Exception as error:
            logger.exception("kvferry: the writer of %s failed", self.path)
            self._fail(End.FAULT, str(error))
        self._finish()

    def _take(self) -> list[_Waiting]:
        """Returns the frames that wait; empty at the end."""
        with self._changed:
            while not self._queue and self._end is None:
                self._changed.wait()
            batch = list(self._queue)
            self._queue.clear()
            # A batch counts until it is written: two of them together would be twice the limit.
            self._taken_bytes = self._queue_bytes
            return batch

    def _written(self) -> None:
        with self._changed:
            self._queue_bytes -= self._taken_bytes
            self._taken_bytes = 0

    def _write_batch(self, batch: Iterable[_Waiting]) -> bool:
        """Writes frames; False: the file has its largest size."""
        frames: list[bytes] = []
        room = self._bytes_max - END_BYTES - self._bytes
        full = False
        for each in batch:
            frame = self._frame(each)
            room -= len(frame)
            if room < 0:
                full = True
                break
            frames.append(frame)
        self._write(frames)
        if full:
            self._fail(End.FULL, f"the file has its largest size, {self._bytes_max} bytes")
        return not full

    def _frame(self, each: _Waiting) -> bytes:
        fields: tuple[Any, ...] = each.fields
        if each.kind == Frame.REQUEST:
            identity, kind, limit_ms, body = fields
            body, packed = self._without_hashes(kind, body)
            fields = (identity, kind, limit_ms, msgspec.Raw(body), packed)
        elif each.hashes is not None:
            packed = self._hashes.compact(each.hashes, each.hash_bytes) if each.hash_bytes else []
            fields = (*fields, each.hash_bytes, packed)
        return frame_of(each.number, each.at_us, each.kind, _encode(fields))

    def _without_hashes(self, kind: int, body: bytes) -> tuple[bytes, list[Any]]:
        """Takes the hashes out of a message."""
        if kind == Kind.LOOKUP:
            lookup = _lookup(body)
            packed = self._hashes.compact(lookup.hashes, lookup.hash_bytes)
            lookup.hashes = b""
            return _encode(lookup), packed
        if kind == Kind.STORE:
            store = _store(body)
            if store.more_hashes:
                packed = self._hashes.compact(store.more_hashes, store.hash_bytes)
                store.more_hashes = b""
                return _encode(store), packed
        return body, []

    def _write(self, frames: list[bytes]) -> None:
        """Writes frames, and counts those that are written as a whole."""
        data = memoryview(b"".join(frames))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        finally:
            for frame in frames:
                if done < len(frame):
                    break
                done -= len(frame)
                self._earlier.append((self._bytes, self._frames))
                self._bytes += len(frame)
                self._frames += self._bytes > _START.size

    def _fail(self, why: End, text: str) -> None:
        """Ends the recording with the frames that are written."""
        with self._changed:
            # A recording that was to be closed, or was too slow, lost frames here, too.
            self._end = why, text
            self._queue.clear()
            self._queue_bytes = self._taken_bytes = 0

    def _finish(self) -> None:
        """Writes the end mark after the last whole frame, and reports an end that was not asked for."""
        why, text = self._end or (End.FAULT, "")
        if why != End.CLOSED:
            logger.warning(
                "kvferry: the recording %s ends after %d frames: %s", self.path, self._frames, text or why.name
            )
        try:
            self._write_end(why, text)
        except OSError as error:
            logger.warning("kvferry: the recording %s has no end mark: %s", self.path, error)
        finally:
            os.close(self._file)

    def _write_end(self, why: End, text: str) -> None:
        """Writes the end mark, where there is no room for it, in the place of the last frames."""
        at_us = (time.monotonic_ns() - self._begun_ns) // 1000
        room = [place for place in self._earlier if place[0] <= self._bytes - END_BYTES]
        for place in [(self._bytes, self._frames), *room[-1:]]:
            self._cut(*place)
            try:
                self._write([frame_of(self._frames, at_us, Frame.END, _encode((int(why), text[:_TEXT_MAX])))])
                return
            except OSError:
                # No part of an end mark stays.
                self._cut(*place)
                if not room or place == room[-1]:
                    raise

    def _cut(self, size: int, frames: int) -> None:
        """Removes what follows the first ``frames`` frames."""
        self._bytes, self._frames = size, frames
        # The file may be a device, which has no length.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, size)
            os.lseek(self._file, size, os.SEEK_SET)


_lookup = msgspec.msgpack.Decoder(wire.Lookup).decode
_store = msgspec.msgpack.Decoder(wire.Store).decode


def frame_of(number: int, at_us: int, kind: int, body: bytes) -> bytes:
    """Returns the bytes of a frame.

    Raises:
        ValueError: when it is too long.
    """
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"frame {number} has {len(body)} bytes, at most {FRAME_BYTES_MAX} are read")
    checksum = zlib.crc32(body, zlib.crc32(_CHECKED.pack(len(body), number, at_us, kind)))
    return _HEAD.pack(len(body), checksum, number, at_us, kind) + body


class LeaderSizes:
    """Records the sizes of each leader of an engine, once its tiers serve. For the client's thread alone."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._epoch = 0
        self._open: PendingRequest | None = None
        self._not_before = 0.0

    def turn(self, client: Any) -> float | None:
        """Asks a leader that is not recorded yet; returns when to call again, None: with the next answer."""
        if not self._recorder.recording or not client.listening or client.epoch == self._epoch:
            return None
        if self._open is not None:
            if not self._open.done:
                return None
            status = self._open.answer
            self._open = None
            if isinstance(status, wire.StatusAnswer) and status.epoch == client.epoch and status.ready:
                self._epoch = client.epoch
                self._recorder.leader(client.epoch, status)
                return None
        now = time.monotonic()
        if now < self._not_before:
            return self._not_before
        self._not_before = now + _LEADER_PAUSE_S
        self._open = client.request(wire.Status(), _LEADER_LIMIT_S)
        return self._not_before
