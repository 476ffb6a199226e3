"""An engine's steps on a GPU: how long each takes, alone or beside what another process does.

A step has the parts of a decode step: a small copy to the device, a graph of small matrix products, a small copy back.
Usage: engine_loop.py SECONDS LABEL
"""

import sys
import time

import torch

WIDTH = 4096
BATCH = 64
PRODUCTS = 20
WARM_STEPS = 20


def main() -> None:
    """Measure and print."""
    seconds, label = float(sys.argv[1]), sys.argv[2]
    stream = torch.cuda.Stream()
    weights = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(hidden)
    host_in = torch.zeros(1024, dtype=torch.int32).pin_memory()
    device_in = torch.zeros(1024, dtype=torch.int32, device="cuda")
    host_out = torch.zeros(256, dtype=torch.int32).pin_memory()
    torch.mm(hidden, weights, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PRODUCTS):
            torch.mm(hidden, weights, out=out)

    def step() -> float:
        begun = time.perf_counter()
        device_in.copy_(host_in, non_blocking=True)
        graph.replay()
        host_out.copy_(device_in[:256], non_blocking=True)
        stream.synchronize()
        return (time.perf_counter() - begun) * 1e6

    with torch.cuda.stream(stream):
        for _ in range(WARM_STEPS):
            step()
        until = time.monotonic() + seconds
        took = []
        while time.monotonic() < until:
            took.append(step())
    took.sort()
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    figures = [f"{name} {took[int(len(took) * share)]:.0f}" for name, share in shares.items()]
    print(f"step {label}: {len(took)} steps, us:", *figures, f"max {took[-1]:.0f}")


if __name__ == "__main__":
    main()
