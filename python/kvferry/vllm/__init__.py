"""The connector for vLLM. ``kv_connector_module_path`` is ``kvferry.vllm``, and ``kv_connector`` its class."""

import logging

from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]


class _ToVllm(logging.Handler):
    """Passes records of the modules that serve every engine to vLLM's handlers, which are those of its own logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("vllm.kvferry")
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


_ours = logging.getLogger("kvferry")
# vLLM's level decides.
_ours.setLevel(logging.DEBUG)
_ours.propagate = False
_ours.addHandler(_ToVllm())
