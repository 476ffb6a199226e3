"""Tests of the process that forks engines and scripts."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import TIMEOUT_S
from template import Forked, Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    template = Template(["json"])
    yield template
    template.end()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def run(template: Template, output: Path, source: str, *arguments: str, **variables: str) -> Forked:
    """Runs a script that writes into a file."""
    with output.open("w") as file, open(os.devnull) as nothing:
        command, written = ["-c", source, *arguments], file.fileno()
        return template.fork(command, {**os.environ, **variables}, nothing.fileno(), written, written)


def test_a_script_runs_as_in_an_interpreter_of_its_own(template: Template, output: Path) -> None:
    source = "import os, sys; print(sys.argv, os.environ['A'], os.getsid(0) == os.getpid(), __name__); sys.exit(3)"
    forked = run(template, output, source, "x", A="b")
    assert forked.wait(TIMEOUT_S) == forked.poll() == 3
    assert output.read_text() == "['-c', 'x'] b True __main__\n"


def test_a_script_that_fails_prints_why(template: Template, output: Path) -> None:
    forked = run(template, output, "1 / 0")
    assert forked.wait(TIMEOUT_S) == 1
    assert output.read_text().endswith("ZeroDivisionError: division by zero\n")


def test_a_process_ends_by_a_signal_and_is_gone_after_the_wait(template: Template, output: Path) -> None:
    forked = run(template, output, "import time; time.sleep(600)")
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    # The number of a process that has ended stays its own until the wait.
    os.kill(forked.pid, signal.SIGTERM)
    assert forked.wait(TIMEOUT_S) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(forked.pid, 0)
    forked.send_signal(signal.SIGTERM)


def test_a_template_with_a_second_thread_is_refused(tmp_path: Path) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(source)
    with pytest.raises(AssertionError, match="may hold a lock"):
        Template(["threaded"], {"PYTHONPATH": str(tmp_path)})


def test_a_template_that_has_imported_kvferry_ends() -> None:
    with pytest.raises(AssertionError, match="has ended"):
        Template(["kvferry"])
