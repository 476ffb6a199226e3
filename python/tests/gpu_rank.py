"""A rank with KV memory on a GPU, for test_cuda.py: run with the CUDA driver for tests.

Stores pages, overwrites the memory, loads the pages elsewhere, and compares every byte.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from daemon import TIMEOUT_S, Daemon, eventually

import kvferry.memory
from kvferry import cuda, wire
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession

PAGES, LAYERS, PAGE_ELEMENTS, ELEMENT_BYTES = 12, 3, 100, 2
PAGE_BYTES = PAGE_ELEMENTS * ELEMENT_BYTES
ENGINE = b"g" * 16
#: Granularity of a chunk in bytes, as in real drivers.
CHUNK_BYTES = 2 << 20


class OnDevice(torch.Tensor):
    """A tensor of half-precision numbers that reports a GPU as its device, so that no GPU library is needed."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]
    address: int

    def data_ptr(self) -> int:
        return self.address


def on_device(address: int) -> OnDevice:
    tensor = torch.empty(PAGES, PAGE_ELEMENTS, dtype=torch.half, device="meta").as_subclass(OnDevice)
    tensor.address = address
    return tensor


def on_device_in_whole_pages(address: int) -> list[OnDevice]:
    """Layers that vLLM allocates with layout BLNHC: a page has its bytes of all layers in one range."""
    heads, tokens, content = 2, 5, 10
    strides = (LAYERS * PAGE_ELEMENTS, content, heads * content, 1)
    layers = []
    for layer in range(LAYERS):
        shape = (PAGES, heads, tokens, content)
        tensor = torch.empty_strided(shape, strides, dtype=torch.half, device="meta").as_subclass(OnDevice)
        tensor.address = address + layer * PAGE_BYTES
        layers.append(tensor)
    return layers


def context() -> cuda.Context:
    """Creates a context, as an engine does before it uses kvferry."""
    library = ctypes.CDLL("libcuda.so.1")
    made = ctypes.c_void_p()
    assert library.cuInit(0) == 0
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(made), 1) == 0
    assert library.cuCtxSetCurrent(made) == 0
    return cuda.Context()


def in_chunks(sizes: list[int], way: int) -> int:
    """Allocates memory in chunks that can be shared in this way, as PyTorch does for expandable segments."""
    library = ctypes.CDLL("libcuda.so.1")
    base, device = ctypes.c_uint64(), ctypes.c_int()
    assert library.cuCtxGetDevice(ctypes.byref(device)) == 0
    # CUmemAllocationProp: kind, ways to share, location (kind, number), a pointer, flags.
    properties = struct.pack("IIIiQ8x", 1, way, 1, device.value, 0)
    access = struct.pack("IiI", 1, device.value, 3)
    zero = ctypes.c_uint64(0)
    whole = ctypes.c_size_t(sum(sizes))
    assert library.cuMemAddressReserve(ctypes.byref(base), whole, zero, zero, zero) == 0
    at = base.value
    for size in sizes:
        chunk = ctypes.c_uint64()
        assert library.cuMemCreate(ctypes.byref(chunk), ctypes.c_size_t(size), properties, zero) == 0
        assert library.cuMemMap(ctypes.c_uint64(at), ctypes.c_size_t(size), zero, chunk, zero) == 0
        assert library.cuMemRelease(chunk) == 0
        at += size
    assert library.cuMemSetAccess(base, whole, access, ctypes.c_size_t(1)) == 0
    return base.value


def no_event() -> Callable[[], bool]:
    """Stands for the event of a pass that the device marks, which needs none."""
    raise AssertionError("an event was recorded although the device marks its progress")


