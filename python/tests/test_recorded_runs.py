"""Recordings of engines with several groups, with a disk, with processes that end, and of replicas; their replay."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from calls_file import ANSWER, frames
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, tokens
from recorded_runs import Recorded, replayed

Rows = dict[str, list[str]]


def no_difference(path: Path, *arguments: str) -> Rows:
    """Replays a recording; what differs must have a reason, and the result must say so."""
    code, rows, errors = replayed(path, *arguments)
    print(rows, errors)
    assert code == 0, (rows, errors)
    assert rows["different"] == rows["bytes wrong"] == ["0"]
    compared, equal, others = (int(rows[name][0]) for name in ("compared", "equal", "not comparable"))
    assert equal + others == compared
    assert sum(int(reason.split()[0]) for reason in rows.get("of these", [])) == others
    text = f"{equal} of {compared} answers are equal, {others} cannot be compared"
    assert rows["result"] == [text if others else f"all {compared} answers are equal"]
    return rows


@pytest.mark.parametrize("kind", ["window", "state"])
def test_several_groups_replay_with_the_same_answers(kind: str, tmp_path: Path) -> None:
    with running(ranks=1, ratio=4, g2="70x32KiB") as daemon:
        run = Recorded(daemon, tmp_path, kind=kind, pages=128)
        run.wait_recorded()
        run.turns(20)
        run.end()
    rows = no_difference(run.path)
    assert rows["engine"] == ["1 ranks, 2 groups, 128 pages"]
    assert rows["not comparable"] == ["0"]
    assert int(rows["bytes verified"][0]) > 10 * 1024
    code, rows, errors = replayed(run.path, "--g2-pages", "400")
    assert code == 1, (rows, errors)
    assert int(rows["different"][0]) > 0


def test_loads_from_a_disk_replay_with_the_same_answers(tmp_path: Path) -> None:
    with running(ranks=1, ratio=4, g2="30x32KiB", g3="16MiB", g3_dir=tmp_path / "disk") as daemon:
        run = Recorded(daemon, tmp_path)
        run.wait_recorded()
        # Moves that are slower than the turns leave too few pages on the disk.
        run.turns(20, each=lambda turn: daemon.wait_moved())
        run.end()
    answers = [frame.fields[1] for frame in frames(run.path) if frame.kind == ANSWER]
    below = [pages for answer in answers for _, pages in answer.get("below_pages", [])]
    assert sum(below) > 20, "too little comes from the disk"
    rows = no_difference(run.path, "--g3", "4MiB", "--g3-dir", str(tmp_path / "other"))
    assert int(rows["equal"][0]) > int(rows["compared"][0]) * 3 // 4
    assert int(rows["bytes verified"][0]) > 20 * 1024
    # Without a disk the pages are not there.
    _, rows, _ = replayed(run.path)
    assert any("the leader had a disk of" in note for note in rows["note"])
    assert int(rows["not comparable"][0]) > 10


def test_a_disk_excuses_no_hit_while_host_memory_has_room(tmp_path: Path) -> None:
    with running(ranks=1, ratio=4, g2="1000x32KiB", g3="64MiB", g3_dir=tmp_path / "disk") as daemon:
        run = Recorded(daemon, tmp_path)
        run.wait_recorded()
        run.turns(6)
        run.end()
    assert no_difference(run.path, "--g3", "4MiB", "--g3-dir", str(tmp_path / "other"))["not comparable"] == ["0"]


def kill_leader(daemon: Daemon, run: Recorded) -> None:
    daemon.killed(daemon.leader)


def kill_worker(daemon: Daemon, run: Recorded) -> None:
    run.engine.add(tokens(PAGE_TOKENS * 12, 77))
    run.engine.step()
    daemon.killed(daemon.workers[0])


def lose_connection(daemon: Daemon, run: Recorded) -> None:
    """Stops the leader for so long that the engine gives the connection up."""
    leader = daemon.leader
    run.engine.add(tokens(PAGE_TOKENS * 12, 77))
    run.engine.step()
    os.kill(leader, signal.SIGSTOP)
    try:
        eventually("the connection is lost", lambda: run.engine.step() and not run.side._client.listening)
    finally:
        os.kill(leader, signal.SIGCONT)


@pytest.mark.parametrize("disturb", [kill_leader, kill_worker, lose_connection])
def test_a_process_that_was_away_causes_no_false_difference(
    disturb: Callable[[Daemon, Recorded], None], tmp_path: Path
) -> None:
    with running(ranks=1, ratio=4, g2="400x32KiB") as daemon:
        run = Recorded(daemon, tmp_path)
        run.wait_recorded()
        run.turns(6)
        disturb(daemon, run)
        run.turns(6, seed=2)
        run.wait_recorded()
        run.turns(6, seed=3)
        run.end()
    rows = no_difference(run.path)
    assert int(rows["equal"][0]) > int(rows["compared"][0]) * 3 // 4
    again = any("the leader was started again" in note for note in rows.get("note", []))
    assert again == (disturb is kill_leader)


@pytest.mark.parametrize("host_pages", [800, 60])
def test_a_replica_that_is_replayed_alone_depends_on_the_other_one(host_pages: int, tmp_path: Path) -> None:
    with running(ranks=1, replicas=2, ratio=4, g2=f"{host_pages}x32KiB") as daemon:
        both = [Recorded(daemon, tmp_path, replica=replica) for replica in (0, 1)]
        for each in both:
            each.wait_recorded()
        for turn in range(6):
            for replica, each in enumerate(both):
                each.turns(2, seed=turn + replica)
        for each in both:
            each.end()
    reasons: list[str] = []
    for each in both:
        rows = no_difference(each.path)
        assert any("served up to 2 engines" in note for note in rows["note"])
        reasons += rows.get("of these", [])
    assert any("depend on other engines of the leader" in reason for reason in reasons)
