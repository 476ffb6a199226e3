"""kvferry for Python: what an engine needs to speak to a running kvferry.

``kvferry.vllm`` has the connector for vLLM, ``kvferry.client`` the conversation that it is built on. The program
itself, ``kvferry``, is installed beside this package.
"""