def main(socket_dir: Path, kind: str) -> None:
    gpu = context()
    # Two adjacent layers in one allocation, as an engine's allocator places them, and a third in its own.
    match kind:
        case "cuda_ipc":
            both, third = gpu.allocate(1 << 20), gpu.allocate(1 << 16)
        case "ticket":
            both = in_chunks([CHUNK_BYTES, CHUNK_BYTES], cuda.SHARED_BY_FD)
            third = in_chunks([2 * CHUNK_BYTES], cuda.SHARED_BY_FD)
        case _:
            both, third = (in_chunks([CHUNK_BYTES] * 3, cuda.SHARED_BY_FABRIC) for _ in range(2))
    # In chunks, the second layer crosses the end of a chunk.
    at = 512 if kind == "cuda_ipc" else CHUNK_BYTES - 3584
    layers = [on_device(both + at), on_device(both + at + PAGES * PAGE_BYTES), on_device(third)]
    chance = random.Random(1)

    def fill() -> None:
        for layer in layers:
            gpu.write(layer.address, chance.randbytes(PAGES * PAGE_BYTES))

    def page(number: int) -> list[bytes]:
        return [gpu.read(layer.address + number * PAGE_BYTES, PAGE_BYTES) for layer in layers]

    # A few chunks need several messages.
    kvferry.memory._FDS_TOGETHER = 2
    group = Group({str(index): layer for index, layer in enumerate(layers)}, engine_page_tokens=8, device_pages=PAGES)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
    described = memory.describe([bytes(16)] * 8)
    assert described["device_uuid"] == gpu.uuid()
    offsets = sorted(tensor["offset_bytes"] for tensor in described["groups"][0]["tensors"])
    assert offsets == [0, at, at + PAGES * PAGE_BYTES]
    handles = [allocation["handle"] for allocation in described["allocations"]]
    chunks = [chunk["handle"] for handle in handles for chunk in handle.get("chunks", [])]
    # Only chunks of a tensor's memory, and one for the proof of the mapping.
    assert {name for chunk in chunks for name in chunk} == ({kind} if kind != "cuda_ipc" else set())
    assert len(chunks) == {"cuda_ipc": 0, "ticket": 4, "cuda_fabric": 4}[kind], handles
    assert ("cuda_ipc" in handles[-1]) == (kind == "cuda_ipc")
    rank = RankSession(socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
    scheduler = EngineClient(socket_dir / "leader", ENGINE, first_id=1)
    scheduler.start()
    eventually("the rank is registered", lambda: rank.registered)
    Daemon(socket_dir).wait_ready()

    def request(message: object, *, written: bool = False) -> object:
        pending = scheduler.request(message, TIMEOUT_S)  # type: ignore[arg-type]
        if written:
            rank.wrote(pending.id)
        assert pending.wait(TIMEOUT_S)
        assert pending.answer is not None, pending.failure
        return pending.answer

    def lookup(slot: int) -> int:
        hashes = b"".join(number.to_bytes(16, "big") for number in range(1, 4))
        return request(wire.Lookup(slot=slot, namespace=b"", hash_bytes=16, hashes=hashes)).hit_pages  # type: ignore[attr-defined]

    fill()
    stored, target = [4, 5, 1], [0, 7, 8]
    kept = [page(number) for number in stored]
    assert lookup(1) == 0
    request(wire.Store(1, [wire.part(0, wire.runs(stored))]), written=True)
    fill()
    expected = [page(number) for number in range(PAGES)]
    assert lookup(2) == 3
    assert request(wire.Load(2, [wire.part(0, wire.runs(target))])).pages == 3  # type: ignore[attr-defined]
    for number, content in zip(target, kept, strict=True):
        expected[number] = content
    assert [page(number) for number in range(PAGES)] == expected
    # The device writes late, and only its own timeline reports the end.
    library, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert library.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(1)) == 0
    assert memory.has_timeline
    contents = [chance.randbytes(PAGES * PAGE_BYTES) for _ in layers]
    for _ in range(40):
        for layer, content in zip(layers, contents, strict=True):
            size, address = ctypes.c_size_t(len(content)), ctypes.c_uint64(layer.address)
            assert library.cuMemcpyHtoDAsync_v2(address, content, size, stream) == 0
    hashes = b"".join(number.to_bytes(16, "big") for number in range(11, 14))
    found = request(wire.Lookup(slot=3, namespace=b"", hash_bytes=16, hashes=hashes))
    assert found.hit_pages == 0  # type: ignore[attr-defined]
    again = scheduler.request(wire.Store(3, [wire.part(0, wire.runs([9, 3, 6]))]), TIMEOUT_S)
    rank.wrote(again.id, no_event, stream.value)
    assert again.wait(TIMEOUT_S)
    assert again.answer is not None, again.failure
    kept = [[content[n * PAGE_BYTES :][:PAGE_BYTES] for content in contents] for n in (9, 3, 6)]
    fill()
    found = request(wire.Lookup(slot=4, namespace=b"", hash_bytes=16, hashes=hashes))
    assert found.hit_pages == 3  # type: ignore[attr-defined]
    request(wire.Load(4, [wire.part(0, wire.runs([1, 2, 10]))]))
    assert [page(number) for number in (1, 2, 10)] == kept
    scheduler.close()
    worker = Path(f"/proc/{rank._process}/maps")
    assert "fake-cuda" in worker.read_text()
    rank.close()
    assert "memfd:fake-cuda" not in worker.read_text(), "its memory is still open"
    print("every byte is right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
