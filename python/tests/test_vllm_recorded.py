"""A real vLLM that is recorded, and its replay."""

import contextlib
from pathlib import Path

import calls_file
from daemon import running
from engine import PAGE_TOKENS, Engine, config, said, settled, tokens
from recorded_runs import replayed


def test_a_recorded_vllm_computes_the_same_and_replays_with_the_same_answers(tmp_path: Path) -> None:
    prompts = [tokens(PAGE_TOKENS * 6 + 3, seed) for seed in range(3)]
    # Host memory has room for all prompts: whether a store finds room in a full one depends on time.
    with running(ranks=1, ratio=4, g2="96x64KiB") as daemon:
        engine = Engine(config(daemon.socket_dir, extra={"record": str(tmp_path / "calls")}))
        try:
            daemon.wait_ready()
            first = engine.generate(*prompts)
            settled(engine, daemon)
            engine.reset()
            again = engine.generate(*prompts)
            assert said(again) == said(first)
            assert any(answer["cached"] for answer in again), "pages were loaded"
            settled(engine, daemon)
        finally:
            engine.end()
    (path,) = tmp_path.glob("calls.0.*")
    names = {name for name, _, _ in whole_calls(path)}
    assert names >= {"on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"}
    code, rows, errors = replayed(path)
    print(rows, errors)
    assert code == 0, (rows, errors)
    assert int(rows["compared"][0]) >= 9
    assert rows["different"] == ["0"]
    assert int(rows["bytes verified"][0]) > 0


def whole_calls(path: Path) -> list:
    try:
        return calls_file.calls(path)
    except calls_file.Cut:
        # The engine was killed.
        return [(frame.fields[0], None, None) for frame in until_cut(path) if frame.kind == calls_file.CALL]


def until_cut(path: Path) -> list:
    found: list = []
    with contextlib.suppress(calls_file.Cut):
        for frame in calls_file.frames(path):
            found.append(frame)
    return found
