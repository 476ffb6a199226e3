"""The external linker for SGLang. ``linker_module_path`` is ``kvferry.sglang``, and ``linker`` is ``Linker``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.sglang.linker import Linker

__all__ = ["Linker"]


def __getattr__(name: str) -> Any:
    """Imports the linker, and SGLang with it, when it is first used.

    Raises:
        RuntimeError: for a SGLang without the known interface, with the remedy.
    """
    if name != "Linker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.sglang import interface

    try:
        from kvferry.sglang.linker import Linker
    except ImportError as error:
        raise RuntimeError(f"{interface.refusal([str(error)])}.") from error
    return Linker
