"""Tests of what only the clients of an event loop have: tasks that wait, are cancelled, and must not be stopped.

`test_client.py`, `test_batches.py`, `test_typed_clients.py` and `test_kills_of_leaders.py` run with these clients, too.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from daemon import TIMEOUT_S, running
from test_client import ENGINE, FOUND, LOOKUP, Fake, directory

from kvferry import aio, wire
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.requests import Failure
from kvferry.served import Part
from kvferry.session import OPEN_MAX
from kvferry.wire import Code, Kind

__all__ = ["directory"]

PARTS = [Part(0, 0, [3])]


async def until(what: str, check: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not check():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


async def off(call: Callable[..., Any], *args: Any) -> Any:
    """Runs the fake server's side in another thread, while the loop goes on."""
    return await asyncio.wait_for(asyncio.to_thread(call, *args), TIMEOUT_S)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def engine(directory: Path) -> aio.EngineClient:
    return aio.EngineClient(directory, ENGINE, first_id=100)


def test_a_cancelled_task_ends_its_wait_and_not_the_request(directory: Path) -> None:
    server = Fake(directory)

    async def test() -> None:
        async with engine(directory) as client:
            load = client.load(1, PARTS, timeout_s=TIMEOUT_S)

            async def loads() -> wire.LoadAnswer:
                return await load

            tasks = [asyncio.create_task(loads()) for _ in range(3)]
            peer, envelope = await off(server.receive)
            assert envelope.correlation == load.id
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert load.pages_in_use
            assert not load.done
            # The other tasks wait on, and the end is known to a later one.
            server.say(peer, Kind.LOAD_ANSWER, load.id, wire.LoadAnswer(1))
            assert [await task for task in tasks[1:]] == [wire.LoadAnswer(1)] * 2
            assert await load == wire.LoadAnswer(1)
            assert not load.pages_in_use

    run(test)


def test_an_answer_after_the_end_of_every_wait_is_dropped(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Fake(directory)

    async def test() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with engine(directory) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.lookup(1, [b"h" * 16], timeout_s=TIMEOUT_S), 0.05)
            refused = client.load(1, PARTS, timeout_s=TIMEOUT_S)
            late = client.load(1, PARTS, timeout_s=0.05)
            peers = [await off(server.receive) for _ in range(3)]
            with pytest.raises(Failure) as failed:
                await late
            assert (failed.value.code, failed.value.over, late.pages_in_use) == (Code.DEADLINE, False, True)
            peer = peers[0][0]
            server.say(peer, Kind.LOOKUP_ANSWER, 100, FOUND)
            server.say(peer, Kind.ERROR, refused.id, wire.Error(Code.BUSY, "busy"))
            server.say(peer, Kind.LOAD_ANSWER, late.id, wire.LoadAnswer(1))
            await until("the answers are received", lambda: client.open_requests == (0, 0))
            assert refused.done
            assert late.answer is None, "the caller knows that its pages are in use until they are abandoned"
            assert late.pages_in_use
        assert reported == [], "nobody waits for a failure, which is no fault"

    with caplog.at_level(logging.WARNING):
        run(test)
    assert caplog.records == []


