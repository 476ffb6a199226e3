"""Tests of the places where device memory is marked and read to prove its mapping; without a driver."""

import random

import pytest
import torch

from kvferry.proofs import PROOF_BYTES, Proofs

SIZE = 4000
#: Parts of memory that are shared by themselves; each contains bytes of the tensors.
PARTS = [(1000, 500), (1500, 1500), (3000, 1000)]


class Memory:
    """Device memory from address 1000 on."""

    def __init__(self) -> None:
        self.bytes = bytearray(SIZE)
        self.written: list[int] = []

    def write_all(self, pieces: list[tuple[int, bytes]]) -> None:
        for address, data in pieces:
            self.written += range(address, address + len(data))
            self.bytes[address - 1000 : address - 1000 + len(data)] = data

    def read_all(self, pieces: list[tuple[int, int]]) -> list[bytes]:
        return [bytes(self.bytes[address - 1000 :][:size]) for address, size in pieces]


class At(torch.Tensor):
    address: int

    def data_ptr(self) -> int:
        return self.address


def tensor(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> At:
    found = torch.empty_strided(shape, strides, dtype=torch.half, device="meta").as_subclass(At)
    found.address = address
    return found


def elements(found: At) -> set[int]:
    places = {found.address}
    for length, step in zip(found.shape, found.stride(), strict=True):
        places = {place + index * step * 2 for place in places for index in range(length)}
    return {byte for place in places for byte in (place, place + 1)}


#: Tensors without gaps, with gaps between pages, and with gaps between halves, in any order of axes.
LAYOUTS = [
    ((10, 120), (120, 1)),
    ((10, 60), (125, 1)),
    ((2, 5, 40), (60, 260, 1)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_elements_of_tensors_are_marked(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    layer = tensor(1100, *layout)
    for _ in range(50):
        memory = Memory()
        proofs = Proofs(memory, PARTS, [layer], new=True)  # type: ignore[arg-type]
        assert set(memory.written) <= elements(layer)
        assert len(memory.written) == len(PARTS) * PROOF_BYTES
        for part, mark in zip(PARTS, memory.written[::PROOF_BYTES], strict=True):
            read = dict(proofs.read([part]))
            assert mark in read
            assert all(part[0] <= place <= sum(part) - PROOF_BYTES for place in read)
            assert read == dict(zip(read, memory.read_all([(place, PROOF_BYTES) for place in read]), strict=True))


def test_a_mark_is_a_small_number_of_any_type() -> None:
    memory = Memory()
    Proofs(memory, PARTS, [tensor(1000, (2000,), (1,))], new=True)  # type: ignore[arg-type]
    marks = torch.frombuffer(memory.bytes, dtype=torch.uint8)
    assert marks.any()
    for dtype in (torch.half, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = marks.view(dtype).float()
        assert numbers.isfinite().all(), dtype
        assert numbers.abs().max() < 2, dtype


def test_memory_that_is_in_use_is_read_and_not_written() -> None:
    memory = Memory()
    memory.bytes[:] = random.Random(1).randbytes(SIZE)
    proofs = Proofs(memory, PARTS, [tensor(1000, (2000,), (1,))], new=False)  # type: ignore[arg-type]
    assert not memory.written
    for part in PARTS:
        # Drawn places may coincide.
        places = [place for place, _ in proofs.read([part])]
        assert 1 <= len(places) <= 3
        assert all(part[0] <= place <= sum(part) - PROOF_BYTES for place in places)


def test_tensors_without_room_for_a_proof_are_not_marked() -> None:
    memory = Memory()
    proofs = Proofs(memory, PARTS, [tensor(1000, (50, 10), (40, 1))], new=True)  # type: ignore[arg-type]
    assert not memory.written
    assert proofs.read(PARTS) == []
