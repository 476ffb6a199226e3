"""Tests of KV memory on a GPU, with the CUDA driver for tests and a real leader and worker."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import TIMEOUT_S, running
from template import Template


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Returns the environment variables with which a process loads the driver for tests, and prepares :func:`script`.

    Each script is a process of its own, forked from one that has imported torch, which takes longer than most scripts.
    """
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).symlink_to(os.environ["FAKE_CUDA_LIBRARY"])
    variables = {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    template = Template(["torch"], variables)
    TEMPLATES[variables["LD_LIBRARY_PATH"]] = template
    yield variables
    TEMPLATES.clear()
    template.end()


#: The processes that fork scripts, by the only variable that cannot change in a fork.
TEMPLATES: dict[str, Template] = {}


@pytest.fixture
def variables(driver: dict[str, str]) -> dict[str, str]:
    return {**driver, "FAKE_CUDA": "devices=2;delay_us=200"}


def script(source: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **changes}
    command = [*([source] if source.endswith(".py") else ["-c", source]), *arguments]
    template = TEMPLATES.get(variables.get("LD_LIBRARY_PATH", ""))
    if template is None:
        return subprocess.run(
            [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        process = template.fork(command, variables, nothing.fileno(), output.fileno(), errors.fileno())
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, output.read(), errors.read())


@pytest.mark.parametrize("kind", ["cuda_ipc", "ticket", "cuda_fabric"])
def test_pages_on_a_gpu_come_back_unchanged(variables: dict[str, str], kind: str) -> None:
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
def test_memory_without_handles_is_refused_with_the_reason(variables: dict[str, str], fail: str, text: str) -> None:
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


def test_chunks_that_their_allocator_takes_back_are_refused(variables: dict[str, str]) -> None:
    """Also such that could be shared: a worker would have other memory than an engine that slept."""
    source = """
import gpu_rank
from kvferry import cuda
from kvferry.memory import Group, KvMemory, Place, Unsupported
gpu = gpu_rank.context()
place = Place(rank=0, tp_size=1, shard=0, content=b"test")
def group(address):
    return Group({"layer": gpu_rank.on_device(address)}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
shared = gpu_rank.in_chunks([gpu_rank.CHUNK_BYTES], cuda.SHARED_BY_FD)
KvMemory([group(shared)], place)
try:
    KvMemory([group(shared)], place, whole=True)
except Unsupported as error:
    print(error)
KvMemory([group(gpu.allocate(1 << 16))], place, whole=True)
print("accepted")
"""
    done = script(source, **variables)
    assert "lies in chunks, which its allocator takes back while the engine sleeps" in done.stdout, done.stderr
    assert "accepted" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ("gpu.allocate(1 << 16)", "allocated in whole ranges, in the pool"),
        ("gpu_rank.in_chunks([gpu_rank.CHUNK_BYTES], cuda.SHARED_BY_FD)", "cuIpcGetMemHandle answered"),
    ],
)
def test_a_pool_is_tried_before_it_is_used(variables: dict[str, str], memory: str, text: str) -> None:
    """torch's pools need a GPU: what they allocate is replaced, and the driver for tests shares it or not."""
    source = f"""
import contextlib, torch
import gpu_rank
from kvferry import cuda
from kvferry.pool import KvPool
gpu, inside = gpu_rank.context(), []
address = {memory}
@contextlib.contextmanager
def within(what):
    inside.append(what)
    yield
    inside.remove(what)
torch.cuda.MemPool = lambda: "pool"
torch.cuda.use_mem_pool = within
class Tensor:
    def data_ptr(self):
        return address
def empty(*_, **named):
    assert inside == ["whole ranges", "pool"] and named["device"] == "cuda", inside
    return Tensor()
torch.empty = empty
try:
    pool = KvPool(lambda: within("whole ranges"))
    assert not inside
    with pool.allocating():
        print("allocated in", ", in the ".join(inside))
    assert not inside
except OSError as error:
    print(error)
"""
    done = script(source, **variables)
    assert text in done.stdout, done.stdout + done.stderr


def test_chunks_that_cannot_be_shared_are_refused(variables: dict[str, str]) -> None:
    source = """
import gpu_rank
from kvferry.memory import Group, KvMemory, Place, Unsupported
gpu_rank.context()
layer = gpu_rank.on_device(gpu_rank.in_chunks([gpu_rank.CHUNK_BYTES], 0))
group = Group({"layer": layer}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
try:
    KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
except Unsupported as error:
    print(error)
"""
    done = script(source, **variables)
    assert "chunks that were made without a way to share them" in done.stdout, done.stdout + done.stderr


