"""The clients with a thread and those of an event loop have the same calls, with the same arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvferry import admin, aio, client, engine_client, rank

#: Names that only clients with a thread have, and why.
WITH_A_THREAD = {
    "start": "an event loop's client is entered by `async with` alone",
    "poke": "wakes the thread; an event loop wakes by each request",
}
#: Arguments that only calls of clients with a thread have, and why.
ARGUMENTS = {
    "until": "called on the client's thread; a task awaits the request",
    "wake": "an event loop sends when it continues, so that stores share a message anyway",
    "at_end": "called on the client's thread; a task goes on after `async with`",
    "turn": "called on the client's thread; an event loop has tasks",
    "watch": "of recordings, which connectors make",
}

PAIRS = [
    (client.Client, aio.Client),
    (engine_client.EngineClient, aio.EngineClient),
    (admin.AdminClient, aio.AdminClient),
]


def names(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def arguments(call: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults, in their order."""
    found = inspect.signature(call).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name not in ARGUMENTS]


def differences(threaded: type, in_loop: type) -> list[str]:
    found = [f"only {threaded.__name__} with a thread has {name}" for name in names(threaded) - names(in_loop)]
    found = [each for each in found if each.rpartition(" ")[2] not in WITH_A_THREAD]
    found += [f"only {in_loop.__name__} of an event loop has {name}" for name in names(in_loop) - names(threaded)]
    for name in {"__init__", *(names(threaded) & names(in_loop))}:
        one, other = (inspect.getattr_static(each, name) for each in (threaded, in_loop))
        if isinstance(one, property) != isinstance(other, property):
            found.append(f"{name} is a property of one")
        elif not isinstance(one, property) and arguments(one) != arguments(other):
            found.append(f"{name}: {arguments(one)} with a thread, {arguments(other)} in an event loop")
    return found


@pytest.mark.parametrize(("threaded", "in_loop"), PAIRS, ids=lambda each: each.__name__)
def test_both_clients_have_the_same_calls(threaded: type, in_loop: type) -> None:
    assert len(names(threaded) & names(in_loop)) > 8
    assert differences(threaded, in_loop) == []


def test_a_call_that_differs_is_found() -> None:
    class Other(aio.EngineClient):
        def finish(self, slot: int, *, timeout_s: float = 1.0) -> Any:
            pass

        def more(self) -> None:
            pass

        link = 7

    found = differences(engine_client.EngineClient, Other)
    assert len(found) == 3, found
    assert found[0] == "only Other of an event loop has more"
    assert any(each.startswith("finish: ") for each in found)
    assert "link is a property of one" in found
    assert "only AdminClient with a thread has flush" in differences(admin.AdminClient, aio.Client)


def test_every_name_that_only_a_thread_has_is_used() -> None:
    only = {name for threaded, in_loop in PAIRS for name in names(threaded) - names(in_loop)}
    assert only == WITH_A_THREAD.keys()
    given = [
        name
        for threaded, _ in PAIRS
        for each in {"__init__", *names(threaded)}
        if callable(call := inspect.getattr_static(threaded, each))
        for name in inspect.signature(call).parameters
    ]
    assert ARGUMENTS.keys() <= set(given)


def test_both_are_context_managers() -> None:
    for threaded, in_loop in PAIRS:
        assert hasattr(threaded, "__enter__")
        assert hasattr(in_loop, "__aenter__")
    assert hasattr(rank.RankSession, "__enter__")


def test_a_rank_has_one_client() -> None:
    """With a thread, in every program: docs/clients.md says why."""
    assert not [name for name in vars(aio) if "rank" in name.lower()]
