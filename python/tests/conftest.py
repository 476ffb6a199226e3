"""Tests of the Python package. Those with a real engine come last, the cheap ones first."""

import pytest
import signals

signals.set_to_defaults()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name.startswith("test_vllm"))