def test_a_missing_driver_is_reported() -> None:
    source = "from kvferry import cuda\ntry:\n    cuda.Context()\nexcept cuda.CudaError as error:\n    print(error)"
    done = script(source, LD_LIBRARY_PATH="")
    assert "CUDA" in done.stdout, done.stdout + done.stderr


#: Creates a rank's memory on the running thread, whose current context is another device's afterwards.
MEMORY = """
import ctypes, gpu_rank
from kvferry import cuda
from kvferry.memory import Group, KvMemory, Place
gpu = gpu_rank.context()
layer = gpu_rank.on_device({address})
group = Group({{"layer": layer}}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
library = ctypes.CDLL("libcuda.so.1")
"""
WHOLE = MEMORY.format(address="gpu.allocate(1 << 20)")


def test_unsafe_calls_during_a_capture_of_the_engine_are_still_detected(variables: dict[str, str]) -> None:
    """An unsafe call invalidates a running capture, also on the thread that passed the memory to kvferry."""
    source = f"""{WHOLE}
stream, graph, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(1)) == 0
def captured():
    assert library.cuStreamBeginCapture_v2(stream, ctypes.c_int(0)) == 0
    called = library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(512))
    return called, library.cuStreamEndCapture(stream, ctypes.byref(graph))
assert captured() == (900, 901)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
assert captured() == (900, 901), "this thread's calls are hidden from captures"
memory.describe([bytes(16)] * 8)
assert captured() == (900, 901), "this thread's calls are hidden from captures"
# kvferry's own calls end none, on whichever thread.
assert library.cuStreamBeginCapture_v2(stream, ctypes.c_int(0)) == 0
memory.describe([bytes(16)] * 8)
assert library.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
print("seen")
"""
    done = script(source, **variables)
    assert "seen" in done.stdout, done.stdout + done.stderr


def test_a_thread_keeps_its_context(variables: dict[str, str]) -> None:
    source = f"""{WHOLE}
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
other, now = ctypes.c_void_p(), ctypes.c_void_p()
assert library.cuDevicePrimaryCtxRetain(ctypes.byref(other), 0) == library.cuCtxSetCurrent(other) == 0
described = memory.describe([bytes(16)] * 8)
assert library.cuCtxGetCurrent(ctypes.byref(now)) == 0
assert now.value == other.value, "another device is current"
assert described["device_uuid"] == gpu.uuid()
print("kept")
"""
    done = script(source, **variables)
    assert "kept" in done.stdout, done.stdout + done.stderr


def test_a_mig_instance_has_a_name_of_its_own(variables: dict[str, str]) -> None:
    source = "import gpu_rank\nprint(gpu_rank.context().uuid())"
    whole = script(source, **variables).stdout
    instance = script(source, **{**variables, "FAKE_CUDA": "devices=2;mig=1"}).stdout
    assert whole.startswith("GPU-")
    assert instance.startswith("MIG-")
    assert instance[4:] != whole[4:]


#: Sends the memory to a worker as this process sees it, and prints the reason of a refusal.
HAND_OVER = """
import socket, struct, sys, tempfile, threading
from pathlib import Path
import kvferry.memory
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
folder = Path(tempfile.mkdtemp())
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(str(folder / kvferry.memory.FD_SOCKET_NAME))
listener.listen()
def worker():
    while True:
        engine, _ = listener.accept()
        while socket.recv_fds(engine, 4096, 253)[0]:
            engine.send(b"\\x01")
threading.Thread(target=worker, daemon=True).start()
def hand_over(process):
    kvferry.memory._process_of = lambda *_: process
    try:
        return len(memory.hand_over(folder)[0])
    except kvferry.memory.Unsupported as error:
        return str(error)
import os
print("here:", hand_over(os.getpid()))
print("elsewhere:", hand_over(0))
stat = os.stat
class Other:
    st_dev, st_ino = 0, 0
def seen(path, *rest, **named):
    return Other if str(path) == f"/proc/{os.getppid()}/ns/pid" else stat(path, *rest, **named)
os.stat = seen
print("below:", hand_over(os.getppid()))
"""


