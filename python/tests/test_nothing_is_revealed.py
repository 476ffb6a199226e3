"""Logs, status and metrics have no namespace, no page hash, no token and no KV byte, at the most talkative level.

One run has it all: stores, loads, resets, failures, refusals of every kind of message, a disk that is damaged, and
processes that are killed. What is printed meanwhile is searched for what must not be there, in every form in which a
program may print bytes.
"""

import base64
import contextlib
import hashlib
import json
import logging
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from daemon import TIMEOUT_S, Daemon, eventually
from raw_peer import Closed, RawPeer
from test_every_message import KINDS, fields
from test_merged_events import FakeEngine, Merged, Router, joined, port
from test_typed_clients import answer_of

from kvferry import wire
from kvferry.admin import AdminClient
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.requests import Failure
from kvferry.served import Part
from kvferry.wire import Kind

ENGINE = bytes.fromhex("a1b2c3d4e5f60718293a4b5c6d7e8f90")
NAME = "an engine with a name"
SALT = b"salt-5Yq2Vw8Rk1Zx7Lm3"
NAMESPACE = b"tenant-Gh4Tn9Pb6Cd2Fj " + SALT
PAGES, PAGE_TOKENS, NUMBERS = 8, 8, 16
HASHES = [hashlib.sha256(b"%d" % page + SALT).digest() for page in range(PAGES)]
#: Of each page, the tokens and the KV bytes.
TOKENS = [[700_000_000 + 100 * page + 7 * at for at in range(PAGE_TOKENS)] for page in range(PAGES)]
KV = [hashlib.shake_256(each).digest(PAGE_TOKENS * NUMBERS * 4) for each in HASHES]
#: Of the same kinds, and sent in the place of other types alone: a text where a list belongs, too large a number.
MISPLACED_TEXT = "Jd8Wm3Xs5Qv1Ky0Hu6Ea"
MISPLACED_HASH = hashlib.sha256(MISPLACED_TEXT.encode()).digest()
MISPLACED_TOKENS = [800_000_000 + 7 * at for at in range(PAGE_TOKENS)]
#: Consecutive bytes of a secret that must not appear. Logs may have the first 4 bytes of the last 16 of a hash.
PIECE = 6


class Secrets:
    """What must not be printed."""

    def __init__(self, texts: list[bytes], hashes: list[bytes], tokens: list[int]):
        #: All pieces, and what they are of.
        self.pieces = {
            secret[at : at + PIECE]: f"{secret!r}, from byte {at}"
            for secret in (*texts, *hashes)
            for at in range(len(secret) - PIECE + 1)
        }
        #: Tokens, and hashes as numbers: fingerprints have 128 bits, pages in events 64.
        self.numbers = {token: f"the token {token}" for token in tokens}
        for each in hashes:
            for size in (8, 16, 32):
                for order in ("big", "little"):
                    number = int.from_bytes(each[-size:], order)  # type: ignore[arg-type]
                    self.numbers[number] = f"{each!r} as a number of {size} bytes"
                    self.numbers[(1 << 8 * size) - number] = f"{each!r} as a signed number of {size} bytes"

    def revealed(self, text: bytes) -> list[str]:
        """What of the secrets a text has.

        Times of log lines are left out: six of their digits are sometimes those of a hash in hexadecimal.
        """
        text = TIME.sub(b"", text)
        found = [
            f"{self.pieces[piece]}: {view[max(at - 80, 0) : at + 80]!r}"
            for view in views(text)
            for at in range(len(view) - PIECE + 1)
            if (piece := view[at : at + PIECE]) in self.pieces
        ]
        for number in re.findall(rb"[0-9]{9,}", text):
            if int(number) in self.numbers:
                found.append(f"{self.numbers[int(number)]}: {number!r}")
        return found


