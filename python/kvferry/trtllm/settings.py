"""The settings of the connector: environment variables ``KVFERRY_TRTLLM_*``.

TensorRT-LLM passes no settings to a connector. The variables of the program ``kvferry`` also begin with ``KVFERRY_``,
so that those of the connector have a prefix of their own: an unknown name with it is refused.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "KVFERRY_TRTLLM_"
#: The program's variable for the socket directory, which holds for the connector, too.
PROGRAM_SOCKET_DIR = "KVFERRY_SOCKET_DIR"
#: Longest ``socket_dir``, in bytes: leaves room for the names of the sockets below it.
SOCKET_DIR_BYTES_MAX = 80
#: Longest deadline of a request; the leader cuts longer ones to this.
DEADLINE_MS_MAX = 120_000
#: Longest ``namespace``, ``namespace_prefix`` and ``weights``, in characters.
TEXT_MAX = 256

#: Variables that Kubernetes sets for a Service named ``kvferry-trtllm`` or ``kvferry-trtllm-...``, with their values:
#: an address, a port, a protocol, or all three as in ``tcp://10.0.0.1:80``.
_SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST=[0-9a-fA-F.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://[^/]+:\d+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[0-9a-fA-F.:]+))",
    re.ASCII,
)
_MODES = ("both", "load", "store")
_NUMBERS = {
    "replica": (0, 63),
    "lookup_budget_ms": (1, 1000),
    "load_timeout_ms": (10, DEADLINE_MS_MAX),
    "step_timeout_ms": (0, 100_000),
    "load_mb_per_s": (1, 1_000_000),
    "load_retry_ms": (100, 600_000),
    "store_timeout_ms": (10, DEADLINE_MS_MAX),
    "store_hold_ms": (0, DEADLINE_MS_MAX),
    "store_mb_max": (1, 1_000_000),
}


@dataclass(frozen=True)
class Settings:
    """The variables, without their prefix and in lower case."""

    #: The ``socket_dir`` of ``kvferry up``. Default: ``KVFERRY_SOCKET_DIR``, ``$XDG_RUNTIME_DIR/kvferry``, or
    #: ``/tmp/kvferry-<uid>``.
    socket_dir: Path
    #: Number of this engine among the leader's replicas. Default: 0.
    replica: int = 0
    #: Separates the pages of engines that otherwise look alike. Default: empty.
    namespace: str = ""
    #: Start of every namespace that this engine names: one of an entry of the leader's setting ``namespaces``, such as
    #: ``tenant-a/``. Default: empty.
    namespace_prefix: str = ""
    #: Names weights that cannot be identified. A value promises that engines with the same text and the same path have
    #: the same weights. Default: empty.
    weights: str = ""
    #: ``both``; ``load``: nothing is stored; ``store``: nothing is loaded. Default: both.
    mode: str = "both"
    #: Longest wait of one request for the answer to its lookup, while TensorRT-LLM holds its radix tree's lock; without
    #: an answer by then the request is computed. Default: 2.
    lookup_budget_ms: int = 2
    #: Deadline of a load, in addition to the time for its bytes at ``load_mb_per_s`` and ``step_timeout_ms``. A load
    #: that failed is requested again. Default: 2,000.
    load_timeout_ms: int = 2_000
    #: Additional time for the end of running steps, which a load waits for. Default: 10,000.
    step_timeout_ms: int = 10_000
    #: Lowest rate assumed for a load's deadline, in MB per second and rank. Default: 1,000.
    load_mb_per_s: int = 1_000
    #: Time for which a load that failed is requested again. After it the engine ends, because TensorRT-LLM cannot
    #: compute pages that were promised. Default: 30,000.
    load_retry_ms: int = 30_000
    #: Deadline of a store. Default: 10,000.
    store_timeout_ms: int = 10_000
    #: Time for which the pages of a finished request wait for the ends of its stores; then the stores are given up.
    #: Default: 2,000.
    store_hold_ms: int = 2_000
    #: Most megabytes of one rank under store; beyond that stores are skipped. Default: 4,096.
    store_mb_max: int = 4_096

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "Settings":
        """Reads and checks the variables of an environment, by default that of this process.

        Raises:
            ValueError: naming the variable, the value and the remedy.
        """
        given = os.environ if environment is None else environment
        names = [field.name for field in fields(cls)]
        values: dict[str, str | int | Path] = {}
        for variable, text in given.items():
            if not variable.startswith(PREFIX):
                continue
            if _SERVICE_LINK.fullmatch(f"{variable.removeprefix(PREFIX)}={text}"):
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in names or variable != variable_of(name):
                near = difflib.get_close_matches(name, names, 1)
                known = ", ".join(map(variable_of, names))
                hint = f"did you mean {variable_of(near[0])}?" if near else f"known are {known}"
                raise ValueError(f"{variable} is {text!r}, and no such variable is known: {hint}")
            values[name] = _value(name, text)
        if "socket_dir" not in values:
            values["socket_dir"] = _default_socket_dir(given)
        return cls(**values)  # type: ignore[arg-type]

    def load_limit_s(self, rank_bytes: int) -> float:
        """Deadline of a load of ``rank_bytes`` on each rank."""
        limit_ms = self.load_timeout_ms + self.step_timeout_ms + rank_bytes / (self.load_mb_per_s * 1_000)
        return min(limit_ms, DEADLINE_MS_MAX) / 1000


def variable_of(name: str) -> str:
    """Returns the variable of a setting."""
    return PREFIX + name.upper()


def _default_socket_dir(environment: Mapping[str, str]) -> Path:
    if text := environment.get(PROGRAM_SOCKET_DIR):
        return _path(PROGRAM_SOCKET_DIR, text)
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvferry" if runtime else Path(f"/tmp/kvferry-{os.geteuid()}")


def _value(name: str, text: str) -> str | int | Path:
    variable = variable_of(name)
    if name == "socket_dir":
        return _path(variable, text)
    if name == "mode":
        if text not in _MODES:
            raise ValueError(f"{variable} is {text!r}: give one of {', '.join(_MODES)}")
        return text
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        if not (text.isascii() and text.isdigit()) or len(text) > 9 or not least <= int(text) <= most:
            raise ValueError(f"{variable} is {text!r}: give a whole number from {least} to {most}")
        return int(text)
    if name == "namespace_prefix" and not text.isascii():
        raise ValueError(f"{variable} is {text!r}: give ASCII characters")
    if len(text) > TEXT_MAX:
        raise ValueError(f"{variable} has {len(text)} characters: give at most {TEXT_MAX}")
    return text


def _path(variable: str, text: str) -> Path:
    if not Path(text).is_absolute():
        raise ValueError(f"{variable} is {text!r}: give an absolute path")
    size = len(os.fsencode(text))
    if size > SOCKET_DIR_BYTES_MAX:
        raise ValueError(
            f"{variable} is {text!r}, {size} bytes long: give a path of at most {SOCKET_DIR_BYTES_MAX} bytes"
        )
    return Path(text)