def test_a_worker_in_another_pid_namespace_is_not_given_ipc_handles(variables: dict[str, str]) -> None:
    done = script(WHOLE + HAND_OVER, **variables)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["here"] == "0", done.stdout + done.stderr
    for where in ("elsewhere", "below"):
        assert "lives in another PID namespace" in said[where], said
        assert "expandable_segments:True" in said[where]


def test_chunks_reach_a_worker_in_another_pid_namespace(variables: dict[str, str]) -> None:
    """The whole registration is shared by descriptors, including the proof of the mapping."""
    chunks = "gpu_rank.in_chunks([gpu_rank.CHUNK_BYTES], cuda.SHARED_BY_FD)"
    done = script(MEMORY.format(address=chunks) + HAND_OVER, **variables)
    assert done.stdout.splitlines() == ["here: 2", "elsewhere: 2", "below: 2"], done.stdout + done.stderr


def test_the_proofs_of_all_chunks_of_new_memory_differ(variables: dict[str, str]) -> None:
    source = """
import gpu_rank
from kvferry import cuda
from kvferry.memory import Group, KvMemory, Place
gpu = gpu_rank.context()
size, tensor = gpu_rank.CHUNK_BYTES, gpu_rank.PAGES * gpu_rank.PAGE_BYTES
base = gpu_rank.in_chunks([size] * 3, cuda.SHARED_BY_FD)
layers = {str(end): gpu_rank.on_device(base + end * size - tensor // 2) for end in (1, 2)}
group = Group(layers, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
def proofs():
    found = memory.describe([bytes(16)] * 8)["proofs"]
    assert {(proof["allocation"], proof["offset_bytes"] // size) for proof in found} == {(0, 0), (0, 1), (0, 2)}
    for proof in found:
        assert gpu.read(base + proof["offset_bytes"], len(proof["bytes"])) == proof["bytes"]
    parts = {}
    for proof in found:
        # Beside the mark a part of it may be read, at a place that was drawn beside it.
        if any(proof["bytes"]):
            parts.setdefault(proof["offset_bytes"] // size, set()).add(proof["bytes"])
    return parts
marked = proofs()
assert sorted(marked) == [0, 1, 2], marked
assert all(any(len(set(mark)) >= 8 for mark in marks) for marks in marked.values()), marked
new = set().union(*marked.values())
assert len(new) == sum(map(len, marked.values())), marked
# Contents at the time of the second registration.
for layer in layers.values():
    gpu.write(layer.address, bytes(range(1, 241)) * (tensor // 240))
assert new.isdisjoint(set().union(*proofs().values()))
print("told apart")
"""
    done = script(source, **variables)
    assert "told apart" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["SHARED_BY_FD", "SHARED_BY_FABRIC"])
def test_a_chunk_that_shows_other_memory_is_not_served(
    variables: dict[str, str], way: str, capfd: pytest.CaptureFixture
) -> None:
    """The driver maps the first chunk twice. On a second request it maps the right chunk, which is served."""
    source = f"""
import sys
from pathlib import Path
import gpu_rank
from daemon import eventually
from kvferry import cuda
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
gpu_rank.context()
size, tensor = gpu_rank.CHUNK_BYTES, gpu_rank.PAGES * gpu_rank.PAGE_BYTES
base = gpu_rank.in_chunks([size] * 3, cuda.{way})
layers = {{str(end): gpu_rank.on_device(base + end * size - tensor // 2) for end in (1, 2)}}
group = Group(layers, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
rank = RankSession(Path(sys.argv[1]) / "worker-0-0", gpu_rank.ENGINE, 0, 0, memory)
eventually("it is registered", lambda: rank.registered)
rank.close()
print("registered")
"""
    stale = {**variables, "FAKE_CUDA": f"{variables['FAKE_CUDA']};stale=2"}
    with running(ranks=1, g2="16MiB", variables=stale) as daemon:
        done = script(source, str(daemon.socket_dir), **variables)
        assert "registered" in done.stdout, done.stdout + done.stderr
    said = "".join(capfd.readouterr())
    assert "registration.allocations[0].handle.chunks[1] has other bytes" in said, said