SECRETS = Secrets([NAMESPACE, *KV], HASHES, [token for tokens in TOKENS for token in tokens])
MISPLACED = Secrets([MISPLACED_TEXT.encode(), MISPLACED_HASH.hex().encode()], [MISPLACED_HASH], MISPLACED_TOKENS)
revealed = SECRETS.revealed
TIME = re.compile(rb"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
#: Forms in which programs print bytes, and how they are read.
HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{%d,}" % (2 * PIECE))
SINGLE = re.compile(rb"(?:(?:0x|\\x)?[0-9a-fA-F]{1,3}(?:,?\s*|:)){%d,}" % PIECE)
IN_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{%d,}" % (PIECE * 4 // 3 + 4))


def views(text: bytes) -> Iterator[bytes]:
    """A text, and every sequence of bytes that is printed in it."""
    yield text
    for found in HEXADECIMAL.findall(text):
        for start in (0, 1):
            run = found[start:]
            yield bytes.fromhex(run[: len(run) // 2 * 2].decode())
    for found in SINGLE.findall(text):
        words = re.findall(rb"[0-9a-fA-F]+", found.replace(b"0x", b" ").replace(b"\\x", b" "))
        for base in (10, 16):
            yield from listed(words, base)
    for found in IN_BASE64.findall(text):
        for start in range(4):
            run = found[start:].replace(b"-", b"+").replace(b"_", b"/")
            with contextlib.suppress(ValueError):
                yield base64.b64decode(run[: len(run) // 4 * 4])


def listed(words: list[bytes], base: int) -> Iterator[bytes]:
    """Yields the bytes that are listed as numbers, up to each word that is no byte."""
    run = bytearray()
    for word in words:
        try:
            run.append(int(word, base))
        except ValueError:
            yield bytes(run)
            run.clear()
    yield bytes(run)


# The run.


class Engine:
    """An engine with one rank."""

    def __init__(self, socket_dir: Path):
        self.tensor = torch.zeros((2 * PAGES, 1, PAGE_TOKENS, NUMBERS), dtype=torch.float32)
        group = Group({"layer": self.tensor}, engine_page_tokens=PAGE_TOKENS, device_pages=2 * PAGES)
        memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"a model"))
        self.rank = RankSession(socket_dir / "worker-0-0", ENGINE, 0, 0, memory, name=NAME)
        self.client = EngineClient(socket_dir / "leader", ENGINE, first_id=1, name=NAME)
        self.client.start()
        self.slot = 0

    def compute(self) -> None:
        for page, content in enumerate(KV):
            self.tensor[page] = torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(1, PAGE_TOKENS, -1)

    def lookup(self, pages: int = PAGES) -> int:
        """Looks the first pages up, and returns how many were found."""
        self.slot += 1
        asked = self.client.lookup(self.slot, HASHES[:pages], namespace=NAMESPACE, timeout_s=TIMEOUT_S)
        answer: Any = answer_of(asked)
        return answer.hit_pages

    def brings(self, pages: int) -> bool:
        """Whether the first pages are found and loaded. A lookup may be refused: a worker's end is seen late."""
        self.ready()
        self.slot += 1
        asked = self.client.lookup(self.slot, HASHES[:pages], namespace=NAMESPACE, timeout_s=TIMEOUT_S)
        assert asked.wait(TIMEOUT_S)
        loaded = self.load(pages)
        self.finish()
        return asked.failure is None and loaded == wire.LoadAnswer(pages)

    def store(self, pages: int = PAGES, *, timeout_s: float = TIMEOUT_S, written: bool = True) -> Any:
        parts = [Part(0, 0, list(range(pages)))]
        store = self.client.store(self.slot, parts, timeout_s=timeout_s, grace_s=TIMEOUT_S)
        if written:
            self.rank.wrote(store.id)
        assert store.wait(2 * TIMEOUT_S)
        return store.failure or store.answer

    def load(self, pages: int = PAGES) -> Any:
        load = self.client.load(self.slot, [Part(0, 0, [PAGES + page for page in range(pages)])], timeout_s=TIMEOUT_S)
        assert load.wait(TIMEOUT_S)
        return load.failure or load.answer

    def finish(self) -> None:
        answer_of(self.client.finish(self.slot, timeout_s=TIMEOUT_S))

    def ready(self) -> None:
        def served() -> bool:
            self.slot += 1
            asked = self.client.lookup(self.slot, HASHES[:1], namespace=NAMESPACE, timeout_s=TIMEOUT_S)
            assert asked.wait(TIMEOUT_S)
            return asked.failure is None

        eventually("lookups are served", served)
        self.finish()

    def close(self) -> None:
        self.client.close()
        self.rank.close()


def works(engine: Engine) -> None:
    """Stores and loads, and what fails by itself."""
    engine.compute()
    assert engine.lookup() == 0
    # Nothing is written: the store ends at its deadline.
    assert engine.store(timeout_s=0.2, written=False).failed_pages == PAGES
    assert engine.load().code == wire.Code.NOT_PINNED
    assert engine.store() == wire.StoreAnswer(PAGES, 0)
    engine.finish()
    assert engine.store().code == wire.Code.UNKNOWN_SLOT
    assert engine.lookup() == PAGES
    assert engine.load() == wire.LoadAnswer(PAGES)
    assert engine.tensor[PAGES : 2 * PAGES].numpy().tobytes() == b"".join(KV)
    engine.finish()
    # Other hashes than those of the lookup.
    engine.lookup(2)
    parts = [Part(0, 0, [0, 1])]
    other = engine.client.store(engine.slot, parts, more=HASHES[4:5], more_from=1, timeout_s=TIMEOUT_S)
    assert other.wait(TIMEOUT_S)
    assert other.failure is not None
    engine.finish()


def wrong_bodies(given: dict[str, Any]) -> Iterator[bytes]:
    """A body with secrets in its fields: as they should be, of wrong types, of wrong lengths, and torn."""
    secrets: dict[str, Any] = {
        "namespace": NAMESPACE,
        "hash_bytes": 32,
        "hashes": b"".join(HASHES),
        "more_hashes": b"".join(HASHES),
        "content": b"".join(KV),
    }
    full = {name: secrets.get(name, value) for name, value in given.items()}
    yield msgspec.msgpack.encode(full)
    encoded = msgspec.msgpack.encode({**full, "namespace": NAMESPACE, "hashes": b"".join(HASHES)})
    yield from (encoded[: len(encoded) * part // 5] for part in range(1, 5))
    yield msgspec.msgpack.encode({**full, "hash_bytes": 33, "namespace": NAMESPACE * 40})
    for name in {*full, "namespace", "hashes"}:
        # Bytes where others belong, and secrets of other types than any field of this name has.
        for value in (HASHES[0], [*HASHES[0]], {NAMESPACE: NAMESPACE}, [NAMESPACE], KV[0]):
            yield msgspec.msgpack.encode({**full, name: value})
        number = int.from_bytes(MISPLACED_HASH[-8:], "big")
        for value in (MISPLACED_TEXT, MISPLACED_HASH.hex(), number, MISPLACED_TOKENS, {MISPLACED_TEXT: 1}):
            yield msgspec.msgpack.encode({**full, name: value})
    yield msgspec.msgpack.encode({**full, NAMESPACE.decode(): NAMESPACE, HASHES[0].hex(): 1})
    yield msgspec.msgpack.encode(MISPLACED_TEXT)
    yield NAMESPACE
    yield HASHES[0]


def sends_what_is_refused(directory: Path, role: str, count: list[int]) -> None:
    """Sends every kind with secrets in every form over raw connections."""
    for kind in KINDS:
        # Operators' own words, which change the run.
        if kind["name"] in ("drain", "set_log", "hello", "welcome"):
            continue
        for body in wrong_bodies(fields(kind["name"])):
            # A connection is closed after a few messages that cannot be read.
            with contextlib.suppress(Closed), RawPeer.connect(directory) as peer:
                peer.hello(role, engine=b"r" * 16)
                peer.send(kind["number"], body, deadline_ms=100)
                peer.answers_until_pong()
                count[0] += 1
    for name in (MISPLACED_TEXT, MISPLACED_HASH.hex()):
        with contextlib.suppress(Closed), RawPeer.connect(directory) as peer:
            peer.send(Kind.HELLO, msgspec.msgpack.encode({"role": name, "engine": HASHES[0]}), version=1)
            peer.receive()


def damages(disk: Path) -> int:
    """Changes a byte of every page on the disk, and returns the number of pages."""
    changed = 0
    for path in disk.rglob("segment-*"):
        content = bytearray(path.read_bytes())
        for each in KV:
            at = content.find(each)
            if at >= 0:
                content[at] ^= 0x80
                changed += 1
        path.write_bytes(content)
    return changed


def metrics(log: Path) -> bytes:
    """What the monitor serves at the address that the log names."""
    found = re.findall(rb"monitor ready address=(\S+)", log.read_bytes())
    assert found, "the log names no address of the monitor"
    with urllib.request.urlopen(f"http://{found[-1].decode()}/metrics", timeout=TIMEOUT_S) as response:
        return response.read()


def publishes(context: zmq.Context, source: FakeEngine, router: Router) -> None:
    """Publishes events of the engine with tokens and numbers of the pages, right and wrong ones."""
    numbers = [int.from_bytes(each[-8:], "big") for each in HASHES]
    event = {
        "type": "BlockStored",
        "block_hashes": numbers,
        "parent_block_hash": None,
        "token_ids": [token for tokens in TOKENS for token in tokens],
        "block_size": PAGE_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    # A page in kvferry is announced once: an announcement before the router's subscription would be lost.
    joined(router, source)
    source.publish(event)
    seen: set[str | None] = set()

    def announced() -> bool:
        while router.socket.poll(10):
            _, _, payload = router.socket.recv_multipart()
            seen.update(each.get("medium") for each in msgspec.msgpack.decode(payload)[1])
        source.answer_replays()
        return "CPU" in seen

    eventually("the pages in kvferry are announced", announced)
    for wrong in (
        {"type": "No", **{name: value for name, value in event.items() if name != "type"}},
        {**event, "block_hashes": numbers[:3]},
        {**event, "block_size": MISPLACED_TEXT},
        {**event, "token_ids": {"ids": MISPLACED_TOKENS}},
    ):
        source.publish(wrong)
        source.publish(event)
        eventually("it is published again", announced)


@pytest.fixture(scope="module")
def printed() -> Iterator[dict[str, bytes]]:
    """What was printed, by its source."""
    handler = Kept()
    logger = logging.getLogger("kvferry")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(1)
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder, contextlib.ExitStack() as all_:
        all_.callback(logger.setLevel, level)
        all_.callback(logger.removeHandler, handler)
        yield run(Path(folder), all_, handler)


class Kept(logging.Handler):
    """Keeps what the clients in this process log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def run(folder: Path, all_: contextlib.ExitStack, kept: Kept) -> dict[str, bytes]:
    log, disk = folder / "log", folder / "disk"
    daemon = Daemon(
        folder / "s",
        ranks=1,
        g2="64MiB",
        g3="64MiB",
        g3_dir=disk,
        monitor=0,
        log=log,
        variables={"KVFERRY_LOG": "trace"},
    )
    all_.callback(daemon.kill)
    daemon.start()
    engine = Engine(daemon.socket_dir)
    all_.callback(engine.close)
    engine.ready()
    works(engine)

    context = zmq.Context()
    all_.callback(context.destroy, 0)
    source = FakeEngine(context, port(), port())
    events_log = all_.enter_context((folder / "events").open("wb"))
    command = Merged(daemon.socket_dir, source, events_log, log="trace", namespace=NAMESPACE.hex())
    all_.callback(command.process.kill)
    router = Router(context, command.port, source)
    source.subscribed()
    publishes(context, source, router)

    refused = [0]
    for directory, roles in (("leader", ("engine", "admin")), ("worker-0-0", ("rank", "admin"))):
        for role in roles:
            sends_what_is_refused(daemon.socket_dir / directory, role, refused)
    assert refused[0] > 1000

    with AdminClient(daemon.socket_dir / "leader", name=NAME) as admin:
        # Raw admins may have reset the pages.
        if engine.lookup() < PAGES:
            assert engine.store().stored_pages
            engine.finish()
            assert engine.lookup() == PAGES
        with pytest.raises(Failure, match="hold") as leased:
            admin.reset(NAMESPACE)
        assert leased.value.code == wire.Code.LEASED
        engine.finish()
        status = [daemon.status(), daemon.status("--check")]
        first = metrics(log)
        assert admin.flush() == PAGES

    # Another leader reads the inventories, another worker takes the memory over.
    daemon.killed(daemon.leader)
    engine.ready()
    daemon.killed(daemon.workers[0])

    eventually("the next worker loads", lambda: engine.brings(PAGES))

    def resets() -> bool:
        asked = engine.client.reset(NAMESPACE, hashes=HASHES[6:], timeout_s=TIMEOUT_S)
        assert asked.wait(TIMEOUT_S)
        return asked.failure is None

    eventually("the disk is open, and pages are removed", resets)

    # Pages on a damaged disk, which has those of the reset, too, until their places are used again.
    daemon.stop()
    assert damages(disk) >= PAGES - 2
    daemon.start()

    def sees_damage() -> Any:
        # A lookup finds none of the disk's pages until the disk is open.
        engine.brings(PAGES - 2)
        seen = daemon.status()["ranks"][0].get("disk", {})
        # By the scrub, or by a load that came first.
        return seen.get("bad_pages") or seen.get("quarantined_pages")

    eventually("the damage is seen", sees_damage)
    status.append(daemon.status())
    with AdminClient(daemon.socket_dir / "leader", name=NAME) as admin:
        admin.reset(NAMESPACE)
        admin.reset_all()
    second = metrics(log)
    command.stop()
    daemon.stop()
    return {
        "leader, worker, up and monitor": log.read_bytes(),
        "status": json.dumps(status).encode(),
        "metrics": first + second,
        "events": (folder / "events").read_bytes(),
        "clients": "\n".join(kept.lines).encode(),
    }


#: Sources, and texts that each has: the run has done what it should have, and the search reads what was printed.
SOURCES = {
    "leader, worker, up and monitor": [b"TRACE", ENGINE[:4].hex().encode(), NAME.encode(), b"disk open", b"not taken"],
    "status": [b'"bad_pages"', b'"hit_pages": '],
    "metrics": [b"kvferry_up", b"kvferry_hit_pages_total"],
    "events": [b"block_size"],
    "clients": [b"its worker has the KV memory"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_printed_has_no_namespace_hash_token_or_kv_byte(printed: dict[str, bytes], source: str) -> None:
    assert revealed(printed[source])[:5] == []


@pytest.mark.parametrize("source", SOURCES)
def test_a_text_or_a_number_in_the_place_of_another_type_is_not_printed(printed: dict[str, bytes], source: str) -> None:
    """Decoders name the value that does not fit, and logs must not."""
    assert MISPLACED.revealed(printed[source])[:5] == []


@pytest.mark.parametrize("source", SOURCES)
def test_the_run_printed_what_it_should(printed: dict[str, bytes], source: str) -> None:
    text = printed[source]
    assert printed.keys() == SOURCES.keys()
    for part in SOURCES[source]:
        assert part in text, f"{source} has no {part!r}"


PRINTED = {
    "raw": lambda piece: piece,
    "hexadecimal": lambda piece: piece.hex().encode(),
    "within more digits": lambda piece: b"a" + piece.hex().encode() + b"bc",
    "capital letters": lambda piece: piece.hex().upper().encode(),
    "with colons": lambda piece: piece.hex(":").encode(),
    "with spaces": lambda piece: piece.hex(" ").encode(),
    "a list": lambda piece: str(list(piece)).encode(),
    "a list over several lines": lambda piece: b"[\n    " + b",\n    ".join(b"%d" % each for each in piece) + b",\n]",
    "a list without spaces": lambda piece: ",".join(map(str, piece)).encode(),
    "a hexadecimal list": lambda piece: ", ".join(f"0x{each:02x}" for each in piece).encode(),
    "escapes": lambda piece: "".join(f"\\x{each:02x}" for each in piece).encode(),
    "base64": lambda piece: base64.b64encode(b"x" + piece + b"yz"),
    "base64 for addresses": lambda piece: base64.urlsafe_b64encode(piece + b"yz"),
}


@pytest.mark.parametrize("form", PRINTED)
def test_a_secret_is_found_in_every_form(form: str) -> None:
    for secret in (NAMESPACE, SALT, *HASHES, *KV):
        for at in (0, len(secret) // 2, len(secret) - 2 * PIECE):
            text = PRINTED[form](secret[at : at + 2 * PIECE])
            assert revealed(b"field=" + text + b" and more"), (secret, text)


def test_numbers_and_tokens_are_found_and_nothing_else() -> None:
    for each in HASHES:
        for size in (8, 16):
            assert revealed(b"%d" % int.from_bytes(each[-size:], "big"))
        assert revealed(b"%d" % (int.from_bytes(each[-8:], "big") - (1 << 64)))
        assert revealed(f"Fingerprint({each[-16:].hex()})".encode())
        assert not revealed(each[-16:-12].hex().encode()), "logs may have 4 bytes"
    assert revealed(f"token_ids: {TOKENS[3]}".encode())
    assert not revealed(b"2026-11-27T21:18:05.600310Z  INFO leader started pid=20135 epoch=1795813811917")
