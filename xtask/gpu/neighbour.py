"""The rate at which a kernel gathers rows and a copy takes them to the host, and a load for an engine beside it.

Usage: neighbour.py SECONDS; prints ``ready`` once it is under way, and its rate at the end.
"""

import sys
import time

import torch

ROW_BYTES = 32 << 10
ROWS = 65_536
GATHERED = 2_048
WARM_ROUNDS = 3


def main() -> None:
    """Gather, and print the rate."""
    seconds = float(sys.argv[1])
    cache = torch.zeros(ROWS, ROW_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    stage = torch.empty(GATHERED, ROW_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(GATHERED, ROW_BYTES // 2, dtype=torch.bfloat16).pin_memory()
    rows = torch.randperm(ROWS, device="cuda")[:GATHERED]

    def gather() -> None:
        torch.index_select(cache, 0, rows, out=stage)
        host.copy_(stage, non_blocking=True)
        torch.cuda.synchronize()

    for _ in range(WARM_ROUNDS):
        gather()
    print("ready", flush=True)
    begun = time.perf_counter()
    rounds = 0
    while time.perf_counter() - begun < seconds:
        gather()
        rounds += 1
    rate = rounds * GATHERED * ROW_BYTES / (time.perf_counter() - begun) / 1e9
    print(f"kernels alone: gathered and copied {rate:.2f} GB/s")


if __name__ == "__main__":
    main()
