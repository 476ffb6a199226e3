"""Tests of the file that names the namespace of an engine's pages, for ``kvferry events``."""

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


def test_the_file_is_written_again_only_if_it_is_gone_or_the_namespace_has_changed(tmp_path: Path) -> None:
    shown, path = PresentNamespace(tmp_path, 3, (2, 5)), path_of(tmp_path, 3)
    assert shown.show(b"a") is None
    assert path.read_text() == "61\n2,5\n"
    path.write_text("another\n")
    assert shown.show(b"a") is None
    assert path.read_text() == "another\n", "it has not changed"
    assert shown.show(b"b") is None
    assert path.read_text() == "62\n2,5\n"
    path.unlink()
    assert shown.show(b"b") is None
    assert path.read_text() == "62\n2,5\n"


def test_a_folder_that_is_missing_is_tried_again_later(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shown = PresentNamespace(folder, 0)
    again = shown.show(b"a")
    assert again is not None
    assert shown.show(b"a") == again, "not before that time"
    folder.mkdir()
    shown._not_before = 0
    assert shown.show(b"a") is None
    assert path_of(folder, 0).exists()
