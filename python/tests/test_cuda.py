"""KV memory on a GPU, by the CUDA driver for tests, with a real leader and worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import PATIENCE_S, running


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """With which a process finds the driver for tests."""
    library = os.environ["FAKE_CUDA_LIBRARY"]
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).symlink_to(library)
    return {
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "FAKE_CUDA": "devices=2;delay_us=200",
    }


def script(source: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **changes}
    command = [sys.executable, *([source] if source.endswith(".py") else ["-c", source]), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", ["cuda_ipc", "ticket", "cuda_fabric"])
def test_there_and_back(variables: dict[str, str], kind: str) -> None:
    with running(ranks=1, g2="16MiB", variables=variables) as daemon:
        rank = Path(__file__).parent / "gpu_rank.py"
        done = script(str(rank), str(daemon.socket_dir), kind, **variables)
        assert "every byte is right" in done.stdout, done.stdout + done.stderr
        assert daemon.counter("blocks_loaded") > 0


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("*/cuCtxGetCurrent/1/3", "cuCtxGetCurrent answered CUDA_ERROR_NOT_INITIALIZED (3)"),
        ("*/cuIpcGetMemHandle/1/1", "cuIpcGetMemHandle answered CUDA_ERROR_INVALID_VALUE (1)"),
        ("*/cuMemGetAddressRange_v2/1/1", "Memory of some allocators, such as cudaMallocAsync, has no handles"),
    ],
)
def test_memory_without_handles_is_refused_in_words(variables: dict[str, str], fail: str, text: str) -> None:
    source = """
import ctypes, gpu_rank
from kvferry.memory import Group, KvMemory, Place, Unsupported
library, made, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuInit(0) == library.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0) == 0
assert library.cuCtxSetCurrent(made) == 0
assert library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 16)) == 0
group = Group({"layer": gpu_rank.on_device(address.value)}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
try:
    KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
except Unsupported as error:
    print(error)
"""
    done = script(source, **{**variables, "FAKE_CUDA": f"fail={fail}"})
    assert text in done.stdout, done.stdout + done.stderr


def test_chunks_that_nobody_may_share(variables: dict[str, str]) -> None:
    source = """
import gpu_rank
from kvferry.memory import Group, KvMemory, Place, Unsupported
gpu_rank.context()
layer = gpu_rank.on_device(gpu_rank.in_chunks([4096], 0))
group = Group({"layer": layer}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
try:
    KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
except Unsupported as error:
    print(error)
"""
    done = script(source, **variables)
    assert "chunks that were made without a way to share them" in done.stdout, done.stdout + done.stderr


def test_without_a_driver() -> None:
    source = "from kvferry import cuda\ntry:\n    cuda.Context()\nexcept cuda.CudaError as error:\n    print(error)"
    done = script(source, LD_LIBRARY_PATH="")
    assert "CUDA" in done.stdout, done.stdout + done.stderr
