"""Tests of the KV events of a real vLLM with a real kvferry, as a router receives them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, Engine, config, tokens
from router import Subscriber
from vllm.distributed.kv_events import BlockStored

PROMPTS = [tokens(PAGE_TOKENS * 4 + 5, seed=31), tokens(PAGE_TOKENS * 3 + 5, seed=32)]
PAGES = 7


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(ranks=1) as daemon:
        yield daemon


def numbers(subscriber: Subscriber, medium: str) -> set[int]:
    return {page[2] for page in subscriber.router.pages() if page[0] == medium}


def test_a_router_has_the_pages_of_every_medium(daemon: Daemon, tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"]
    events: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints[0],
        "replay_endpoint": endpoints[1],
    }
    engine = Engine(config(daemon.socket_dir, kv_events_config=events, extra={"events": "engine"}))
    try:
        daemon.pid()
        with Subscriber(*endpoints) as router:

            def steps(what: str, check: Any) -> None:
                def so() -> bool:
                    engine.request("step")
                    router.poll()
                    return check()

                eventually(what, so)

            engine.generate(*PROMPTS, max_tokens=1)
            steps("all pages are announced", lambda: len(numbers(router, "CPU")) == PAGES)
            if not router.replayed:
                router.replay()
            assert numbers(router, "CPU") == numbers(router, "GPU")
            form = {}
            for event in router.router.events:
                if isinstance(event, BlockStored):
                    rest = event.block_size, event.lora_id, event.group_idx, event.kv_cache_spec_kind
                    for at, page_hash in enumerate(event.block_hashes):
                        content = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                        form.setdefault(page_hash, {})[event.medium] = content, *rest
            assert all(each["CPU"] == each["GPU"] for each in form.values())

            engine.reset()
            engine.generate(PROMPTS[0], max_tokens=1)
            steps("the pages of host memory are announced again", lambda: len(numbers(router, "CPU")) == PAGES)
            # Those of the device are gone, but for what was loaded or computed again.
            steps("loaded pages are announced", lambda: len(numbers(router, "GPU")) == 4)

            engine.reset(connector=True)
            # vLLM publishes its own clear with the next step of a request.
            engine.generate(PROMPTS[0][:8], max_tokens=1)
            steps("the pages that are no longer found are taken back", lambda: not numbers(router, "CPU"))
    finally:
        engine.end()
