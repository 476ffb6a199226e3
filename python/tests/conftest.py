"""Configuration of the Python tests. Cheap tests run first, those with a real engine last."""

import os
import time

import engine
import pytest
import signals

from kvferry import files, looks

signals.set_to_defaults()
#: With --full, engines start and spawn their processes as those of a user do.
engine.Process.forked = not os.environ.get("KVFERRY_VLLM_FULL")
#: Files of tests with a real engine begin with these names.
WITH_ENGINES = ("test_vllm", "test_sglang.", "test_sglang_ranks", "test_sglang_at_once", "test_engines")


@pytest.fixture(autouse=True)
def files_are_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files that a test writes count as older than the test's own process. Engines are processes of their own.

    Checks of files get the time that a busy machine takes.
    """
    monkeypatch.setattr(files, "began_at", lambda: time.time() + 60)
    monkeypatch.setattr(looks, "LOOKS_S", 60.0)
    monkeypatch.setattr(looks, "PAUSE_S", 0.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: item.path.name.startswith(("test_vllm", "test_sglang.", "test_sglang_ranks", "test_engines"))
    )
