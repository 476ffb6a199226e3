"""Subscribers of the KV events of a real SGLang and of ``kvferry events``, decoded by SGLang's own classes."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually
from router import Subscriber
from sglang_engine import PAGE_TOKENS, SglangEngine

from kvferry import present_namespace
from kvferry.admin import AdminClient

MEDIA = {2: "CPU", 3: "STORAGE"}
#: Pages of a read of the change log.
READ_PAGES = 1000


def endpoints(folder: Path, name: str) -> tuple[str, str]:
    """Where a stream is published, and where earlier batches are requested."""
    return f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"


def publishing(folder: Path) -> str:
    """SGLang's argument ``kv_events_config``: it publishes in a folder."""
    live, replay = endpoints(folder, "engine")
    return json.dumps({"publisher": "zmq", "endpoint": live, "replay_endpoint": replay})


class Pages:
    """What a router of SGLang knows: the pages of each medium, and the parent and tokens of each page."""

    def __init__(self) -> None:
        self.held: dict[str | None, set[int]] = {}
        self.described: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        #: Kinds and media of the events.
        self.seen: set[tuple[str, str | None]] = set()

    def take(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            kind, medium = event["type"], event.get("medium")
            self.seen.add((kind, medium))
            pages = self.held.setdefault(medium, set())
            if kind == "AllBlocksCleared":
                self.held.clear()
            elif kind == "BlockRemoved":
                # SGLang itself may repeat events; kvferry announces and removes each page of a medium once.
                assert medium == "GPU" or pages.issuperset(event["block_hashes"]), event
                pages.difference_update(event["block_hashes"])
            else:
                assert medium == "GPU" or pages.isdisjoint(event["block_hashes"]), event
                self._store(event, pages)

    def _store(self, event: dict[str, Any], pages: set[int]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"]), event
        for at, number in enumerate(event["block_hashes"]):
            about = parent, tuple(event["token_ids"][at * size : (at + 1) * size])
            # A page with a salt has the tokens of one without, and another number.
            if not event.get("cache_salt"):
                assert self.described.setdefault(number, about) == about, f"page {number} has another content"
            pages.add(number)
            parent = number

    def media(self) -> dict[str | None, set[int]]:
        return {medium: pages for medium, pages in self.held.items() if pages}

    def sequence(self, tokens: list[int]) -> list[int]:
        """The numbers of the pages of a prompt, as far as they were described."""
        numbers: list[int] = []
        by_content = {about: number for number, about in self.described.items()}
        for at in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            about = numbers[-1] if numbers else None, tuple(tokens[at : at + PAGE_TOKENS])
            if about not in by_content:
                break
            numbers.append(by_content[about])
        return numbers


class Streams:
    """The engine's own stream, and those of ``kvferry events`` in both modes."""

    def __init__(self, folder: Path, daemon: Daemon, engine: SglangEngine, replica: int = 0):
        self._folder, self._daemon, self._engine, self._replica = folder, daemon, engine, replica
        self._stack = contextlib.ExitStack()
        self.own = self._subscribe("engine", first=0)
        self.own.replay()
        self.tiers, self.blind = [self._merged(mode) for mode in ("tiers", "blind")]

    def _subscribe(self, name: str, *, first: int | None) -> Subscriber:
        subscriber = Subscriber(*endpoints(self._folder, name), first=first, router=Pages(), decode=self._decode)
        return self._stack.enter_context(subscriber)

    def _decode(self, payload: bytes) -> Any:
        ((_, events, rank),) = self._engine.request("decode", payloads=[payload.hex()])
        assert rank == 0
        return SimpleNamespace(events=events)

    def _merged(self, mode: str) -> Subscriber:
        live, replay = endpoints(self._folder, mode)
        engine, engine_replay = endpoints(self._folder, "engine")
        flags = ["--engine", engine, "--engine-replay", engine_replay, "--publish", live, "--replay", replay]
        command = [PROGRAM, "events", "--socket-dir", str(self._daemon.socket_dir), "--mode", mode, *flags]
        process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._stack.callback(process.wait, TIMEOUT_S)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        self._stack.enter_context(process.stdout)
        assert process.stdout.readline().startswith(b"publishing at ")
        return self._subscribe(mode, first=None)

    def close(self) -> None:
        self._stack.close()

    def begin(self, *prompts: list[int]) -> None:
        """Runs prompts until both streams publish: a new subscription takes a moment."""
        left = list(prompts)

        def publish() -> bool:
            if left:
                self._engine.generate(left.pop(0), max_tokens=1)
            for each in (self.tiers, self.blind):
                each.poll(100)
            return self.tiers.next is not None and self.blind.next is not None

        eventually("both streams publish", publish)

    def in_kvferry(self) -> dict[str | None, set[int]]:
        """The numbers of the pages in each tier, as a reader of its own finds them in the leader's change log."""
        shown = present_namespace.path_of(self._daemon.socket_dir, self._replica).read_text()
        places: dict[tuple[int, int], int] = {}
        epoch, at, cursor = 0, 0, 0
        with AdminClient(self._daemon.socket_dir / "leader", name="reader") as admin:
            while cursor is not None:
                answer = admin.read_events(
                    epoch, at, cursor=cursor, namespace=bytes.fromhex(shown), most=READ_PAGES, timeout_s=TIMEOUT_S
                )
                if answer.lost:
                    places.clear()
                for record in answer.records:
                    ends = range(16, len(record.hashes) + 1, 16)
                    for place, end in enumerate(ends, record.place):
                        number = int.from_bytes(record.hashes[end - 8 : end], "big", signed=True)
                        if record.event == "stored":
                            places[record.tier, place] = number
                        else:
                            places.pop((record.tier, place), None)
                epoch, at, cursor = answer.epoch, answer.next, answer.cursor
        found: dict[str | None, set[int]] = {}
        for (tier, _), number in places.items():
            found.setdefault(MEDIA[tier], set()).add(number)
        return found

    def agree(self, what: str) -> dict[str | None, set[int]]:
        """Waits until both streams have what engine and kvferry hold; returns the pages of each medium."""
        told: list[Any] = []

        def equal() -> bool:
            for each in (self.own, self.tiers, self.blind):
                each.poll(10)
            held = self.own.router.media() | self.in_kvferry()
            told[:] = [held, self.tiers.router.media(), self.blind.router.media()]
            union = set().union(*held.values())
            return told[1] == held and told[2] == ({None: union} if union else {})

        try:
            eventually(f"the subscribers have what engine and kvferry hold: {what}", equal)
        except AssertionError as error:
            sizes = [{medium: len(pages) for medium, pages in each.items()} for each in told]
            raise AssertionError(f"{error}: {sizes}") from error
        return told[0]

    def expected(self, prompt: list[int]) -> tuple[int, int]:
        """Tokens of a prompt that are on the device, and that kvferry brings, as the merged stream has them."""
        held, pages = self.tiers.router.held, self.tiers.router.sequence(prompt)
        pages = pages[: (len(prompt) - 1) // PAGE_TOKENS]
        device = _first_without(pages, held.get("GPU", set()))
        below = set().union(*(held.get(medium, set()) for medium in MEDIA.values()))
        return device * PAGE_TOKENS, _first_without(pages[device:], below) * PAGE_TOKENS


def _first_without(pages: list[int], held: set[int]) -> int:
    return next((at for at, page in enumerate(pages) if page not in held), len(pages))


@contextlib.contextmanager
def streams(folder: Path, daemon: Daemon, engine: SglangEngine) -> Iterator[Streams]:
    """Subscribers of a running engine."""
    opened = Streams(folder, daemon, engine)
    try:
        yield opened
    finally:
        opened.close()