def test_a_failure_is_raised_by_every_wait(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            request = client.finish(1, timeout_s=0.05)
            for _ in range(3):
                with pytest.raises(Failure, match="no answer came in time"):
                    await request

    run(test)


@pytest.mark.parametrize("leader", ["none", "silent", "closing"])
def test_other_tasks_run_while_there_is_no_leader(directory: Path, leader: str) -> None:
    """And the client neither stops the loop nor keeps it busy."""

    async def test() -> None:
        async with engine(directory) as client:
            requests = [client.lookup(1, [b"h" * 16], timeout_s=1.5) for _ in range(10)]
            longest, busy = 0.0, time.process_time()
            seen = time.monotonic()
            while not requests[-1].done:
                await asyncio.sleep(0.01)
                longest, seen = max(longest, time.monotonic() - seen), time.monotonic()
            assert longest < 1.0, f"the loop stood still for {longest:.2f} s"
            assert time.process_time() - busy < 0.75
            for request in requests:
                with pytest.raises(Failure):
                    await request
                assert request.ended_at - request.expires < 1.0

    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        if leader == "silent":
            silent.bind(f"ipc://{directory}/kvferry.sock")
        elif leader == "closing":
            # A file at which nothing listens.
            (directory / "kvferry.sock").touch()
        run(test)


def test_a_client_makes_no_thread_and_leaves_no_descriptor(directory: Path) -> None:
    server = Fake(directory)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def test() -> None:
        await off(int)
        threads, before = threading.active_count(), 0
        for turn in range(4):
            async with engine(directory) as client:
                request = client.lookup(1, [b"h" * 16], timeout_s=TIMEOUT_S)
                peer, _ = await off(server.receive)
                server.say(peer, Kind.LOOKUP_ANSWER, request.id, FOUND)
                assert await request == FOUND
                assert threading.active_count() <= threads
            # A server keeps the descriptors of a client's connection for a moment.
            if turn == 0:
                before = descriptors()
        await until("the descriptors are closed", lambda: descriptors() <= before)

    run(test)


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_leaving_a_client_ends_its_requests(directory: Path, turns: int) -> None:
    """Also before the client's task has had a turn."""

    async def test() -> None:
        async with engine(directory) as client:
            request = client.load(1, PARTS, timeout_s=TIMEOUT_S)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting = asyncio.ensure_future(request)
        with pytest.raises(Failure, match="closed") as failed:
            await waiting
        assert (failed.value.code, failed.value.retry) == (Code.DRAINING, False)
        assert failed.value.over, "no peer has received the request"
        late = client.load(1, PARTS, timeout_s=TIMEOUT_S)
        assert not late.pages_in_use
        with pytest.raises(Failure, match="the client closes") as failed:
            await late
        assert (failed.value.code, failed.value.retry) == (Code.DRAINING, False)

    run(test)


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_a_loop_that_ends_ends_its_clients(directory: Path, turns: int) -> None:
    """A program that ends by an exception leaves no client by its `async with`."""
    found: list[Any] = []

    async def test() -> None:
        client = engine(directory)
        await client.__aenter__()
        found.append(client.load(1, PARTS, timeout_s=TIMEOUT_S))
        for _ in range(turns):
            await asyncio.sleep(0)

    begun = time.monotonic()
    run(test)
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert found[0].done
    assert not found[0].pages_in_use, "no peer has received the request"


def test_a_client_is_of_one_loop_and_entered_once(directory: Path) -> None:
    client = engine(directory)

    async def request() -> None:
        client.lookup(1, [b"h" * 16], timeout_s=1)

    with pytest.raises(RuntimeError, match="async with"):
        run(request)

    async def enter() -> None:
        async with client:
            with pytest.raises(RuntimeError, match="entered once"):
                await client.__aenter__()
            with pytest.raises(RuntimeError, match="await the request"):
                client.lookup(1, [b"h" * 16], timeout_s=1).wait(1)

    run(enter)
    with pytest.raises(RuntimeError, match="another event loop"):
        run(request)


def test_the_number_of_open_requests_is_limited(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            requests = [client.request(LOOKUP, 0.2) for _ in range(OPEN_MAX)]
            refused = client.request(LOOKUP, TIMEOUT_S)
            with pytest.raises(Failure, match="4096 requests wait") as failed:
                await refused
            assert failed.value.over
            for request in requests:
                with pytest.raises(Failure, match="no answer"):
                    await request
            assert not client.request(LOOKUP, 0.2).done

    run(test)


def test_stores_that_are_requested_together_share_a_message(directory: Path) -> None:
    server = Fake(directory)

    async def test() -> None:
        async with engine(directory) as client:
            await off(server.greet, client)
            stores = [client.store(1, PARTS, timeout_s=TIMEOUT_S) for _ in range(3)]
            peer, identity, _ = await off(server.receive_bytes, Kind.STORES)
            stored = wire.StoreAnswer(1, 0)
            answer = wire.StoresAnswer([wire.StoreResult(stored) for _ in stores])
            server.say(peer, Kind.STORES_ANSWER, identity, answer)
            assert await asyncio.gather(*stores) == [stored] * 3

    run(test)


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/clients.md", "exec"), names)
    with running(ranks=1, g2="64MiB") as daemon:
        assert asyncio.run(asyncio.wait_for(names["main"](daemon.socket_dir), TIMEOUT_S)) == [0, 4, 2]
        daemon.wait_idle()

        async def unanswered() -> None:
            """A store that is never written ends by its deadline, and gives its pages back."""
            name = os.urandom(16)
            kv = torch.zeros((8, 1, names["PAGE_TOKENS"], 64))
            memory = KvMemory(
                [Group({"layer": kv}, engine_page_tokens=names["PAGE_TOKENS"], device_pages=8)],
                Place(rank=0, tp_size=1, shard=0, content=b"model@revision float32"),
            )
            rank = RankSession(daemon.socket_dir / "worker-0-0", name, 0, 0, memory)
            try:
                async with aio.EngineClient(daemon.socket_dir / "leader", name, first_id=1) as client:
                    await until("the memory is registered", lambda: rank.registered)
                    found = None
                    while found is None:
                        with contextlib.suppress(Failure):
                            found = await client.lookup(1, [os.urandom(32)], timeout_s=1.0)
                    store = client.store(1, PARTS, timeout_s=0.1)
                    await names["free"](rank, store)
                    assert store.pages_in_use == (store.id in names["given_back"])
            finally:
                rank.close()

        asyncio.run(asyncio.wait_for(unanswered(), TIMEOUT_S))
