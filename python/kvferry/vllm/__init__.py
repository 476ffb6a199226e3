"""The connector for vLLM. ``kv_connector_module_path`` is ``kvferry.vllm``, and ``kv_connector`` its class."""

from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]
