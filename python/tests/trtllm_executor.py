"""An executor of our own that follows TensorRT-LLM's documented loop, with a toy model and a toy prefix cache.

The ranks run in one thread, call by call, as the real ranks do in lockstep; what several ranks call together at the
start runs in a thread of each rank. The loop is that of the released line with its V1 manager of KV memory:

* A new request is matched once, under the radix tree's lock; its blocks are allocated, and the connector learns them.
* A request whose load is asynchronous leaves the batch. It comes back when every rank has reported the load.
* Metadata is built, pickled and bound only in an iteration with a batch, also if all of it is loading.
* ``get_finished`` is called on every rank in each iteration; what all ranks have reported counts.
* With overlap, the results of a pass are processed after the next pass has begun, which does not know its last token.
* A finished request keeps its blocks while the connector says so; all others are used again at once, and overwritten.

The KV of a token is a hash of all tokens up to it, of the salt, the adapter, the weights, and the place (rank, layer,
key or value). A forward pass compares everything that it would read.
"""

import collections
import contextlib
import hashlib
import pickle
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trtllm_stubs
from daemon import TIMEOUT_S

#: Tokens of a block; layers of the toy model; keys and values; tokens of the vocabulary.
BLOCK, LAYERS, KV, VOCABULARY = 4, 2, 2, 50
#: First number of requests that only make a batch.
TICKS = 1_000_000
#: What a block holds that is given back.
GARBAGE = -0x5A5A5A5A
#: Longest time of one call of a hook that may not wait, beside the lookup budget. A busy machine needs much of it.
HOOK_S = 5.0


def args(model: str, **changes: Any) -> Any:
    """Arguments of an engine, as TensorRT-LLM passes them."""
    cache = {"tokens_per_block": BLOCK, "dtype": "auto", "enable_block_reuse": True, "host_cache_size": 0}
    cache.update(changes.pop("kv_cache_config", {}))
    given = {
        "model": model,
        "revision": None,
        "dtype": "auto",
        "load_format": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_beam_width": 1,
        "kv_cache_config": SimpleNamespace(**cache),
        "scheduler_config": SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        **changes,
    }
    return SimpleNamespace(**given)


@dataclass(eq=False)
class Request:
    """A request, with the attributes that TensorRT-LLM gives to a connector."""

    request_id: int
    tokens: list[int]
    prompt_len: int
    max_new: int
    cache_salt_id: int | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    is_generation_only_request: bool = False
    is_dummy_request: bool = False
    multimodal_hashes: Any = None
    state: str = "new"
    #: Tokens whose KV is there; of them those that came from the device and from a load.
    computed: int = 0
    device: int = 0
    matched: int = 0
    blocks: list[int] = field(default_factory=list)
    aborted: bool = False
    #: Tokens and blocks that were reported to the connector.
    told_tokens: int = 0
    told_blocks: int = 0
    calls: collections.Counter = field(default_factory=collections.Counter)
    #: A token that the device has sampled, and that the executor does not know yet.
    unseen: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def origin(self) -> tuple:
        """Everything that the KV depends on, beside the tokens."""
        return self.cache_salt_id, self.cache_salt, self.lora_task_id, repr(self.multimodal_hashes)

    @property
    def all_tokens(self) -> list[int]:
        return self.tokens + self.unseen

    @property
    def last_token(self) -> int:
        return self.prompt_len + self.max_new


class Model:
    """The toy model."""

    def __init__(self, weights: str):
        self.weights = weights
        self._chains: dict[tuple, list[int]] = {}

    def chain(self, request: Request, end: int) -> np.ndarray:
        """A number for each token up to ``end``, which depends on all tokens before it."""
        digest = hashlib.blake2b(repr((self.weights, request.origin)).encode(), digest_size=8).digest()
        numbers = []
        for token in request.all_tokens[:end]:
            digest = hashlib.blake2b(digest + token.to_bytes(4, "big"), digest_size=8).digest()
            numbers.append(int.from_bytes(digest, "big", signed=True) >> 8)
        return np.array(numbers, dtype=np.int64)

    @staticmethod
    def place(rank: int) -> np.ndarray:
        """A number for each layer, and key or value."""
        return (np.arange(LAYERS * KV, dtype=np.int64).reshape(LAYERS, KV, 1) + 1) * 1_000_003 + rank * 7_919

    def next_token(self, request: Request) -> int:
        return int(self.chain(request, len(request.all_tokens))[-1]) % VOCABULARY


class WrongBytes(AssertionError):
    """KV that is read and is not that of its tokens."""


