"""An engine's KV memory: moved to where another process can map it, and described.

On the CPU the storage of the KV tensors is moved, in place, into shared memory with a file descriptor. Its name is
unlinked before anything is written to it, so that nothing remains however the engine ends. On a GPU the memory stays
where it is, and handles of its allocations are passed to the worker.
"""

import contextlib
import fcntl
import functools
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvferry import cuda
from kvferry.proofs import Proofs
from kvferry.sockets import SERVER_UID, SOCKET_PATH_BYTES_MAX, inside, open_directory, serves

FD_SOCKET_NAME = "fds.sock"
_HAND_OVER_LIMIT_S = 2.0
_TICKET_BYTES = 16
#: Most descriptors in one message.
_FDS_TOGETHER = 128
#: Room after the engine's own bytes, where the proof of the mapping is written.
_NONCE_ROOM_BYTES = 4096
_NONCE_BYTES = 32
#: Granularity of the driver's device allocations: smaller allocations share a piece, and with it a handle.
_NONCE_ON_DEVICE_BYTES = 2 << 20
#: Offset of the timeline word in that piece, after the proof.
_WORD_OFFSET_BYTES = 64
_SHM = "/dev/shm"
#: Longest wait for other ranks to move their memory, in addition to the time that its size takes.
_FOLDER_LIMIT_S = 60.0


class Unsupported(Exception):
    """KV memory that cannot be shared or described. The text names the reason and the remedy."""


@dataclass
class Piece:
    """One allocation that kvferry maps; ``size`` counts the engine's own bytes.

    In host memory ``fd`` is a descriptor of our own. On a device other processes open ``handle``, or the allocation
    consists of ``chunks`` (address and size), each shared by itself.
    """

    size: int
    address: int
    fd: int = -1
    handle: bytes = b""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    shared_by: int = cuda.SHARED_BY_FD

    def parts(self) -> list[tuple[int, int]]:
        """Returns address and size of each part that is shared by itself."""
        return self.chunks or [(self.address, self.size)]


@dataclass(frozen=True)
class Place:
    """The rank that owns the memory, and its content, as docs/wire.md defines them."""

    rank: int
    tp_size: int
    shard: int
    content: bytes


@dataclass(frozen=True)
class Slices:
    """Which part of the model's KV the tensors of a rank hold, as docs/wire.md defines it, with axes of these tensors.

    ``kv_heads`` and ``head_axis`` are None where every rank holds everything.
    """

    token_axis: int
    kv_heads: int | None = None
    head_axis: int | None = None

    def describe(self, axes: dict[int, int]) -> dict[str, Any] | None:
        """Returns the entry of a registration that has these axes; None where it has not all of them."""
        if self.token_axis not in axes or (self.head_axis is not None and self.head_axis not in axes):
            return None
        token_axis = axes[self.token_axis]
        if self.head_axis is None:
            return {"whole": {"token_axis": token_axis}}
        return {"heads": {"kv_heads": self.kv_heads, "head_axis": axes[self.head_axis], "token_axis": token_axis}}


@dataclass(frozen=True)
class Group:
    """Layers with the same pages, as docs/wire.md defines a group. A layer may have several tensors: states do."""

    tensors: dict[str, torch.Tensor | list[torch.Tensor]]
    engine_page_tokens: int
    device_pages: int
    role: str = "kv"
    attention: str = "full"
    window_tokens: int = 0
    eagle: bool = False
    slices: Slices | None = None

    def distinct(self) -> list[torch.Tensor]:
        """Returns the tensors in order, each once: layers that use the cache of an earlier one have the same memory.

        Raises:
            Unsupported: for a cache that is not a tensor, or not in memory of the CPU or of a CUDA device.
        """
        found: dict[tuple, torch.Tensor] = {}
        for name, layer in self.tensors.items():
            for tensor in layer if isinstance(layer, (list, tuple)) else [layer]:
                if not isinstance(tensor, torch.Tensor):
                    raise Unsupported(f"the KV cache of layer {name} is {type(tensor).__name__}, not a tensor")
                if tensor.device.type not in ("cpu", "cuda"):
                    raise Unsupported(
                        f"the KV cache of layer {name} is on {tensor.device}: kvferry reaches memory of the CPU and "
                        "of CUDA devices"
                    )
                found.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), tensor)
        return list(found.values())


