"""kvferry for Python: an engine's side of a running kvferry.

``kvferry.vllm`` has the connector for vLLM, ``kvferry.client`` the client that it is built on. The program itself,
``kvferry``, is installed beside this package.
"""
