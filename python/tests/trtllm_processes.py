"""An executor whose ranks, except for rank 0, are processes of their own, as those of MPI are."""

import multiprocessing
from typing import Any

import trtllm_stubs
from daemon import TIMEOUT_S
from trtllm_executor import Executor, Rank

_spawn = multiprocessing.get_context("spawn")


class Pipes:
    """A call that all ranks make together, with the other processes at the ends of pipes."""

    def __init__(self, others: list[Any]):
        self._others = others

    def broadcast(self, rank: int, value: Any, root: int) -> Any:
        assert root == 0
        if rank == 0:
            for other in self._others:
                other.send(value)
            return value
        (other,) = self._others
        assert other.poll(TIMEOUT_S), "rank 0 sends nothing"
        return other.recv()


class _Worker:
    """The hooks of a worker in another process."""

    def __init__(self, rank: "Remote"):
        self._of = rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: self._of.call("hook", name, arguments)


class Remote(Rank):
    """A rank in a process of its own."""

    def __init__(self, number: int, blocks: int, path: str):
        self.number = number
        self.saving: set[int] = set()
        self.loading: set[int] = set()
        self._calls, calls = _spawn.Pipe()
        self.together, together = _spawn.Pipe()
        self._process = _spawn.Process(target=serve, args=(number, blocks, path, calls, together), daemon=True)
        self._process.start()
        self.worker: Any = _Worker(self)
        self.after_forward = lambda: self.call("forward")

    def call(self, *what: Any) -> Any:
        self._calls.send(what)
        assert self._calls.poll(TIMEOUT_S), f"rank {self.number} does not answer {what[0]}"
        failed, answer = self._calls.recv()
        if failed:
            raise answer
        return answer

    def create(self, connector: Any, llm_args: Any) -> None:
        self.call("create", llm_args)

    @property
    def registered(self) -> bool:
        return self.call("registered")

    def forget(self, block: int) -> None:
        self.call("forget", block)

    def write(self, *arguments: Any) -> None:
        self.call("write", *arguments)

    def check(self, *arguments: Any) -> None:
        self.call("check", *arguments)

    def end(self) -> None:
        self._calls.send(("end",))
        self._process.join(TIMEOUT_S)


def serve(number: int, blocks: int, path: str, calls: Any, together: Any) -> None:
    """The process of a rank."""
    rank = Rank(number, blocks)
    with trtllm_stubs.installed(trtllm_stubs.interface(path)):
        trtllm_stubs.enter(Pipes([together]), number)
        while True:
            what, *arguments = calls.recv()
            if what == "end":
                return
            try:
                calls.send((False, _do(rank, what, arguments)))
            except Exception as error:
                calls.send((True, error))


def _do(rank: Rank, what: str, arguments: list[Any]) -> Any:
    match what:
        case "create":
            rank.create(trtllm_stubs.connector(), *arguments)
            return None
        case "hook":
            name, given = arguments
            given = (rank.pool,) if name == "register_kv_caches" else given
            return getattr(rank.worker, name)(*given)
        case "forward":
            return rank.after_forward()
        case "registered":
            return rank.registered
        case _:
            return getattr(rank, what)(*arguments)


class ProcessExecutor(Executor):
    """The executor, with a process for each rank."""

    path = trtllm_stubs.NEW

    def _rank(self, number: int, blocks: int) -> Rank:
        return Remote(number, blocks, self.path) if number else Rank(number, blocks)

    def _together(self) -> Any:
        return Pipes([rank.together for rank in self.ranks if isinstance(rank, Remote)])

    def _register(self, rank: Rank) -> None:
        rank.worker.register_kv_caches(None if isinstance(rank, Remote) else rank.pool)

    def close(self) -> None:
        super().close()
        for rank in self.ranks:
            if isinstance(rank, Remote):
                rank.end()
