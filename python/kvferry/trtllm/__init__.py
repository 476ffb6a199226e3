"""The connector for TensorRT-LLM: ``connector_module`` is ``kvferry.trtllm``, the classes ``Scheduler`` and ``Worker``.

See ``docs/trtllm.md``.
"""

from kvferry.trtllm.scheduler import Scheduler
from kvferry.trtllm.worker import Worker

__all__ = ["Scheduler", "Worker"]
