"""Device memory as other processes open it: by the CUDA driver's own functions, whatever library allocated it."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

#: Bytes of a ``cudaIpcMemHandle_t``, and of a ``CUmemFabricHandle``.
IPC_HANDLE_BYTES = 64
#: Ways to share a chunk, as ``CUmemAllocationHandleType``: a file descriptor, or a fabric handle.
SHARED_BY_FD, SHARED_BY_FABRIC = 1, 8
_LIBRARY = "libcuda.so.1"
#: ``CU_STREAM_CAPTURE_MODE_RELAXED``: what this thread does is no part of a capture that another one makes.
_CAPTURE_RELAXED = 2
#: ``CU_STREAM_NON_BLOCKING``.
_STREAM_NON_BLOCKING = 1


class CudaError(OSError):
    """A call that the driver refused: as with a socket that is gone, it may be asked again."""


class Context:
    """The context of the thread that makes this. Its methods may be called by any thread."""

    def __init__(self) -> None:
        """Takes the calling thread's context.

        Raises:
            CudaError: without a driver or a context.
        """
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(f"the CUDA driver is not there: {error}") from error
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        if not self._context:
            raise CudaError("this thread has no CUDA context")
        self._stream = ctypes.c_void_p()
        self._thread = threading.local()

    def uuid(self) -> str:
        """The device, as ``nvidia-smi -L`` writes it."""
        device = ctypes.c_int()
        self.bind()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", found, device)
        digits = bytes(found).hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def range_of(self, address: int) -> tuple[int, int]:
        """First address and size of the allocation that holds an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.bind()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def handle_of(self, base: int) -> bytes:
        """How another process opens an allocation."""
        handle = (ctypes.c_ubyte * IPC_HANDLE_BYTES)()
        self.bind()
        self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
        return bytes(handle)

    def ways_to_share(self, base: int) -> list[int]:
        """The ways in which a chunk of virtual memory management can be shared, the best for one host first.

        Raises:
            CudaError: it is no such chunk.
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

    def descriptor_of(self, base: int) -> int:
        """A file descriptor by which another process opens a chunk; the caller's to close."""
        with self._chunk(base) as chunk:
            return self._share(chunk, SHARED_BY_FD)

    def fabric_handle_of(self, base: int) -> bytes:
        """A fabric handle by which another process opens a chunk."""
        with self._chunk(base) as chunk:
            return self._share(chunk, SHARED_BY_FABRIC)

    @contextlib.contextmanager
    def _chunk(self, base: int) -> Iterator[ctypes.c_uint64]:
        chunk = ctypes.c_uint64()
        self.bind()
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

    def allocate(self, size: int) -> int:
        """New memory; gives its address."""
        address = ctypes.c_uint64()
        self.bind()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes; they are there when this returns."""
        self.bind()
        if not self._stream:
            self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
        size = ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), data, size, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def can_mark(self) -> bool:
        """Whether the device can write words by itself."""
        return hasattr(self._library, "cuStreamWriteValue64_v2")

    def mark(self, stream: int, address: int, value: int) -> None:
        """Lets the device write a word behind everything that the stream was given so far.

        The calling thread has a context: that of the stream.
        """
        word = ctypes.c_uint64(address), ctypes.c_uint64(value)
        self._call("cuStreamWriteValue64_v2", ctypes.c_void_p(stream), *word, ctypes.c_uint(0))

    def read(self, address: int, size: int) -> bytes:
        """Reads bytes."""
        data = ctypes.create_string_buffer(size)
        self.bind()
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def bind(self) -> None:
        """Makes it the calling thread's own, and keeps that thread's calls out of graphs that others capture."""
        if getattr(self._thread, "bound", False):
            return
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self._thread.bound = True

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
