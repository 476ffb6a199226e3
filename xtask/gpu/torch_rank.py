"""A rank whose KV memory is torch's, on a GPU: stores pages, overwrites them, loads them elsewhere, compares all bytes.

Usage: torch_rank.py KIND PROGRAM. KIND says how the memory is allocated:
  plain       by torch's allocator
  expandable  by torch's allocator with expandable segments
  closed      by an allocator whose memory cannot be shared, as allocators for sleeping engines are; must be declined
  pool        in the pool of the connector, while the allocator of ``closed`` is in use
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KIND, PROGRAM = sys.argv[1], Path(sys.argv[2]).resolve()
if KIND in ("expandable", "pool"):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch  # noqa: E402

from kvferry import wire  # noqa: E402
from kvferry.engine_client import EngineClient  # noqa: E402
from kvferry.memory import Group, KvMemory, Place, Unsupported  # noqa: E402
from kvferry.pool import KvPool  # noqa: E402
from kvferry.rank import RankSession  # noqa: E402

ENGINE = b"g" * 16
PAGES, STORED, LAYERS, LAYER_PAGE_BYTES = 512, 192, 32, 64 << 10
TIMEOUT_S = 60.0
#: Cycles for which a kernel keeps the device busy: about 0.6 s.
BUSY_CYCLES = 1_000_000_000

CLOSED = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
typedef unsigned long long address;
struct location { int kind, id; };
struct properties { int kind, handles; struct location at; void *meta; unsigned long long flags; };
struct access { struct location at; int flags; };
int cuMemCreate(address *, size_t, const struct properties *, unsigned long long);
int cuMemAddressReserve(address *, size_t, size_t, address, unsigned long long);
int cuMemMap(address, size_t, size_t, address, unsigned long long);
int cuMemSetAccess(address, size_t, const struct access *, size_t);
void *closed_malloc(size_t size, int device, void *stream) {
    struct properties properties = {1, 0, {1, device}, 0, 0};
    struct access access = {{1, device}, 3};
    address chunk, at;
    size = (size + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1);
    if (cuMemCreate(&chunk, size, &properties, 0)) return 0;
    if (cuMemAddressReserve(&at, size, 0, 0, 0)) return 0;
    if (cuMemMap(at, size, 0, chunk, 0) || cuMemSetAccess(at, size, &access, 1)) return 0;
    return (void *)(uintptr_t)at;
}
void closed_free(void *at, size_t size, int device, void *stream) {}
"""


def eventually(what, check):
    """Waits until ``check`` returns a true value, and returns that value."""
    until = time.monotonic() + TIMEOUT_S
    while not (found := check()):
        assert time.monotonic() < until, f"{what}: not within {TIMEOUT_S:.0f} s"
        time.sleep(0.02)
    return found


def closed_pool(folder: Path) -> torch.cuda.MemPool:
    """Returns a pool of memory that was created without a way to share it."""
    source, library = folder / "closed.c", folder / "closed.so"
    source.write_text(CLOSED)
    driver = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, driver], check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "closed_malloc", "closed_free")
    return torch.cuda.MemPool(allocator.allocator())


@contextlib.contextmanager
def allocating(folder: Path) -> Iterator[None]:
    """Allocates as ``KIND`` says."""
    with contextlib.ExitStack() as stack:
        if KIND == "pool":
            # As in vLLM: the pool is created and tried before the allocator for sleeping engines is in use.
            inner = KvPool(whole_allocations)
            kept.append(inner)
        if KIND in ("closed", "pool"):
            outer = closed_pool(folder)
            kept.append(outer)
            stack.enter_context(torch.cuda.use_mem_pool(outer))
        if KIND == "pool":
            stack.enter_context(inner.allocating())
        yield