#: Registers its memory, then again with the next worker, while it writes to most pages.
WRITER = """
import random, sys, threading
from pathlib import Path
import gpu_rank
from daemon import eventually
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
gpu = gpu_rank.context()
layers = {str(number): gpu_rank.on_device(gpu.allocate(2 << 20)) for number in range(3)}
group = Group(layers, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
# As the memory of an engine that has served: bytes that are the same everywhere prove nothing.
for layer in layers.values():
    gpu.write(layer.address, random.randbytes(gpu_rank.PAGES * gpu_rank.PAGE_BYTES))
rank = RankSession(Path(sys.argv[1]) / "worker-0-0", gpu_rank.ENGINE, 0, 0, memory)
over = threading.Event()
def write():
    while not over.is_set():
        for layer in layers.values():
            page = random.randrange(gpu_rank.PAGES // 2)
            gpu.write(layer.address + page * gpu_rank.PAGE_BYTES, random.randbytes(gpu_rank.PAGE_BYTES))
writer = threading.Thread(target=write)
writer.start()
try:
    eventually("it is registered", lambda: rank.registered)
    print("registered", flush=True)
    eventually("its worker is gone", lambda: not rank.registered)
    eventually("it is registered again", lambda: rank.registered)
    print("again", flush=True)
finally:
    over.set()
    writer.join()
    rank.close()
"""


def test_an_engine_that_writes_to_its_memory_can_register_again(variables: dict[str, str]) -> None:
    with running(ranks=1, g2="16MiB", variables=variables) as daemon:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", WRITER, str(daemon.socket_dir)]
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "registered\n"
            daemon.killed(daemon.pid())
            said, _ = engine.communicate(timeout=TIMEOUT_S)
        assert said == "again\n"


#: A rank whose device marks nothing: each pass has an event. The first pass ends late, the last never.
PASSES = """
import ctypes, sys, threading, time
from pathlib import Path
import gpu_rank
from daemon import TIMEOUT_S, Daemon, eventually
from kvferry import wire
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
sockets, gpu = Path(sys.argv[1]), gpu_rank.context()
layer = gpu_rank.on_device(gpu.allocate(1 << 20))
group = Group({"layer": layer}, engine_page_tokens=8, device_pages=gpu_rank.PAGES)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
assert not memory.has_timeline, "the device cannot write words"
rank = RankSession(sockets / "worker-0-0", gpu_rank.ENGINE, 0, 0, memory)
scheduler = EngineClient(sockets / "leader", gpu_rank.ENGINE, first_id=1)
scheduler.start()
eventually("the rank is registered", lambda: rank.registered)
Daemon(sockets).wait_ready()
library, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert library.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(1)) == 0
gate = gpu.allocate(1 << 16)
gpu.write(gate, bytes(8))
def run_until(value):
    word = ctypes.c_uint64(gate), ctypes.c_uint64(value)
    assert library.cuStreamWaitValue64_v2(stream, *word, ctypes.c_uint(0)) == 0
def record():
    event = ctypes.c_void_p()
    assert library.cuEventCreate(ctypes.byref(event), ctypes.c_uint(2)) == 0
    assert library.cuEventRecord(event, stream) == 0
    def is_over():
        code = library.cuEventQuery(event)
        if code not in (0, 600):
            raise RuntimeError(f"cuEventQuery answered {code}")
        return code == 0
    return is_over
def store(slot, page):
    hashes = slot.to_bytes(16, "big")
    found = scheduler.request(wire.Lookup(slot=slot, namespace=b"", hash_bytes=16, hashes=hashes), TIMEOUT_S)
    assert found.wait(TIMEOUT_S) and found.answer is not None, found.failure
    pending = scheduler.request(wire.Store(slot, [wire.part(0, wire.runs([page]))]), TIMEOUT_S)
    rank.wrote(pending.id, record, stream.value)
    return pending
"""
LATE = """
run_until(1)
first = store(1, 4)
run_until(2)
second = store(2, 5)
assert not first.wait(0.1), "a store did not wait for its pass"
gpu.write(layer.address + 4 * gpu_rank.PAGE_BYTES, b"late")
gpu.write(gate, (1).to_bytes(8, "little"))
assert first.wait(TIMEOUT_S) and first.answer is not None, first.failure
assert not second.wait(0.1), "passes are reported in order"
gpu.write(gate, (2).to_bytes(8, "little"))
assert second.wait(TIMEOUT_S) and second.answer is not None, second.failure
run_until(3)
third = store(3, 6)
assert not third.wait(0.1)
begun = time.monotonic()
rank.close()
scheduler.close()
assert time.monotonic() - begun < 5, "a pass that never ends must not block the end"
assert not rank.fault
print("every pass in its turn", flush=True)
import os
os._exit(0)
"""
FAILS = """
run_until(1)
pending = store(1, 4)
eventually("the failure is noticed", lambda: rank.fault)
assert not pending.wait(0.1)
rank.close()
scheduler.close()
print("noticed", flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize(
    ("source", "settings", "text"),
    [(LATE, "", "every pass in its turn"), (FAILS, ";fail=*/cuEventQuery/2/719", "noticed")],
)
def test_passes_of_a_device_without_a_timeline(
    variables: dict[str, str], source: str, settings: str, text: str
) -> None:
    with running(ranks=1, g2="16MiB", variables=variables) as daemon:
        mine = {**variables, "FAKE_CUDA": f"{variables['FAKE_CUDA']};attribute=122/0{settings}"}
        done = script(PASSES + source, str(daemon.socket_dir), **mine)
        assert text in done.stdout, done.stdout + done.stderr


#: Stores and loads pages of layers in one allocation, or in several, and compares every byte.
WHOLE_PAGES = """
import random, sys
from pathlib import Path
import gpu_rank
from daemon import TIMEOUT_S, Daemon, eventually
from kvferry import wire
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
sockets, gpu, whole = Path(sys.argv[1]), gpu_rank.context(), sys.argv[2] == "whole"
pages, size = gpu_rank.PAGES, gpu_rank.LAYERS * gpu_rank.PAGE_BYTES
base = gpu.allocate(1 << 20)
if whole:
    layers = gpu_rank.on_device_in_whole_pages(base)
