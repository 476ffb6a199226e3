"""A rank with KV memory on a GPU, for test_cuda.py: run with the CUDA driver for tests.

Stores pages, spoils the memory, loads them elsewhere, and compares every byte.
"""

import ctypes
import random
import sys
from pathlib import Path

import torch
from daemon import eventually

from kvferry import cuda, wire
from kvferry.client import Client
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession

PAGES, LAYERS, PAGE_ELEMENTS, ELEMENT_BYTES = 12, 3, 100, 2
PAGE_BYTES = PAGE_ELEMENTS * ELEMENT_BYTES
ENGINE = b"g" * 16


class OnDevice(torch.Tensor):
    """A tensor of half-precision numbers that says that it lies on a GPU, where no library for tensors is needed."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]
    address: int

    def data_ptr(self) -> int:
        return self.address


def on_device(address: int) -> OnDevice:
    tensor = torch.empty(PAGES, PAGE_ELEMENTS, dtype=torch.half, device="meta").as_subclass(OnDevice)
    tensor.address = address
    return tensor


def context() -> cuda.Context:
    """As an engine has one before it knows of kvferry."""
    library = ctypes.CDLL("libcuda.so.1")
    made = ctypes.c_void_p()
    assert library.cuInit(0) == 0
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(made), 1) == 0
    assert library.cuCtxSetCurrent(made) == 0
    return cuda.Context()


def main(socket_dir: Path) -> None:
    gpu = context()
    # Two layers behind each other in one allocation, as an engine's own allocator gives them out, the third by itself.
    both, third = gpu.allocate(1 << 20), gpu.allocate(1 << 16)
    layers = [on_device(both + 512), on_device(both + 512 + PAGES * PAGE_BYTES), on_device(third)]
    chance = random.Random(1)

    def fill() -> None:
        for layer in layers:
            gpu.write(layer.address, chance.randbytes(PAGES * PAGE_BYTES))

    def page(number: int) -> list[bytes]:
        return [gpu.read(layer.address + number * PAGE_BYTES, PAGE_BYTES) for layer in layers]

    group = Group({str(index): layer for index, layer in enumerate(layers)}, engine_page_tokens=8, device_pages=PAGES)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0))
    described = memory.describe(0, [])
    assert described["device_uuid"] == gpu.uuid()
    assert [tensor["offset_bytes"] for tensor in described["tensors"]] == [512, 512 + PAGES * PAGE_BYTES, 0]
    rank = RankSession(socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
    scheduler = Client(socket_dir / "leader", wire.Hello(role="engine", engine=ENGINE), first_id=1)
    scheduler.start()
    eventually("the rank is registered", lambda: rank.registered)

    def ask(message: object, *, written: bool = False) -> object:
        question = scheduler.ask(message, 10)  # type: ignore[arg-type]
        if written:
            rank.wrote(question.id)
        assert question.wait(20)
        assert question.answer is not None, question.failure
        return question.answer

    def lookup(slot: int) -> int:
        hashes = b"".join(number.to_bytes(16, "big") for number in range(1, 4))
        return ask(wire.Lookup(slot=slot, namespace=b"", hash_bytes=16, hashes=hashes)).hit_pages  # type: ignore[attr-defined]

    fill()
    stored, target = [4, 5, 1], [0, 7, 8]
    kept = [page(number) for number in stored]
    assert lookup(1) == 0
    ask(wire.Store(1, 0, wire.runs(stored)), written=True)
    fill()
    expected = [page(number) for number in range(PAGES)]
    assert lookup(2) == 3
    assert ask(wire.Load(2, 0, wire.runs(target))).pages == 3  # type: ignore[attr-defined]
    for number, content in zip(target, kept, strict=True):
        expected[number] = content
    assert [page(number) for number in range(PAGES)] == expected
    scheduler.close()
    rank.close()
    print("every byte is right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
