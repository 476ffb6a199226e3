"""Tests of KV memory in vLLM's layouts: mapped by a real worker, stored, loaded, and compared byte by byte."""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import TIMEOUT_S, Daemon, eventually, running

from kvferry import memory, wire
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place, Slices, Unsupported
from kvferry.rank import RankSession
from kvferry.served import Part

PAGES, LAYERS, HEADS, PAGE_TOKENS, CONTENT = 12, 3, 2, 8, 16
#: Order of the axes (layer, page, head, token, content), outermost first: the layouts of vLLM 0.32.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


PLACE = Place(rank=0, tp_size=1, shard=0, content=b"test")


def group(tensors: Any, pages: int = PAGES, **more: Any) -> Group:
    return Group(tensors, engine_page_tokens=PAGE_TOKENS, device_pages=pages, **more)


def layers(order: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns one storage of all layers in this order, with each layer as (page, head, token, content)."""
    shape = (LAYERS, PAGES, HEADS, PAGE_TOKENS, CONTENT)
    physical = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    logical = physical.permute([order.index(axis) for axis in range(5)])
    return {f"layer.{index}": logical[index] for index in range(LAYERS)}


def fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        noise = torch.randint(0, 100, tensor.shape, generator=chance).to(torch.float32)
        tensor.copy_(noise.to(tensor.dtype))


def page(tensors: dict[str, torch.Tensor], number: int) -> list[torch.Tensor]:
    return [tensor[number].to(torch.float32).clone() for tensor in tensors.values()]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1, g2="16MiB") as daemon:
        yield daemon


_NUMBERS = itertools.count(1)


class Talk:
    """A scheduler and a rank of one engine."""

    def __init__(
        self, daemon: Daemon, *groups: Group, namespace: bytes = b"", content: bytes = b"test", served: bool = True
    ):
        number = next(_NUMBERS)
        engine = number.to_bytes(16, "big")
        self.namespace = namespace or str(number).encode()
        self.scheduler = EngineClient(daemon.socket_dir / "leader", engine, first_id=number * 1000)
        self.scheduler.start()
        kept = KvMemory(
            list(groups),
            dataclasses.replace(PLACE, content=content),
            hash_tokens=PAGE_TOKENS,
            hit_tokens=PAGE_TOKENS,
            served=served,
        )
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", engine, 0, 0, kept)
        eventually("the rank is registered", lambda: self.rank.registered)

    def request(self, message: Any, *, written: bool = False) -> Any:
        pending = self.scheduler.request(message, TIMEOUT_S)
        if written:
            self.rank.wrote(pending.id)
        assert pending.wait(TIMEOUT_S)
        assert pending.answer is not None, pending.failure
        return pending.answer

    def lookup(self, pages: int, slot: int) -> wire.LookupAnswer:
        hashes = b"".join(number.to_bytes(16, "big") for number in range(1, pages + 1))
        return self.request(wire.Lookup(slot=slot, namespace=self.namespace, hash_bytes=16, hashes=hashes))

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()


def there_and_back(daemon: Daemon, tensors: dict[str, torch.Tensor], rows: int = 1, **more: Any) -> None:
    """Stores pages, overwrites the memory, and loads the pages elsewhere: only loaded pages change."""
    talk = Talk(daemon, group(tensors, **more))
    try:
        daemon.wait_ready()
        fill(tensors, seed=1)
        stored = [4, 5, 1]
        kept = [[page(tensors, number * rows + row) for row in range(rows)] for number in stored]
        assert talk.lookup(3, slot=1).hit_pages == 0
        answer = talk.request(wire.Store(1, [wire.part(0, wire.runs(stored))]), written=True)
        assert answer.stored_pages == 3
        fill(tensors, seed=2)
        assert talk.lookup(3, slot=2).hit_pages == 3
        expected = [page(tensors, number) for number in range(PAGES * rows)]
        target = [0, 7, 8]
        assert talk.request(wire.Load(2, [wire.part(0, wire.runs(target))])).pages == 3
        for number, content in zip(target, kept, strict=True):
            for row in range(rows):
                expected[number * rows + row] = content[row]
        for number, content in enumerate(expected):
            for ours, theirs in zip(page(tensors, number), content, strict=True):
                assert torch.equal(ours, theirs), f"page {number}"
    finally:
        talk.close()


def test_pages_of_other_content_are_not_found(daemon: Daemon) -> None:
    """Two engines of equal shape and namespace run in turn: a model, and another one such as a fine-tuned one."""
    found = []
    for content in (b"model", b"model, tuned", b"model"):
        tensors = {"layer": torch.zeros(PAGES, 1, PAGE_TOKENS, CONTENT)}
        talk = Talk(daemon, group(tensors), namespace=b"shared", content=content)
        try:
            daemon.wait_ready()
            found.append(talk.lookup(3, slot=1).hit_pages)
            talk.request(wire.Store(1, [wire.part(0, wire.runs([4, 5, 1]))]), written=True)
        finally:
            talk.close()
    assert found == [0, 0, 3]


def test_memory_without_content_is_refused(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"layer": torch.zeros(PAGES, 1, PAGE_TOKENS, CONTENT)}
    kept = KvMemory([group(tensors)], dataclasses.replace(PLACE, content=b""))
    session = RankSession(daemon.socket_dir / "worker-0-0", b"n" * 16, 0, 0, kept)
    try:
        eventually("the refusal is logged", lambda: "content is absent or empty: name model, revision" in caplog.text)
        assert not session.registered
    finally:
        session.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_every_layout_come_back_unchanged(daemon: Daemon, layout: str, dtype: torch.dtype) -> None:
    there_and_back(daemon, layers(LAYOUTS[layout], dtype))


def test_layers_with_own_and_shared_memory_come_back_unchanged(daemon: Daemon) -> None:
    own = {f"layer.{index}": torch.zeros(PAGES, HEADS, PAGE_TOKENS, CONTENT) for index in range(LAYERS)}
    own["layer.3"] = own["layer.1"]
    there_and_back(daemon, own)


def test_latent_pages_come_back_unchanged(daemon: Daemon) -> None:
    there_and_back(daemon, {"layer": torch.zeros(PAGES, 1, PAGE_TOKENS, CONTENT)}, role="latent")


def test_pages_of_several_kernel_blocks_come_back_unchanged(daemon: Daemon) -> None:
    there_and_back(daemon, {"layer": torch.zeros(PAGES * 2, HEADS, PAGE_TOKENS // 2, CONTENT)}, rows=2)


def test_pages_of_named_slices_come_back_unchanged(daemon: Daemon) -> None:
    tensors = layers(LAYOUTS["LBHNC"], torch.float32)
    there_and_back(daemon, tensors, slices=Slices(2, HEADS, 1))
    one_head = {"layer": torch.zeros(PAGES, PAGE_TOKENS, 1, CONTENT)}
    there_and_back(daemon, one_head, slices=Slices(1, 1, 2))
    there_and_back(daemon, one_head, role="latent", slices=Slices(1))


def test_axes_that_the_registration_does_not_have_are_not_named() -> None:
    small = Group({"layer": torch.zeros(PAGES * 2, HEADS, PAGE_TOKENS // 2, CONTENT)}, PAGE_TOKENS, PAGES)
    kept = KvMemory([dataclasses.replace(small, slices=Slices(2, HEADS, 1))], PLACE)
    (described,) = kept.describe([b"t" * 16])["groups"]
    kept.close()
    assert "slices" not in described["tensors"][0], "a page is two blocks of the kernel"


def test_a_tensor_in_the_middle_of_its_storage_comes_back_unchanged(daemon: Daemon) -> None:
    whole = torch.zeros(1000 + PAGES * 64)
    there_and_back(daemon, {"layer": whole[7 : 7 + PAGES * 64].view(PAGES, 2, 4, 8)})


def test_the_storage_moves_in_place_and_has_no_name() -> None:
    tensors = layers(LAYOUTS["LBHNC"], torch.float32)
    fill(tensors, seed=1)
    before = [tensor.clone() for tensor in tensors.values()]
    names = set(os.listdir("/dev/shm"))
    kept = KvMemory([group(tensors)], PLACE)
    assert set(os.listdir("/dev/shm")) <= names
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors.values(), before, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    described = kept.describe([b"t" * 16])
    assert described["nonce"]["offset_bytes"] == tensors["layer.0"].untyped_storage().nbytes()
    kept.close()


def test_memory_that_cannot_be_shared_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = layers(LAYOUTS["LBHNC"], torch.float32)
    with pytest.raises(Unsupported, match="12 blocks along its first axis, the engine counts 5 pages"):
        KvMemory([group(tensors, 5)], PLACE)
    with pytest.raises(Unsupported, match="is NoneType, not a tensor"):
        KvMemory([group({"layer": None})], PLACE)
    with pytest.raises(Unsupported, match="is on meta"):
        KvMemory([group({"layer": torch.zeros(PAGES, 1, 8, 8, device="meta")})], PLACE)

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(memory.os, "statvfs", lambda path: Full)
    with pytest.raises(Unsupported, match="4096 bytes free, the KV cache takes 36864: give it more room"):
        KvMemory([group(tensors)], PLACE)
    assert not tensors["layer.0"].is_shared()


def test_a_move_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layer.{number}": torch.zeros(PAGES, 2, 4, 8) for number in range(2)}
    dup, left = os.dup, [1]

    def failing(fd: int) -> int:
        if not left:
            raise OSError("planted")
        left.pop()
        return dup(fd)

    monkeypatch.setattr(memory.os, "dup", failing)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match="cannot be moved to /dev/shm: planted"):
        KvMemory([group(tensors)], PLACE)
    moved = [tensor.untyped_storage() for tensor in tensors.values() if tensor.is_shared()]
    assert moved
    # Torch keeps one descriptor of its own for each moved storage.
    assert len(set(os.listdir("/proc/self/fd")) - before) <= len(moved)


def three_groups() -> tuple[torch.Tensor, list[Group]]:
    """Full attention, windows and states in the same memory, in which a page belongs to one of them at a time."""
    storage = torch.zeros(PAGES, HEADS, PAGE_TOKENS, CONTENT)
    whole = storage.view(PAGES, -1)
    return storage, [
        group({"full": storage}),
        group({"window": storage}, attention="sliding_window", window_tokens=2 * PAGE_TOKENS),
        group({"state": [whole[:, :32], whole[:, 32:96]]}, attention="state", role="state"),
    ]


def test_groups_in_the_same_memory_come_back_together(daemon: Daemon) -> None:
    """A hit of three pages needs all pages of full attention, the last two of the windows, and the last state."""
    storage, groups = three_groups()
    talk = Talk(daemon, *groups)
    try:
        daemon.wait_ready()
        fill({"all": storage}, seed=1)
        kept = storage.clone()
        assert talk.lookup(3, slot=1).hit_pages == 0
        parts = [wire.part(0, [4, 5, 1], 0), wire.part(1, [2, 7], 1), wire.part(2, [9], 2)]
        assert talk.request(wire.Store(1, parts), written=True).stored_pages == 6
        fill({"all": storage}, seed=2)
        expected = storage.clone()
        assert talk.lookup(3, slot=2).hit_pages == 3
        parts = [wire.part(0, [8, 3, 2], 0), wire.part(1, [1, 10], 1), wire.part(2, [0], 2)]
        assert talk.request(wire.Load(2, parts)).pages == 6
        for target, source in ((8, 4), (3, 5), (2, 1), (1, 2), (10, 7)):
            expected[target] = kept[source]
        # A state has no more bytes than its tensors.
        expected.view(PAGES, -1)[0, :96] = kept.view(PAGES, -1)[9, :96]
        assert torch.equal(storage, expected)
    finally:
        talk.close()


def test_a_store_of_pages_that_were_written_before_waits_for_no_further_report(daemon: Daemon) -> None:
    tensors = {"layer": torch.zeros(PAGES, 1, PAGE_TOKENS, CONTENT)}
    talk = Talk(daemon, group(tensors))
    try:
        daemon.wait_ready()
        assert talk.lookup(3, slot=1).hit_pages == 0
        work, later = talk.scheduler.draw(), talk.scheduler.draw()
        parts = [Part(0, 0, [4, 5, 1])]
        early = talk.scheduler.store(1, parts, after=later, timeout_s=TIMEOUT_S)
        assert not early.wait(0.1), "its pages are not written yet"
        talk.rank.wrote(work)
        assert not early.wait(0.1), "other work is written"
        talk.rank.wrote(later)
        assert early.wait(TIMEOUT_S)
        assert early.answer == wire.StoreAnswer(3, 0), early.failure
        wrong = talk.scheduler.store(1, parts, after=early.id + 9, timeout_s=TIMEOUT_S)
        assert wrong.wait(TIMEOUT_S)
        assert wrong.failure is not None
        assert "below the store's own id" in wrong.failure.message
    finally:
        talk.close()


def test_memory_that_is_not_served_is_checked(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, groups = three_groups()
    kept = KvMemory(groups, PLACE, hash_tokens=PAGE_TOKENS, hit_tokens=PAGE_TOKENS, served=False)
    described = kept.describe([b"t" * 16])
    state = described["groups"][2]
    assert (state["attention"], state["layers"]) == ("state", 2)
    assert [tensor["offset_bytes"] for tensor in state["tensors"]] == [0, 32 * 4]
    kept.close()
    talk = Talk(daemon, *groups, served=False)
    try:
        said = [record.message for record in caplog.records if "copies nothing" in record.message]
        assert len(said) == 1
        assert said[0].endswith(": its worker copies nothing: the engine asked for a check of its memory only")
        status = daemon.status()
        assert not status["ready"]
        assert "a check of its memory only" in status["ranks"][0]["problem"]
        pending = talk.scheduler.request(wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=b"h" * 16), 1)
        assert pending.wait(TIMEOUT_S)
        assert pending.failure is not None
        assert pending.failure.code == wire.Code.NOT_READY
    finally:
        talk.close()


def test_a_served_engine_continues_beside_one_that_is_checked(daemon: Daemon) -> None:
    tensors = layers(LAYOUTS["LBHNC"], torch.float32)
    served = Talk(daemon, group(tensors))
    try:
        other = Talk(daemon, group({"layer": torch.zeros(PAGES, 2, 8, 8)}), served=False)
        other.close()
        daemon.wait_ready()
        assert served.lookup(3, slot=1).hit_pages == 0
        assert daemon.status()["ready"]
    finally:
        served.close()


def test_memory_cannot_be_sent_to_a_missing_worker(tmp_path: Path) -> None:
    kept = KvMemory([group({"layer": torch.zeros(PAGES, 1, 8, 8)})], PLACE)
    with pytest.raises(OSError, match="does not exist"):
        kept.hand_over(tmp_path / "nobody")
    kept.close()