class KvMemory:
    """The KV memory of one rank. Several groups may use the same allocations, and are registered together."""

    def __init__(
        self,
        groups: list[Group],
        place: Place,
        *,
        hash_tokens: int = 0,
        hit_tokens: int = 0,
        served: bool = True,
        whole: bool = False,
    ):
        """Moves the tensors of all groups. Tensors on a device stay, and are marked: no work uses them yet.

        ``hash_tokens`` and ``hit_tokens`` are those of docs/wire.md, 0 for the page of an only group. Memory that is
        not ``served`` is only checked. With ``whole``, memory in chunks is refused: an allocator that takes memory back
        from a sleeping engine puts other chunks at the same addresses.

        Raises:
            Unsupported: nothing is shared then. Unless a move itself failed, nothing is moved either.
        """
        self._place = place
        self._hash_tokens, self._hit_tokens = hash_tokens, hit_tokens
        #: Whether kvferry copies pages of the memory. Other memory is only checked.
        self.served = served
        self._pieces: list[Piece] = []
        self._context: cuda.Context | None = None
        #: Whether the device can mark its progress.
        self._marks = False
        self._nonce: Piece | None = None
        self._proofs: Proofs | None = None
        self._groups = [_Described.of(group) for group in groups]
        tensors = [tensor for group in self._groups for tensor in group.tensors]
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) != 1:
            where = ", ".join(sorted(devices)) or "nowhere"
            raise Unsupported(f"the engine's KV cache is on {where}: one device is expected")
        if tensors[0].device.type == "cuda":
            try:
                self._open_device(tensors, whole)
            except cuda.CudaError as error:
                raise Unsupported(
                    f"the KV cache on {tensors[0].device} cannot be shared: {error}. Memory of some allocators, such "
                    "as cudaMallocAsync, has no handles: leave them out"
                ) from error
        else:
            self._share([tensor.untyped_storage() for tensor in tensors])

    def tensors(self) -> list[tuple[list[torch.Tensor], int]]:
        """Returns the tensors of each group, each once, and the number of its pages."""
        return [(described.tensors, described.group.device_pages) for described in self._groups]

    @property
    def on_device(self) -> bool:
        """Whether the memory is a device's, which may still write to it after a call has returned."""
        return self._context is not None

    @property
    def has_timeline(self) -> bool:
        """Whether the device can write its progress to a timeline word."""
        return self._marks

    def mark(self, stream: int, through: int) -> None:
        """Makes the device write ``through`` to its timeline word after the work submitted to the stream so far.

        Raises:
            CudaError: the word will not be written.
        """
        if self._context is None or self._nonce is None:
            raise cuda.CudaError("there is no device")
        self._context.mark(stream, self._nonce.address + _WORD_OFFSET_BYTES, through)

    def marked(self) -> int:
        """Returns the timeline word: the last mark that the device has written. Waits for the read of 8 bytes.

        Raises:
            CudaError: the device cannot be read.
        """
        if self._context is None or self._nonce is None:
            raise cuda.CudaError("there is no device")
        (word,) = self._context.read_all([(self._nonce.address + _WORD_OFFSET_BYTES, 8)])
        return int.from_bytes(word, "little")

    def close(self) -> None:
        """Closes the descriptors. The engine keeps its memory.

        The memory of the proof on a device stays until the process ends: a worker may still have it open.
        """
        for piece in self._pieces:
            if piece.fd >= 0:
                os.close(piece.fd)
        self._pieces = []

    def bind_thread(self) -> None:
        """Binds the calling thread to the device's context. Must precede the thread's first call to the device."""
        if self._context is not None:
            self._context.bind()

    def _open_device(self, tensors: list[torch.Tensor], whole: bool) -> None:
        self._context = cuda.Context()
        bases: dict[int, int] = {}
        for tensor in tensors:
            address, end = tensor.data_ptr(), tensor.data_ptr() + _bytes_of(tensor)
            while address < end:
                base, size = self._context.range_of(address)
                bases[base] = size
                address = base + size
        self._pieces = _pieces(self._context, bases)
        if whole and any(piece.chunks for piece in self._pieces):
            raise Unsupported(
                f"the KV cache on {tensors[0].device} lies in chunks, which its allocator takes back while the engine "
                "sleeps: let kvferry allocate it (kv_memory 'auto')"
            )
        # The proof is written into memory of its own, because every byte of the engine's allocations may be in use.
        # That memory is shared in the same way as the allocations: handles of whole allocations do not work in another
        # PID namespace, chunks do.
        chunks = [piece for piece in self._pieces if piece.chunks]
        if len(chunks) == len(self._pieces):
            way = chunks[0].shared_by
            proof_at, size = self._context.allocate_chunk(_NONCE_ON_DEVICE_BYTES, way)
            self._nonce = Piece(size, proof_at, chunks=[(proof_at, size)], shared_by=way)
        else:
            proof_at = self._context.allocate(_NONCE_ON_DEVICE_BYTES)
            base, size = self._context.range_of(proof_at)
            self._nonce = Piece(size, proof_at, handle=self._context.handle_of(base))
        self._context.write(proof_at + _WORD_OFFSET_BYTES, bytes(8))
        self._marks = self._context.can_mark()
        # Only served memory is marked: layers of other kinds may read bytes that no token has written.
        parts = [part for piece in self._pieces for part in piece.parts()]
        self._proofs = Proofs(self._context, parts, tensors, new=self.served)

    def _share(self, storages: list[torch.UntypedStorage]) -> None:
        by_address = {storage.data_ptr(): storage for storage in storages}
        # All other ranks may get the lock before this one, and move their memory at 256 MiB a second.
        wanted = sum(storage.nbytes() for storage in by_address.values())
        limit_s = _FOLDER_LIMIT_S + self._place.tp_size * wanted / (256 << 20)
        with contextlib.closing(_Folder(_SHM, limit_s)):
            self._move(by_address)

    def _move(self, by_address: dict[int, torch.UntypedStorage]) -> None:
        wanted = sum(storage.nbytes() for storage in by_address.values() if not storage.is_shared())
        room = os.statvfs(_SHM)
        free = room.f_bavail * room.f_frsize
        if wanted > free:
            raise Unsupported(
                f"{_SHM} has {free} bytes free, the KV cache takes {wanted}: give it more room "
                f"(mount -o remount,size=..., or --shm-size for a container), or make the KV cache smaller"
            )
        try:
            for storage in by_address.values():
                theirs, size = storage._share_fd_cpu_()
                fd = os.dup(theirs)
                self._pieces.append(Piece(size, storage.data_ptr(), fd=fd))
                os.ftruncate(fd, size + _NONCE_ROOM_BYTES)
        except (OSError, RuntimeError) as error:
            # What was moved stays moved: only the engine knows who has its address.
            self.close()
            raise Unsupported(f"the KV cache cannot be moved to {_SHM}: {error}") from error

    def describe(self, tickets: list[bytes], *, timeline: bool = False) -> dict[str, Any]:
        """Returns a registration of all groups, with a new proof. ``tickets`` name the descriptors, in order.

        With ``timeline`` the registration includes the place of the device's timeline word.
        """
        pieces = self._pieces
        proof = secrets.token_bytes(_NONCE_BYTES)
        allocations, nonce = self._allocations(pieces, tickets, proof)
        proofs = self._proofs_of(pieces, nonce["allocation"])
        device: dict[str, Any] = {} if self._context is None else {"device_uuid": self._context.uuid()}
        if timeline:
            word = nonce["offset_bytes"] + _WORD_OFFSET_BYTES
            device["timeline"] = {"allocation": nonce["allocation"], "offset_bytes": word}
        return {
            **device,
            "groups": [described.describe(pieces) for described in self._groups],
            "hash_tokens": self._hash_tokens,
            "hit_tokens": self._hit_tokens,
            "content": self._place.content,
            "rank": self._place.rank,
            "tp_size": self._place.tp_size,
            "shard": self._place.shard,
            "allocations": allocations,
            "nonce": nonce,
            "proofs": proofs,
        }

    def _proofs_of(self, pieces: list[Piece], proven: int) -> list[dict[str, Any]]:
        """Returns the bytes that a worker must find in these pieces, in addition to the nonce, which proves one."""
        found: list[tuple[int, int, bytes]] = []
        for index, piece in enumerate(pieces):
            if self._proofs is not None:
                read = self._proofs.read(piece.parts())
                found += [(index, address - piece.address, data) for address, data in read]
            elif index != proven:
                data = secrets.token_bytes(_NONCE_BYTES)
                os.pwrite(piece.fd, data, piece.size)
                found.append((index, piece.size, data))
        return [{"allocation": index, "offset_bytes": offset, "bytes": data} for index, offset, data in found]

    def _allocations(
        self, pieces: list[Piece], tickets: list[bytes], proof: bytes
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the registration's entries for the pieces, and its nonce: the place and bytes of the proof."""
        if self._context is None or self._nonce is None:
            first = pieces[0]
            os.pwrite(first.fd, proof, first.size)
            shared = [
                {"kind": "shared_memory", "handle": {"ticket": ticket}, "bytes": piece.size + _NONCE_ROOM_BYTES}
                for piece, ticket in zip(pieces, tickets, strict=True)
            ]
            return shared, {"allocation": 0, "offset_bytes": first.size, "bytes": proof}
        nonce = self._nonce
        self._context.write(nonce.address, proof)
        base, _ = self._context.range_of(nonce.address)
        # For the driver, the nonce's small allocation may be a part of one of the engine's.
        holders = [piece for piece in pieces if piece.address == base]
        listed = pieces if holders else [*pieces, nonce]
        place = pieces.index(holders[0]) if holders else len(pieces)
        named = iter(tickets)
        device = [{"kind": "device", "handle": self._handle(piece, named), "bytes": piece.size} for piece in listed]
        return device, {"allocation": place, "offset_bytes": nonce.address - base, "bytes": proof}

    def _handle(self, piece: Piece, tickets: Iterator[bytes]) -> dict[str, Any]:
        if piece.handle or self._context is None:
            return {"cuda_ipc": piece.handle}

        def shared(base: int) -> dict[str, bytes]:
            if piece.shared_by == cuda.SHARED_BY_FD:
                return {"ticket": next(tickets)}
            return {"cuda_fabric": self._context.fabric_handle_of(base)}

        return {"chunks": [{"handle": shared(base), "bytes": size} for base, size in piece.chunks]}

    def _descriptors(self, pieces: list[Piece]) -> list[Callable[[], int]]:
        """Returns a function for each descriptor of the pieces, in order; the caller closes what it returns."""
        if self._context is None:
            return [functools.partial(os.dup, piece.fd) for piece in pieces]
        by_fd = [piece for piece in pieces if piece.shared_by == cuda.SHARED_BY_FD]
        chunks = [base for piece in by_fd for base, _ in piece.chunks]
        return [functools.partial(self._context.descriptor_of, base) for base in chunks]

    def hand_over(self, directory: Path) -> tuple[list[bytes], int | None, int | None]:
        """Sends the memory's descriptors to the worker in ``directory``.

        Returns their tickets, the id of the process that received them (0 when it is dead, None when it cannot be
        seen), and its pidfd, which the caller closes.

        Raises:
            OSError: the worker does not take them.
            Unsupported: the worker cannot open this memory.
        """
        pieces = self._pieces
        if self._nonce is not None:
            pieces = [*pieces, self._nonce]
        by_handle = any(piece.handle for piece in pieces)
        opened = open_directory(directory)
        try:
            return _send_fds(directory, opened, self._descriptors(pieces), by_handle=by_handle)
        finally:
            os.close(opened)


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = (step * (length - 1) for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def _pieces(context: cuda.Context, bases: dict[int, int]) -> list[Piece]:
    """Returns pieces of device memory: each is one allocation, or a sequence of adjacent chunks."""
    pieces: list[Piece] = []
    for base, size in sorted(bases.items()):
        try:
            pieces.append(Piece(size, base, handle=context.handle_of(base)))
            continue
        except cuda.CudaError as error:
            refused = error
        try:
            ways = context.ways_to_share(base)
        except cuda.CudaError:
            raise refused from None
        if not ways:
            raise cuda.CudaError(f"chunks that were made without a way to share them ({refused})")
        last = pieces[-1] if pieces else None
        if last and last.chunks and last.address + last.size == base and last.shared_by == ways[0]:
            last.chunks.append((base, size))
            last.size += size
        else:
            pieces.append(Piece(size, base, chunks=[(base, size)], shared_by=ways[0]))
    return pieces


@dataclass(frozen=True)
class _Described:
    """A group's tensors, and the view of each."""

    group: Group
    tensors: list[torch.Tensor]
    views: list["_View"]

    @classmethod
    def of(cls, group: Group) -> "_Described":
        tensors = group.distinct()
        slices = group.slices
        named = () if slices is None else (slices.token_axis, slices.head_axis)
        return cls(group, tensors, [_View.of(tensor, group.device_pages, named) for tensor in tensors])

    def place(self, layer: int, pieces: list[Piece]) -> tuple[int, int]:
        """Returns the index of the piece that holds a tensor, and the offset of its first byte in that piece."""
        address = self.tensors[layer].data_ptr()
        for index, piece in enumerate(pieces):
            if piece.address <= address < piece.address + piece.size:
                return index, address - piece.address
        raise Unsupported(f"tensor {layer} is in no known memory")

    def describe(self, pieces: list[Piece]) -> dict[str, Any]:
        """Returns the group's entry of a registration."""
        group = self.group
        return {
            "attention": group.attention,
            "window_tokens": group.window_tokens,
            "eagle": group.eagle,
            "engine_page_tokens": group.engine_page_tokens,
            "device_pages": group.device_pages,
            "layers": len(self.tensors),
            "tensors": [self._tensor(layer, pieces) for layer in range(len(self.tensors))],
        }

    def _tensor(self, layer: int, pieces: list[Piece]) -> dict[str, Any]:
        tensor, view = self.tensors[layer], self.views[layer]
        allocation, offset_bytes = self.place(layer, pieces)
        slices = None if self.group.slices is None else self.group.slices.describe(view.axes)
        return {
            **({} if slices is None else {"slices": slices}),
            "layer": layer,
            "role": self.group.role,
            "allocation": allocation,
            "offset_bytes": offset_bytes,
            "shape": view.shape,
            "strides": view.strides,
            "element_bytes": tensor.element_size(),
            "page_axis": 0,
            "page_bytes": view.page_elements * tensor.element_size(),
            "page_stride_bytes": view.strides[0] * tensor.element_size(),
        }


class _Folder:
    """A lock on a folder, held by one rank at a time: each then sees the free space that the others have left."""

    def __init__(self, path: str, limit_s: float):
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        until = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    self.close()
                    raise Unsupported(f"another process has locked {path} for {limit_s:.0f} s") from None
                time.sleep(0.01)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class _View:
    """A tensor's axes, pages first, without those of one index. ``axes``: the places of the named ones."""

    shape: list[int]
    strides: list[int]
    page_elements: int
    axes: dict[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, pages: int, named: Sequence[int | None] = ()) -> "_View":
        blocks, *shape = tensor.shape
        stride, *strides = tensor.stride()
        if blocks % pages or blocks == 0:
            raise Unsupported(f"a KV tensor has {blocks} blocks along its first axis, the engine counts {pages} pages")
        if blocks != pages:
            # The kernel's blocks are smaller than the engine's: a page is several consecutive kernel blocks. No axis
            # counts its tokens.
            named = ()
            shape, strides = [blocks // pages, *shape], [stride, *strides]
            stride *= blocks // pages
        inside = enumerate(zip(shape, strides, strict=True), 1)
        kept = [(axis, length, step) for axis, (length, step) in inside if length != 1 or axis in named]
        elements = 1
        for _, length, _ in kept:
            elements *= length
        lengths, steps = [length for _, length, _ in kept], [step for _, _, step in kept]
        places = {axis: place for place, (axis, _, _) in enumerate(kept, 1) if axis in named}
        return cls([pages, *lengths], [stride, *steps], elements, places)


def _send_fds(
    directory: Path, opened: int, descriptors: list[Callable[[], int]], *, by_handle: bool = False
) -> tuple[list[bytes], int | None, int | None]:
    """Sends descriptors to the worker of an open directory.

    With ``by_handle`` the worker also opens memory by CUDA IPC handles.
    """
    tickets: list[bytes] = []
    path = directory / FD_SOCKET_NAME
    with _connected(path, inside(opened, FD_SOCKET_NAME)) as worker:
        process = _process_of(worker, path)
        if by_handle and not _in_our_namespace(process):
            raise Unsupported(
                f"the worker at {path} lives in another PID namespace, where the driver does not understand CUDA IPC "
                "handles: let both share one (hostPID or shareProcessNamespace of a pod, --pid of a container), or let "
                "the engine allocate in chunks (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
            )
        for first in range(0, len(descriptors), _FDS_TOGETHER):
            named, fds = [], []
            try:
                for descriptor in descriptors[first : first + _FDS_TOGETHER]:
                    fds.append(descriptor())
                    named.append(secrets.token_bytes(_TICKET_BYTES))
                socket.send_fds(worker, [b"".join(named)], fds)
                if worker.recv(1) != b"\x01":
                    raise OSError(f"{path}: the worker did not take the descriptors")
            finally:
                for fd in fds:
                    os.close(fd)
            tickets += named
    return tickets, *_watched(process)


@contextlib.contextmanager
def _connected(path: Path, through: str) -> Iterator[socket.socket]:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise OSError(f"{path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as worker:
        worker.settimeout(_HAND_OVER_LIMIT_S)
        worker.connect(through)
        yield worker


def _process_of(worker: socket.socket, path: Path) -> int:
    peer = worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _group = struct.unpack("3i", peer)
    if not serves(user):
        raise OSError(
            f"{path} is served by uid {user}: run the engine and kvferry as one user, or set {SERVER_UID} to the "
            "uid of kvferry"
        )
    return process


def _in_our_namespace(process: int) -> bool:
    """Whether a process is in this one's PID namespace. True for a process whose namespace cannot be read."""
    if process <= 0:
        # The process has no PID in this namespace.
        return False
    try:
        theirs, ours = os.stat(f"/proc/{process}/ns/pid"), os.stat("/proc/self/ns/pid")
    except OSError:
        return True
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def _watched(process: int) -> tuple[int | None, int | None]:
    if process <= 0:
        # The process is in another PID namespace.
        return None, None
    try:
        return process, os.pidfd_open(process)
    except ProcessLookupError:
        return 0, None
    except OSError:
        return None, None
