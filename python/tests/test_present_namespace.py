"""Tests of the file that names the namespace of an engine's pages, for ``kvferry events``."""

import time
from pathlib import Path

from kvferry import present_namespace
from kvferry.present_namespace import PresentNamespace, path_of


def test_a_second_line_has_numbers_of_groups_that_differ_from_the_order_of_registration(tmp_path: Path) -> None:
    for groups, line in (((), ""), ((0,), ""), ((0, 1, 2), ""), ((1,), "1\n"), ((0, 2), "0,2\n"), ((1, 0), "1,0\n")):
        present_namespace.write(tmp_path, 0, b"\x01\xab", groups)
        assert path_of(tmp_path, 0).read_text() == "01ab\n" + line
    present_namespace.write(tmp_path, 0, None)
    assert path_of(tmp_path, 0).read_text() == "\n"
    assert list(tmp_path.iterdir()) == [path_of(tmp_path, 0)], "nothing else is left"


def test_the_file_is_written_when_the_namespace_changes_and_restored_from_time_to_time(tmp_path: Path) -> None:
    shown, path = PresentNamespace(tmp_path, 3, (2, 5)), path_of(tmp_path, 3)
    shown.show(b"a")
    assert path.read_text() == "61\n2,5\n"
    shown.show(b"b")
    assert path.read_text() == "62\n2,5\n"
    for spoil in (path.unlink, lambda: path.write_text("another\n"), lambda: path.write_bytes(b"\xff")):
        spoil()
        again = shown.show(b"b")
        assert not path.exists() or path.read_bytes() != b"62\n2,5\n", "not before that time"
        assert again > time.monotonic()
        shown._look_at = 0.0
        shown.show(b"b")
        assert path.read_text() == "62\n2,5\n"
    shown.show(None)
    assert path.read_text() == "\n2,5\n"


def test_a_folder_that_is_missing_is_tried_again_later(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shown = PresentNamespace(folder, 0)
    again = shown.show(b"a")
    assert shown.show(b"a") == again, "not before that time"
    folder.mkdir()
    shown._look_at = 0.0
    shown.show(b"a")
    assert path_of(folder, 0).exists()


def test_an_engine_that_ends_shows_no_namespace(tmp_path: Path) -> None:
    first, second = PresentNamespace(tmp_path, 0), PresentNamespace(tmp_path, 0)
    path = path_of(tmp_path, 0)
    first.show(b"first")
    second.show(b"second")
    first.close()
    assert path.read_text() == f"{b'second'.hex()}\n", "it is another engine's by now"
    second.close()
    assert path.read_text() == "\n"
