"""Sharing of device memory with other processes, by the CUDA driver's functions, whatever library allocated it."""

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

#: Bytes of a ``cudaIpcMemHandle_t``, and of a ``CUmemFabricHandle``.
IPC_HANDLE_BYTES = 64
#: Ways to share a chunk, as ``CUmemAllocationHandleType``: a file descriptor, or a fabric handle.
SHARED_BY_FD, SHARED_BY_FABRIC = 1, 8
_LIBRARY = "libcuda.so.1"
#: ``CU_STREAM_CAPTURE_MODE_RELAXED``: calls of this thread are no part of a capture by another thread.
_CAPTURE_RELAXED = 2
#: ``CU_STREAM_NON_BLOCKING``.
_STREAM_NON_BLOCKING = 1
#: ``CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS``.
_STREAMS_WRITE_WORDS = 122

#: ``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_LOCATION_TYPE_DEVICE``, ``CU_MEM_ACCESS_FLAGS_PROT_READWRITE``.
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class CudaError(OSError):
    """A call that the driver refused. As an ``OSError``, it is retried like a broken connection."""


_P, _R = ParamSpec("_P"), TypeVar("_R")


def _in_context(method: Callable[Concatenate["Context", _P], _R]) -> Callable[Concatenate["Context", _P], _R]:
    """Wraps a method that needs the context in :meth:`Context.current`."""

    @functools.wraps(method)
    def wrapped(self: "Context", /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        with self.current():
            return method(self, *arguments, **named)

    return wrapped


class Context:
    """The CUDA context of the thread that creates this object. Any thread may call the methods."""

    def __init__(self) -> None:
        """Takes the calling thread's context.

        Raises:
            CudaError: there is no driver or no context.
        """
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(f"the CUDA driver is missing: {error}") from error
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        if not self._context:
            raise CudaError("this thread has no CUDA context")
        self._stream = ctypes.c_void_p()
        self._thread = threading.local()

    @_in_context
    def uuid(self) -> str:
        """Returns the device's UUID as ``nvidia-smi -L`` prints it.

        A MIG instance has a UUID of its own, which only the newer function returns. The older one returns the UUID of
        the GPU, which all of its instances have in common.
        """
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        found, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", found, device)
        kind = "GPU"
        if hasattr(self._library, "cuDeviceGetUuid_v2"):
            self._call("cuDeviceGetUuid_v2", own, device)
            kind, found = ("GPU" if bytes(own) == bytes(found) else "MIG"), own
        digits = bytes(found).hex()
        return "-".join((kind, digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    @_in_context
    def range_of(self, address: int) -> tuple[int, int]:
        """Returns the first address and the size of the allocation that holds an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    @_in_context
    def handle_of(self, base: int) -> bytes:
        """Returns the IPC handle by which another process opens an allocation."""
        handle = (ctypes.c_ubyte * IPC_HANDLE_BYTES)()
        self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
        return bytes(handle)

    @_in_context
    def ways_to_share(self, base: int) -> list[int]:
        """Returns the ways in which a chunk of virtual memory management can be shared, the best for one host first.

        Raises:
            CudaError: the address is not in such a chunk.
        """
        ways = []
        with self._chunk(base) as chunk:
            for way in (SHARED_BY_FD, SHARED_BY_FABRIC):
                with contextlib.suppress(CudaError):
                    shared = self._share(chunk, way)
                    if isinstance(shared, int):
                        os.close(shared)
                    ways.append(way)
        return ways

    @_in_context
    def descriptor_of(self, base: int) -> int:
        """Returns a file descriptor by which another process opens a chunk; the caller closes it."""
        with self._chunk(base) as chunk:
            return self._share(chunk, SHARED_BY_FD)

    @_in_context
    def fabric_handle_of(self, base: int) -> bytes:
        """Returns a fabric handle by which another process opens a chunk."""
        with self._chunk(base) as chunk:
            return self._share(chunk, SHARED_BY_FABRIC)

    @contextlib.contextmanager
    def _chunk(self, base: int) -> Iterator[ctypes.c_uint64]:
        chunk = ctypes.c_uint64()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(chunk), ctypes.c_uint64(base))
        try:
            yield chunk
        finally:
            self._call("cuMemRelease", chunk)

    def _share(self, chunk: ctypes.c_uint64, way: int) -> Any:
        shared = ctypes.c_int(-1) if way == SHARED_BY_FD else (ctypes.c_ubyte * IPC_HANDLE_BYTES)()
        flags = ctypes.c_uint64(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(shared), chunk, ctypes.c_int(way), flags)
        return shared.value if isinstance(shared, ctypes.c_int) else bytes(shared)

    @_in_context
    def allocate(self, size: int) -> int:
        """Allocates device memory; returns its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    @_in_context
    def allocate_chunk(self, size: int, way: int) -> tuple[int, int]:
        """Allocates at least ``size`` bytes that can be shared in this way; returns the address and the real size.

        The memory stays allocated until the process ends.
        """
        device, granularity = ctypes.c_int(), ctypes.c_size_t()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        # CUmemAllocationProp: kind, ways to share, location (kind, number), a pointer, flags.
        wanted = struct.pack("IIIiQ8x", _PINNED, way, _ON_DEVICE, device.value, 0)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), wanted, ctypes.c_int(0))
        whole = -(-size // granularity.value) * granularity.value
        zero, length = ctypes.c_uint64(0), ctypes.c_size_t(whole)
        chunk, address = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(chunk), length, wanted, zero)
        try:
            self._call("cuMemAddressReserve", ctypes.byref(address), length, zero, zero, zero)
            self._call("cuMemMap", address, length, ctypes.c_size_t(0), chunk, zero)
        finally:
            # The mapping keeps the memory.
            self._call("cuMemRelease", chunk)
        access = struct.pack("IiI", _ON_DEVICE, device.value, _READ_WRITE)
        self._call("cuMemSetAccess", address, length, access, ctypes.c_size_t(1))
        return address.value, whole

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes; the write is complete on return."""
        self.write_all([(address, data)])

    @_in_context
    def write_all(self, pieces: list[tuple[int, bytes]]) -> None:
        """Writes bytes at several addresses; all writes are complete on return."""
        stream = self._own_stream()
        for address, data in pieces:
            size = ctypes.c_size_t(len(data))
            self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), data, size, stream)
        self._call("cuStreamSynchronize", stream)

    @_in_context
    def read_all(self, pieces: list[tuple[int, int]]) -> list[bytes]:
        """Reads bytes at several addresses (address and size), concurrently with the engine's streams."""
        stream = self._own_stream()
        found = [ctypes.create_string_buffer(size) for _, size in pieces]
        for (address, size), data in zip(pieces, found, strict=True):
            self._call("cuMemcpyAsync", data, ctypes.c_uint64(address), ctypes.c_size_t(size), stream)
        self._call("cuStreamSynchronize", stream)
        return [data.raw for data in found]

    def _own_stream(self) -> ctypes.c_void_p:
        if not self._stream:
            self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
        return self._stream

    @_in_context
    def can_mark(self) -> bool:
        """Whether a stream can write words to memory: the driver has the call, and the device supports it."""
        if not hasattr(self._library, "cuStreamWriteValue64_v2"):
            return False
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        try:
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_STREAMS_WRITE_WORDS), device)
        except CudaError:
            # The driver is older than the attribute.
            return False
        return value.value == 1

    def mark(self, stream: int, address: int, value: int) -> None:
        """Makes the device write a word after all work that was submitted to the stream so far.

        The calling thread's context must be that of the stream.
        """
        word = ctypes.c_uint64(address), ctypes.c_uint64(value)
        self._call("cuStreamWriteValue64_v2", ctypes.c_void_p(stream), *word, ctypes.c_uint(0))

    @_in_context
    def read(self, address: int, size: int) -> bytes:
        """Reads bytes."""
        data = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def bind(self) -> None:
        """Binds the context to the calling thread for good, and keeps the thread's calls out of others' graph captures.

        For kvferry's own threads, which make many calls.
        """
        if getattr(self._thread, "bound", False):
            return
        self._call("cuCtxSetCurrent", self._context)
        self._exchange_capture_mode(_CAPTURE_RELAXED)
        self._thread.bound = True

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Binds the context to the calling thread while the ``with`` block runs.

        Restores the thread's context and capture mode afterwards: a mode that stayed relaxed would hide unsafe calls
        from a later capture of the engine, and the thread may use another device by then.
        """
        if getattr(self._thread, "bound", False):
            yield
            return
        before = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        mode = self._exchange_capture_mode(_CAPTURE_RELAXED)
        try:
            if before.value != self._context.value:
                self._call("cuCtxSetCurrent", self._context)
            yield
        finally:
            if before.value != self._context.value:
                self._call("cuCtxSetCurrent", before)
            self._exchange_capture_mode(mode)

    def _exchange_capture_mode(self, mode: int) -> int:
        """Sets the capture mode of the calling thread, and returns the previous one."""
        exchanged = ctypes.c_int(mode)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CudaError(f"the CUDA driver has no {name}") from error
        code = function(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
            raise CudaError(f"{name} answered {known.decode() if known else 'an unknown error'} ({code})")