@contextlib.contextmanager
def whole_allocations() -> Iterator[None]:
    """Switches expandable segments off."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


kept: list = []


def no_event():
    """Stands for the event of a pass that the device marks, which needs none."""
    raise AssertionError("an event was recorded although the device marks its progress")


def layers_of(whole_pages: bool, folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns all bytes, and the layers: of whole pages, or each layer by itself."""
    shape = (PAGES, LAYERS, LAYER_PAGE_BYTES // 2) if whole_pages else (LAYERS, PAGES, LAYER_PAGE_BYTES // 2)
    with allocating(folder):
        kv = torch.empty(shape, dtype=torch.int16, device="cuda")
    parts = kv.unbind(1) if whole_pages else kv.unbind(0)
    layers = {str(index): part.view(torch.bfloat16) for index, part in enumerate(parts)}
    if whole_pages:
        # Axes of vLLM's layout BLNHC, as vLLM shows them: pages, heads, tokens, content.
        layers = {name: part.unflatten(1, (16, 8, -1)).transpose(1, 2) for name, part in layers.items()}
    return kv, layers


def rounds(whole_pages: bool, folder: Path) -> None:
    """Stores, overwrites, loads and compares, with an idle and with a busy device."""
    kv, layers = layers_of(whole_pages, folder)
    pages = kv if whole_pages else kv.transpose(0, 1)
    chance = torch.Generator(device="cuda").manual_seed(1)

    def fill() -> None:
        kv.random_(-30_000, 30_000, generator=chance)

    torch.cuda.synchronize()
    group = Group(layers, engine_page_tokens=16, device_pages=PAGES)
    sockets = folder / f"s{int(whole_pages)}"
    place = Place(rank=0, tp_size=1, shard=0, content=b"test")
    memory = KvMemory([group], place, whole=KIND in ("plain", "pool"))
    up = subprocess.Popen(
        [PROGRAM, "up", "--g2", "2GiB", "--ratio", "1", "--socket-dir", sockets], stdin=subprocess.DEVNULL
    )
    try:
        eventually("a leader", lambda: (sockets / "leader").exists())
        rank = RankSession(sockets / "worker-0-0", ENGINE, 0, 0, memory)
        scheduler = EngineClient(sockets / "leader", ENGINE, first_id=1)
        scheduler.start()
        eventually("the rank is registered", lambda: rank.registered)

        def answered(pending):
            assert pending.wait(TIMEOUT_S)
            assert pending.answer is not None, pending.failure
            return pending.answer

        def lookup(slot, first, count):
            hashes = [(first + number).to_bytes(16, "big") for number in range(count)]
            return answered(scheduler.lookup(slot, hashes, namespace=b"", timeout_s=TIMEOUT_S)).hit_pages

        def ready():
            command = [PROGRAM, "status", "--json", "--socket-dir", sockets]
            status = subprocess.run(command, capture_output=True, text=True)
            return status.returncode == 0 and json.loads(status.stdout)["ready"]

        eventually("lookups are served", ready)

        def store(slot, numbers, record=None, stream=None):
            pending = scheduler.store(slot, [wire.part(0, wire.runs(numbers))], timeout_s=TIMEOUT_S)
            rank.wrote(pending.id, record, stream)
            return pending

        def load(slot, numbers, after=0):
            parts = [wire.part(0, wire.runs(numbers))]
            return scheduler.load(slot, parts, after=after, timeout_s=TIMEOUT_S)

        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2)).tolist()
        stored, target = sorted(order[:STORED]), sorted(order[STORED : 2 * STORED])
        megabytes = STORED * LAYERS * LAYER_PAGE_BYTES / 1e6
        fill()
        torch.cuda.synchronize()
        content = pages[stored].clone()
        assert lookup(1, 1, STORED) == 0
        begun = time.perf_counter()
        answered(store(1, stored))
        took = {"store": time.perf_counter() - begun}
        fill()
        torch.cuda.synchronize()
        assert lookup(2, 1, STORED) == STORED
        expected = pages.clone()
        expected[target] = content
        begun = time.perf_counter()
        assert answered(load(2, target)).pages == STORED
        took["load"] = time.perf_counter() - begun
        assert torch.equal(pages, expected), "a load brought other bytes"

        # A store waits until the device has written the pages, and only the device's timeline says so.
        side = torch.cuda.Stream()
        assert memory.has_timeline
        assert lookup(3, 1001, 8) == 0
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
            fill()
            over = torch.cuda.Event()
            over.record()
            late = store(3, order[:8], no_event, side.cuda_stream)
        assert not over.query(), "the device was not busy"
        assert not late.wait(0.1), "a store did not wait for the device"
        assert not over.query(), "the device was not busy for long enough"
        answered(late)
        side.synchronize()
        late_content = pages[order[:8]].clone()

        # A load waits until the device has written its pages: the loaded bytes are those that stay.
        assert lookup(4, 1001, 8) == 8
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
            fill()
            over = torch.cuda.Event()
            over.record()
            through = scheduler.draw()
            rank.wrote(through, no_event, side.cuda_stream, stores=0)
        pending = load(4, order[8:16], after=through)
        assert not over.query(), "the device was not busy"
        assert answered(pending).pages == 8
        side.synchronize()
        assert torch.equal(pages[order[8:16]], late_content), "a load did not wait for the device"
        scheduler.close()
        rank.close()
        rates = ", ".join(f"{name} {megabytes / seconds / 1e3:.2f} GB/s" for name, seconds in took.items())
        layout = "whole pages of 2 MiB" if whole_pages else "64 KiB a layer"
        print(f"rank {KIND}, {layout}: every byte is right; first {megabytes:.0f} MB: {rates}", flush=True)
    finally:
        up.terminate()
        up.wait(TIMEOUT_S)


def main() -> None:
    """Run the rounds of ``KIND``."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as name:
        folder = Path(name)
        torch.zeros(1, device="cuda")
        if KIND == "closed":
            _, layers = layers_of(True, folder)
            try:
                KvMemory([Group(layers, 16, PAGES)], Place(rank=0, tp_size=1, shard=0, content=b"test"))
            except Unsupported as why:
                print(f"rank closed: declined: {why}", flush=True)
            else:
                print("rank closed: was not declined", flush=True)
                sys.exit(1)
            return
        for whole_pages in (True, False):
            rounds(whole_pages, folder)


if __name__ == "__main__":
    main()
    # torch's allocators are not taken down: pools of other allocators outlive them badly.
    sys.stdout.flush()
    os._exit(0)
