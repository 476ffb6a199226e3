"""Tests of the examples for authors of connectors: the program in `examples`, and the bytes in `docs/wire.md`."""

import subprocess
import sys
from pathlib import Path

import pytest
from daemon import TIMEOUT_S, environment, running

from kvferry import wire

ROOT = Path(__file__).parents[2]
CONNECTOR = ROOT / "examples" / "connector.py"
NAMES = {kind.name.lower(): kind for kind in wire.Kind}


def connector(socket_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CONNECTOR), str(socket_dir)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("version", [1, 2])
def test_a_connector_that_was_written_from_the_documents_stores_and_loads(version: int) -> None:
    with running(ranks=1, g2="64MiB", wire_max=version) as daemon:
        for hits, stored, present in ((0, 20, 0), (20, 0, 20)):
            ended = connector(daemon.socket_dir)
            assert ended.returncode == 0, ended.stderr
            assert f"'hit_pages': {hits}," in ended.stdout.splitlines()[1]
            assert f"store {{'stored_pages': {stored}, 'present_pages': {present}," in ended.stdout
            assert "load {'pages': 20}" in ended.stdout
            assert "20 pages, 40960 bytes are right, and the other pages untouched" in ended.stdout
        daemon.wait_idle()


def test_a_connector_without_a_daemon_ends_in_time_with_the_reason(tmp_path: Path) -> None:
    ended = connector(tmp_path)
    assert ended.returncode == 1
    assert "request of kind 1: no answer within 7.0 s" in ended.stderr


def test_the_bytes_in_the_documents_are_the_messages_that_they_name() -> None:
    text = (ROOT / "docs" / "wire.md").read_text()
    block = text.split("## A first connector")[1].split("```")[1].strip().splitlines()
    messages = list(zip(block[::3], block[1::3], block[2::3], strict=True))
    assert len(messages) == 14
    for title, head, body in messages:
        arrow, name = title.split()
        envelope = wire.read([bytes.fromhex(head.strip()), bytes.fromhex(body.strip())]) if arrow[0] == "<" else None
        header = bytes.fromhex(head.strip())
        kind = int.from_bytes(header[6:8], "big")
        assert kind == NAMES[name]
        assert (envelope is not None) == (not wire.is_request(kind))
        if kind in wire.BODIES and envelope is not None:
            assert isinstance(envelope.body, wire.BODIES[kind])
    # The pages that the text names.
    bodies = {title.split()[1]: bytes.fromhex(body.strip()) for title, _, body in messages}
    assert bytes.fromhex("920703") in bodies["store"], "device pages 7 and 3"
    assert bytes.fromhex("91921402") in bodies["load"], "a run of 2 pages from 20 on"
    assert bytes(range(32)) in bodies["lookup"]