class Rank:
    """One rank: its pool and its connector."""

    def __init__(self, number: int, blocks: int):
        self.number = number
        self.pool = torch.full((blocks, LAYERS, KV, BLOCK), GARBAGE, dtype=torch.int64)
        self.worker: Any = None
        self.after_forward: Any = None
        self.saving: set[int] = set()
        self.loading: set[int] = set()

    def create(self, connector: Any, llm_args: Any) -> None:
        """Creates the connector's worker, in a thread of the rank."""
        self.worker = connector.Worker(llm_args)
        self.after_forward = self.worker.register_forward_pass_callable()

    @property
    def registered(self) -> bool:
        return self.worker._rank is not None and self.worker._rank.registered

    def forget(self, block: int) -> None:
        self.pool[block] = GARBAGE

    def write(self, request: Request, model: Model, start: int, end: int) -> None:
        chain, place = model.chain(request, end), model.place(self.number)
        pool = self.pool.numpy()
        for token in range(start, end):
            pool[request.blocks[token // BLOCK], :, :, token % BLOCK] = (chain[token] ^ place)[:, :, 0]

    def check(self, request: Request, model: Model, end: int, what: str) -> None:
        chain, place = model.chain(request, end), model.place(self.number)
        for block in range(-(-end // BLOCK)):
            here = chain[block * BLOCK : min((block + 1) * BLOCK, end)]
            expected = here[None, None, :] ^ place
            found = self.pool[request.blocks[block]].numpy()[:, :, : len(here)]
            if not np.array_equal(found, expected):
                empty = " (nothing was written)" if (found == GARBAGE).any() else ""
                raise WrongBytes(
                    f"rank {self.number}: request {request.request_id}: block {block} of {what} holds other tokens"
                    f"{empty}: {request.device} tokens of the device, {request.matched} of a load"
                )


class Executor:
    """The executor of one engine, with all of its ranks."""

    def __init__(
        self,
        connector: Any,
        model: str,
        *,
        ranks: int = 1,
        blocks: int = 48,
        seed: int = 0,
        batch: int = 4,
        chunk: int = 16,
        partial: float = 0.0,
        forgets: float = 0.3,
        overlap: bool = False,
        **changes: Any,
    ):
        self.draw = random.Random(seed)
        self.model = Model(changes.pop("weights", model))
        self.blocks, self.batch, self.chunk = blocks, batch, chunk
        self.partial, self.forgets, self.overlap = partial, forgets, overlap
        self._sampled: dict[Request, int] = {}
        self.ranks = [self._rank(number, blocks) for number in range(ranks)]
        self.scheduler: Any = None
        self._connector = connector
        self._start(model, changes)
        self.requests: list[Request] = []
        self._next_id = 1
        #: Blocks without a user, which may hold KV that the radix tree finds; the least recently used first.
        self.free: list[int] = list(range(blocks))
        self.users: collections.Counter[int] = collections.Counter()
        self.tree: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self._async: dict[int, int] = {}
        self.held: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.iterations = 0
        #: A hook took longest.
        self.longest_s: dict[str, float] = {}

    def _rank(self, number: int, blocks: int) -> Rank:
        return Rank(number, blocks)

    def _start(self, model: str, changes: dict[str, Any]) -> None:
        """Creates scheduler and workers at the same time, and registers the pools."""
        together = self._together()
        failures: list[BaseException] = []

        def run(rank: Rank) -> None:
            trtllm_stubs.enter(together, rank.number)
            llm_args = args(model, tensor_parallel_size=len(self.ranks), **changes)
            try:
                if rank.number == 0:
                    thread = threading.Thread(target=self._create_scheduler, args=(llm_args, failures))
                    thread.start()
                    rank.create(self._connector, llm_args)
                    thread.join(TIMEOUT_S)
                else:
                    rank.create(self._connector, llm_args)
                self._register(rank)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if failures:
            self.close()
            raise failures[0]

    def _together(self) -> Any:
        return trtllm_stubs.Ranks(len(self.ranks))

    def _create_scheduler(self, llm_args: Any, failures: list[BaseException]) -> None:
        try:
            self.scheduler = self._connector.Scheduler(llm_args)
        except BaseException as error:
            failures.append(error)

    def _register(self, rank: Rank) -> None:
        rank.worker.register_kv_caches(rank.pool)

    def close(self) -> None:
        for side in (self.scheduler, *(rank.worker for rank in self.ranks)):
            if side is not None:
                with contextlib.suppress(AttributeError):
                    side.close()

    @property
    def registered(self) -> bool:
        return all(rank.registered for rank in self.ranks)

    # Users.

    def add(self, tokens: list[int], max_new: int = 4, **named: Any) -> Request:
        request = Request(self._next_id, list(tokens), len(tokens), max_new, **named)
        self._next_id += 1
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Cancels a request. One that loads keeps its blocks until the load is over."""
        request.aborted = True
        if request.state in ("context", "generating"):
            self._terminate(request)
        elif request.state == "new":
            self.requests.remove(request)
            request.state = "over"

    def evict(self, count: int) -> None:
        """Forgets blocks that no request uses, and overwrites them."""
        for block in self.free[:count]:
            self._forget(block)

    def clear(self) -> None:
        """Forgets every block that no request uses."""
        self.evict(len(self.free))

    # One iteration.

    def iterate(self) -> None:
        self.iterations += 1
        batch = self._schedule()
        if batch:
            output = self._prepare(batch)
            loading = [request for request in batch if request.request_id in self._async]
            for request in loading:
                request.state = "loading"
            meta = self._hook("build_connector_meta", self.scheduler, output)
            sent = pickle.dumps(meta)
            for rank in self.ranks:
                self._hook("bind_connector_meta", rank.worker, pickle.loads(sent))
                self._hook("start_load_kv", rank.worker, None)
            batch = [request for request in batch if request not in loading]
        if batch:
            self._forward(batch)
        self._results()
        self._end_of_copies()

    def _hook(self, name: str, side: Any, *arguments: Any) -> Any:
        """Calls a hook, which may not wait."""
        self.calls[name] += 1
        before = time.monotonic()
        answer = getattr(side, name)(*arguments)
        took_s = time.monotonic() - before
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), took_s)
        assert took_s < HOOK_S, f"{name} waited for {took_s:.1f} s"
        return answer

    def _schedule(self) -> list[Request]:
        """The batch: requests that run, and new ones for which there is room until they end."""
        batch = [each for each in self.requests if each.state in ("context", "generating")][: self.batch]
        for request in self.requests:
            if request.state == "new" and len(batch) < self.batch:
                need = self._blocks(request)
                promised = sum(
                    self._blocks(each) - len(each.blocks)
                    for each in self.requests
                    if each.state in ("context", "generating", "loading")
                )
                if need > len(self.free) - promised:
                    break
                self._add_sequence(request)
                batch.append(request)
        return batch

    def _blocks(self, request: Request) -> int:
        """Blocks of a request when it ends. With overlap, a pass computes one token that is not used."""
        return -(-(request.last_token + self.overlap) // BLOCK)

    def _add_sequence(self, request: Request) -> None:
        """Matches the prompt, asks the connector, allocates, and tells the connector. All under the tree's lock."""
        found = 0
        for block, key in enumerate(self._keys(request)[: (request.prompt_len - 1) // BLOCK]):
            if key not in self.tree:
                break
            self._use(self.tree[key])
            request.blocks.append(self.tree[key])
            found = (block + 1) * BLOCK
        part = 0
        room = request.prompt_len - 1 - found
        if found and room > 0 and self.draw.random() < self.partial:
            # A part of another block was copied.
            part = self.draw.randint(1, min(room, BLOCK - 1))
        request.calls["match"] += 1
        tokens, beside = self._hook("get_num_new_matched_tokens", self.scheduler, request, found + part)
        assert isinstance(tokens, int)
        assert not (tokens == 0 and beside), "nothing is loaded asynchronously"
        if tokens:
            assert beside, "this connector loads asynchronously only"
            assert part == 0, "a load behind a part of a block"
            assert tokens % BLOCK == 0
            assert found + tokens < request.prompt_len, "the last token must be computed"
            self._async[request.request_id] = tokens
        while len(request.blocks) * BLOCK < request.prompt_len:
            request.blocks.append(self._take())
        request.device, request.matched = found + part, tokens
        request.computed = found + part + tokens
        if part:
            for rank in self.ranks:
                rank.write(request, self.model, found, found + part)
        request.calls["alloc"] += 1
        self._allocated(request)
        request.state = "context"

    def _allocated(self, request: Request) -> None:
        self._hook("update_state_after_alloc", self.scheduler, request, list(request.blocks))

    def _prepare(self, batch: list[Request]) -> Any:
        new, cached = [], []
        for request in batch:
            if request.state == "generating":
                while len(request.blocks) * BLOCK < len(request.all_tokens):
                    request.blocks.append(self._take())
            if request.request_id in self._async and request.told_tokens == 0:
                continue
            first = request.told_tokens == 0
            generates = request.state == "generating"
            data = trtllm_stubs.RequestData(
                request.request_id,
                request.tokens[request.told_tokens :],
                request.blocks[request.told_blocks :],
                len(request.tokens) - 1 if generates else request.computed,
                1 if generates else self._scheduled(request),
            )
            request.told_tokens, request.told_blocks = len(request.tokens), len(request.blocks)
            (new if first else cached).append(data)
        return trtllm_stubs.SchedulerOutput(new, cached)

    def _scheduled(self, request: Request) -> int:
        left = len(request.all_tokens) - request.computed
        return min(left, self.chunk) if request.state == "context" else left

    def _forward(self, batch: list[Request]) -> None:
        self.calls["forward"] += 1
        for layer in range(LAYERS):
            for rank in self.ranks:
                self._hook("wait_for_layer_load", rank.worker, layer, None)
                self._hook("save_kv_layer", rank.worker, layer, None)
        for request in batch:
            start = request.computed
            end = start + self._scheduled(request)
            for rank in self.ranks:
                rank.check(request, self.model, start, "the tokens that a forward pass reads")
                rank.write(request, self.model, start, end)
            request.computed = end
        for rank in self.ranks:
            if rank.after_forward is not None:
                rank.after_forward()
        for rank in self.ranks:
            self._hook("wait_for_save", rank.worker, None)
        for request in batch:
            if request.computed == len(request.all_tokens):
                request.state = "generating"
                self._sampled[request] = self.model.next_token(request)

    def _results(self) -> None:
        """Processes the results of this pass; with overlap, those of the pass before it."""
        sampled, self._sampled = self._sampled, {}
        for request in [request for request in self.requests if request.unseen]:
            self._seen(request)
        for request, token in sampled.items():
            if request.state == "generating":
                request.unseen = [token]
                if not self.overlap:
                    self._seen(request)

    def _seen(self, request: Request) -> None:
        request.tokens += request.unseen
        request.unseen = []
        if len(request.tokens) == request.last_token:
            self._terminate(request)

    def _terminate(self, request: Request) -> None:
        self.requests.remove(request)
        request.state = "over"
        self._remember(request)
        if self._finished(request):
            request.state = "saving"
            self.held[request.request_id] = request
            return
        self._release(request)

    def _finished(self, request: Request) -> bool:
        return self._hook("request_finished", self.scheduler, request, list(request.blocks))

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
                if block not in self.keys or self.draw.random() < self.forgets:
                    self._forget(block)
        request.state = "over"
        self.finished.append(request)

    def _end_of_copies(self) -> None:
        """Calls ``get_finished`` on every rank, as the connector's manager of TensorRT-LLM does."""
        started, self._async = list(self._async), {}
        finished = [name for name, request in self.held.items() if not request.calls["saving"]]
        for name in finished:
            self.held[name].calls["saving"] += 1
        self.ranks_in_order = self.draw.sample(self.ranks, len(self.ranks))
        given: dict[int, tuple[set[int], set[int]]] = {}
        for rank in self.ranks_in_order:
            open_saving = getattr(rank, "open_saving", set()) | set(finished)
            open_loading = getattr(rank, "open_loading", set()) | set(started)
            saved, loaded = self._hook("get_finished", rank.worker, list(finished), list(started))
            assert len(set(saved)) == len(saved), "each once"
            assert len(set(loaded)) == len(loaded), "each once"
            assert open_saving >= set(saved), "only ids that were given"
            assert open_loading >= set(loaded), "only ids that were given"
            rank.open_saving, rank.open_loading = open_saving - set(saved), open_loading - set(loaded)
            rank.saving |= set(saved)
            rank.loading |= set(loaded)
            given[rank.number] = rank.saving, rank.loading
        for name in set.intersection(*(saving for saving, _ in given.values())):
            for rank in self.ranks:
                rank.saving.discard(name)
            self._release(self.held.pop(name))
        for name in set.intersection(*(loading for _, loading in given.values())):
            for rank in self.ranks:
                rank.loading.discard(name)
            self._loaded(next(each for each in self.requests if each.request_id == name))

    def _loaded(self, request: Request) -> None:
        for rank in self.ranks:
            rank.check(request, self.model, request.computed, "a load")
        self.calls["loaded"] += 1
        request.state = "context"
        if request.aborted:
            self._terminate(request)

    # Blocks.

    def _keys(self, request: Request) -> list[bytes]:
        """The keys of the full blocks, as the radix tree compares them."""
        key = repr(request.origin).encode()
        keys = []
        for block in range(len(request.tokens) // BLOCK):
            key = hashlib.sha256(key + repr(request.tokens[block * BLOCK : (block + 1) * BLOCK]).encode()).digest()
            keys.append(key)
        return keys

    def _remember(self, request: Request) -> None:
        """Puts the full blocks of a request into the radix tree."""
        if request.multimodal_hashes is not None:
            return
        for block, key in enumerate(self._keys(request)[: request.computed // BLOCK]):
            if key not in self.tree and request.blocks[block] not in self.keys:
                self.tree[key] = request.blocks[block]
                self.keys[request.blocks[block]] = key

    def _use(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def _take(self) -> int:
        """Takes a block at once, also one that was just given back."""
        unknown = [block for block in self.free if block not in self.keys]
        block = unknown[-1] if unknown else self.free[0]
        self.free.remove(block)
        self._forget(block)
        self.users[block] += 1
        return block

    def _forget(self, block: int) -> None:
        self.tree.pop(self.keys.pop(block, b""), None)
        for rank in self.ranks:
            rank.forget(block)

    # Waiting.

    def run(self, until: Any, what: str, grace_s: float = TIMEOUT_S) -> None:
        """Iterates until something is true."""
        deadline = time.monotonic() + grace_s
        alone = 0
        while not until():
            assert time.monotonic() < deadline, f"{what}: not within {grace_s:.0f} s"
            self.iterate()
            alone = 0 if self.requests else alone + 1
            if alone % 20 == 19 and len(self.ranks) > 1:
                # Ranks other than 0 learn of the ends of stores with the next batch.
                self.requests.append(Request(TICKS + self.iterations, [0], 1, 1, is_dummy_request=True))
            if not any(each.state in ("context", "generating", "new") for each in self.requests):
                # As an executor that has nothing to do but to look.
                time.sleep(0.001)

    def rest(self, grace_s: float = TIMEOUT_S) -> None:
        """Iterates until every request has ended and no block is held."""
        self.run(lambda: not self.requests and not self.held, "the executor is idle", grace_s)
        assert len(self.free) == self.blocks, "blocks are lost"
        assert not any(self.users.values())

    def complete(self, tokens: list[int], max_new: int = 4, **named: Any) -> Request:
        """Runs one request until it has ended."""
        request = self.add(tokens, max_new, **named)
        self.run(lambda: request.state == "over" and request in self.finished, "the request is over")
        return request


class ExecutorV2(Executor):
    """With the manager V2 of KV memory: pages lie in regions, and an offer need not be taken as a whole."""

    short = 0.0

    def _register(self, rank: Rank) -> None:
        rank.worker.register_kv_cache_layout(layout_of(rank.pool))

    def _allocated(self, request: Request) -> None:
        blocks = list(request.blocks)
        if request.matched and self.draw.random() < self.short:
            # The first chunk of the prompt has fewer blocks; the offer behind them is computed.
            kept = self.draw.randint(0, request.matched // BLOCK - 1)
            blocks = blocks[: request.device // BLOCK + kept] + [-1] * self.draw.randint(0, 2)
            request.matched = kept * BLOCK
            request.computed = request.device + request.matched
        self._hook("update_state_after_alloc_by_layer_group", self.scheduler, request, [blocks])

    def _finished(self, request: Request) -> bool:
        return self._hook("request_finished_by_layer_group", self.scheduler, request, [list(request.blocks)])


def layout_of(pool: torch.Tensor, **changes: Any) -> Any:
    """The description of a pool: the bytes of each layer are a region."""
    slots = pool.shape[0]
    page_bytes = pool[0].numel() * pool.element_size()
    size = page_bytes // LAYERS
    rows = pool.view(torch.uint8).reshape(slots, page_bytes)
    regions = tuple(
        SimpleNamespace(
            base=pool.data_ptr() + layer * size,
            size=size,
            stride=page_bytes,
            num_slots=slots,
            as_tensor=lambda layer=layer: rows[:, layer * size : (layer + 1) * size],
        )
        for layer in range(LAYERS)
    )
    group = {
        "layer_group_id": 0,
        "layer_ids": tuple(range(LAYERS)),
        "window_size": None,
        "regions": regions,
        "replicated_regions": (),
        **changes.pop("group", {}),
    }
    given = {"tokens_per_block": BLOCK, "groups": (SimpleNamespace(**group),), **changes}
    return SimpleNamespace(**given)
