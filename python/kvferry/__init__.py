"""kvferry for Python: an engine's side of a running kvferry.

``kvferry.vllm`` has the connector for vLLM, ``kvferry.sglang`` and ``kvferry.trtllm`` those for SGLang and
TensorRT-LLM, ``kvferry.client`` the client that they are built on, and ``kvferry.aio`` clients for event loops. The
program itself, ``kvferry``, is installed beside this package.
"""
