"""Tests of the examples for authors of connectors: the program in `examples`, and the bytes in `docs/wire.md`."""

import re
import subprocess
import sys
from pathlib import Path

import plain_msgpack
import pytest
import wire_table
from daemon import TIMEOUT_S, environment, running

from kvferry import wire

ROOT = Path(__file__).parents[2]
CONNECTOR = ROOT / "examples" / "connector.py"
TABLE = {row["number"]: row for row in wire_table.table()["kinds"]}
NAMES = {kind.name.lower(): kind for kind in wire.Kind}


def connector(socket_dir: Path) -> subprocess.CompletedProcess[str]:
    # A warning, such as one of a socket that is left open or of a name that will go, is an error.
    command = [sys.executable, "-W", "error", str(CONNECTOR), str(socket_dir)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("version", [1, 2])
def test_a_connector_that_was_written_from_the_documents_stores_and_loads(version: int) -> None:
    with running(ranks=1, g2="64MiB", wire_max=version) as daemon:
        for hits, stored, present in ((0, 20, 0), (20, 0, 20)):
            ended = connector(daemon.socket_dir)
            assert (ended.returncode, ended.stderr) == (0, "")
            assert f"'hit_pages': {hits}," in ended.stdout.splitlines()[1]
            assert f"store {{'stored_pages': {stored}, 'present_pages': {present}," in ended.stdout
            assert "load {'pages': 20}" in ended.stdout
            assert "20 pages, 40960 bytes are right, and the other pages untouched" in ended.stdout
        daemon.wait_idle()


def test_a_connector_without_a_daemon_ends_in_time_with_the_reason(tmp_path: Path) -> None:
    ended = connector(tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "error: request of kind 1: no answer within 7.0 s\n"


def test_the_example_of_the_clients_causes_no_warning(tmp_path: Path) -> None:
    """Also of asyncio's debugger, which sees tasks that are left behind and a loop that stands still."""
    text = (ROOT / "docs" / "clients.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example + "\n\nimport sys\n\nprint(asyncio.run(main(Path(sys.argv[1])), debug=True))\n")
    with running(ranks=1, g2="64MiB") as daemon:
        command = [sys.executable, "-W", "error", str(program), str(daemon.socket_dir)]
        # With the variables that torch needs.
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.stderr == ""
    assert ended.returncode == 0
    assert ended.stdout == "96 tokens were loaded\n[0, 4, 2]\n"


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
        schema = TABLE[kind]["body"]
        form = wire_table.of_schema(schema, schema.get("$defs", {}))
        assert list(wire_table.misfits(form, plain_msgpack.read(bytes.fromhex(body.strip())))) == []
        if kind in wire.BODIES and envelope is not None:
            assert isinstance(envelope.body, wire.BODIES[kind])
    # The pages that the text names.
    bodies = {title.split()[1]: bytes.fromhex(body.strip()) for title, _, body in messages}
    assert bytes.fromhex("920703") in bodies["store"], "device pages 7 and 3"
    assert bytes.fromhex("91921402") in bodies["load"], "a run of 2 pages from 20 on"
    assert bytes(range(32)) in bodies["lookup"]
