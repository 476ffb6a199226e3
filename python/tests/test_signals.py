"""Tests that processes started by the tests have default signal handling, however the tests were started."""

import subprocess
import sys
from pathlib import Path

import pytest
from signals import ENDING

STARTED_BY_THE_TESTS = """
import subprocess, sys
import conftest
subprocess.run([sys.executable, "-c", "print(open('/proc/self/status').read())"], check=True)
"""


@pytest.mark.parametrize("ignored", ["", "INT", "INT HUP QUIT TERM"])
def test_ignored_signals_are_not_inherited_by_started_processes(ignored: str) -> None:
    script = 'trap "" $1; shift; exec "$@"' if ignored else 'shift; exec "$@"'
    command = ["sh", "-c", script, "sh", ignored, sys.executable, "-c", STARTED_BY_THE_TESTS]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    masks = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if line.startswith("Sig"))
    for name in ("SigIgn", "SigBlk"):
        assert not [each.name for each in ENDING if int(masks[name], 16) >> (each - 1) & 1], name
