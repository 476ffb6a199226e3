"""A stand-in for SGLang's compiled kernels, which exist for GPUs and for CPUs with AMX only.

SGLang imports this name on every CPU. Without AMX it calls none of the functions, because attention and sampling are
torch's. Each function therefore exists and raises.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_given: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    return missing