else:
    layers = [gpu_rank.on_device(base + layer * pages * gpu_rank.PAGE_BYTES) for layer in range(gpu_rank.LAYERS)]
group = Group({str(number): layer for number, layer in enumerate(layers)}, engine_page_tokens=8, device_pages=pages)
memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
rank = RankSession(sockets / "worker-0-0", gpu_rank.ENGINE, 0, 0, memory)
scheduler = EngineClient(sockets / "leader", gpu_rank.ENGINE, first_id=1)
scheduler.start()
eventually("the rank is registered", lambda: rank.registered)
Daemon(sockets).wait_ready()
def answer(message, written=False):
    pending = scheduler.request(message, TIMEOUT_S)
    if written:
        rank.wrote(pending.id)
    assert pending.wait(TIMEOUT_S) and pending.answer is not None, pending.failure
    return pending.answer
hashes = b"".join(number.to_bytes(16, "big") for number in range(1, 4))
content = random.Random(1).randbytes(pages * size)
gpu.write(base, content)
page = lambda number: content[number * size :][:size]
assert answer(wire.Lookup(slot=1, namespace=b"", hash_bytes=16, hashes=hashes)).hit_pages == 0
answer(wire.Store(1, [wire.part(0, wire.runs([4, 9, 1]))]), written=True)
gpu.write(base, bytes(pages * size))
found = answer(wire.Lookup(slot=2, namespace=b"", hash_bytes=16, hashes=hashes)).hit_pages
assert found == 3, f"{found} pages were stored"
answer(wire.Load(2, [wire.part(0, wire.runs([0, 7, 3]))]))
if whole:
    expected = [bytes(size)] * pages
    expected[0], expected[7], expected[3] = page(4), page(9), page(1)
    assert gpu.read(base, pages * size) == b"".join(expected)
scheduler.close()
rank.close()
print("copied")
"""


#: Copies of a worker for these pages: 5 of proofs at the registration, and one for each page stored and loaded.
COPIES = 5 + 3 + 3


@pytest.mark.parametrize(("kind", "enough"), [("whole", True), ("layers", False)])
def test_a_page_of_all_layers_in_one_range_is_one_copy(variables: dict[str, str], kind: str, enough: bool) -> None:
    """Of pages that are not neighbours, each is copied at once. In layers apart, the third page needs the 12th copy."""
    fails = f"{variables['FAKE_CUDA']};fail=worker/cuMemcpyAsync/{COPIES + 1}/2"
    few = {**variables, "FAKE_CUDA": fails, "KVFERRY_GPU_COPY": "async"}
    with running(ranks=1, g2="16MiB", ratio=1, variables=few) as daemon:
        done = script(WHOLE_PAGES, str(daemon.socket_dir), kind, **variables)
        assert ("copied" in done.stdout) == enough, done.stdout + done.stderr
        assert enough or "2 pages were stored" in done.stderr, done.stderr
