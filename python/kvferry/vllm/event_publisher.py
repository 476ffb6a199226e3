"""kvferry's own stream of KV events: vLLM's publisher, at an endpoint of its own."""

import logging
import queue
import time

import zmq
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch, ZmqEventPublisher

from kvferry.vllm.settings import Settings

logger = logging.getLogger("vllm.kvferry")

#: Most batches that wait to be sent, of at most :data:`kvferry.vllm.event_batches.BATCH_PAGES_MAX` pages each: 10 MB
#: with pages of 32 tokens. While so many wait, no further ones are built.
QUEUED_MAX = 64


class _Publisher(ZmqEventPublisher):
    """vLLM's publisher, with a replay that sends all kept batches to a subscriber that reads slowly.

    ZeroMQ drops those beyond 1,000 by default.
    """

    def _bind(self, sock: zmq.Socket, endpoint: str) -> str:  # type: ignore[override]
        if sock.socket_type == zmq.ROUTER:
            # All batches, and the mark of the end. Has no effect after the bind.
            sock.set_hwm((self._buffer.maxlen or 0) + 1)
        return ZmqEventPublisher._bind(sock, endpoint)

    @property
    def full(self) -> bool:
        """Whether the next batch would have to wait."""
        return self._event_queue.full()


class EventStream:
    """Publishes batches with sequence numbers from 0, and keeps the newest for replay.

    Raises:
        ValueError: for an endpoint that cannot be used, with the remedy.
    """

    def __init__(self, settings: Settings, data_parallel_rank: int):
        for name in ("events_endpoint", "events_replay_endpoint"):
            endpoint = getattr(settings, name)
            if data_parallel_rank and endpoint.startswith("ipc://"):
                raise ValueError(
                    f"kv_connector_extra_config: {name} is {endpoint!r}, and data-parallel rank {data_parallel_rank} "
                    "cannot count on from it: give a tcp endpoint with a port"
                )
        try:
            self._publisher = _Publisher(
                data_parallel_rank,
                endpoint=settings.events_endpoint,
                replay_endpoint=settings.events_replay_endpoint or None,
                buffer_steps=settings.events_buffer_steps,
                hwm=settings.events_hwm,
                max_queue_size=QUEUED_MAX,
                topic=settings.events_topic,
            )
        except (zmq.ZMQError, ValueError) as error:
            raise ValueError(
                f"kv_connector_extra_config: events_endpoint is {settings.events_endpoint!r} and "
                f"events_replay_endpoint {settings.events_replay_endpoint!r}: {error}: give endpoints that this engine "
                "can bind, and that no other process uses"
            ) from error

    @property
    def has_room(self) -> bool:
        """Whether :meth:`put` does not wait."""
        return not self._publisher.full

    def put(self, events: list[KVCacheEvent]) -> None:
        """Publishes a batch."""
        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def close(self) -> None:
        """Sends what waits, at most for the 2 s that vLLM's publisher takes, and closes the sockets."""
        try:
            self._publisher.shutdown()
        except queue.Full:
            logger.warning("kvferry: %d batches of KV events were not sent at the end", QUEUED_MAX)
