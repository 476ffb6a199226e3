"""Measures the checksums of pages: ``python bench_checksums.py [cpu|cuda]`` prints GB/s, in one thread on a CPU."""

import sys
import time

import torch

from kvferry.checksums import PageChecksums

#: Pages of a memory of 16 layers, with 16 tokens of 8 heads with 128 numbers each, for keys and values.
PAGES, LAYERS = 256, 16
SHAPE = (PAGES, 2, 16, 8, 128)
ROUNDS = 5


def rate(dtype: torch.dtype, device: str, pages: int) -> float:
    """Returns bytes of checked pages per second, in the best of some rounds."""
    layers = [torch.randint(0, 99, SHAPE, device=device).to(dtype) for _ in range(LAYERS)]
    checksums = PageChecksums([(layers, PAGES)])
    chosen = torch.randperm(PAGES)[:pages].to(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(ROUNDS):
        wait()
        begun = time.perf_counter()
        checksums.of(0, chosen)
        wait()
        best = min(best, time.perf_counter() - begun)
    return sum(layer[0].nbytes for layer in layers) * pages / best


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for pages in (1, 16, PAGES):
            print(f"{device}, {dtype}, {pages} pages: {rate(dtype, device, pages) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
