"""Logs that no leader answers, and that one does again."""

import logging
import time
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("kvferry")

#: Time without a connection to the leader after which a warning is logged.
ABSENT_S = 1.0


class Connection(Protocol):
    """The used parts of a :class:`kvferry.client.Client`."""

    directory: Path
    lost_at: float | None
    problem: str


class Absence:
    """Whether the absence of a leader was logged. For the client's thread."""

    def __init__(self) -> None:
        self._logged = False

    def look(self, client: Connection) -> float | None:
        """Logs each loss of the leader once, and its return; returns when to call again."""
        lost_at = client.lost_at
        if lost_at is None:
            if self._logged:
                logger.info("kvferry: the leader in %s is connected", client.directory)
            self._logged = False
        elif not self._logged:
            if time.monotonic() - lost_at < ABSENT_S:
                return lost_at + ABSENT_S
            self._logged = True
            logger.warning(
                "kvferry: no leader answers in %s (%s): requests run without the cache until one does",
                client.directory,
                client.problem,
            )
        return None
