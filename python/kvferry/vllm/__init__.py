"""The connector for vLLM. ``kv_connector_module_path`` is ``kvferry.vllm``, and ``kv_connector`` its class."""

import logging

from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]

# vLLM configures its own logger alone: modules that serve every engine inherit its level and handlers.
logging.getLogger("kvferry").parent = logging.getLogger("vllm")
