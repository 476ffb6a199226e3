"""The switch that turns the cache off while engines run: a file in the directory of the sockets."""

import logging
import time
from pathlib import Path

logger = logging.getLogger("kvferry")

#: Name of the file. While it exists, the cache is off.
NAME = "off"
#: Pause between two looks at the file.
LOOK_S = 0.5


class Switch:
    """Whether the cache is switched off. :meth:`look` must be called often, from any one thread."""

    def __init__(self, socket_dir: Path):
        self._path = socket_dir / NAME
        self._look_at = 0.0
        #: Requests neither look up nor store pages. Copies that are running go on.
        self.off = False

    def look(self) -> float:
        """Looks at the file if the last look is long enough ago; returns when to look again."""
        now = time.monotonic()
        if now < self._look_at:
            return self._look_at
        self._look_at = now + LOOK_S
        try:
            off = self._path.exists()
        except OSError:
            # The directory cannot be read: the leader cannot be reached either.
            return self._look_at
        if off != self.off:
            self.off = off
            if off:
                logger.warning("kvferry: %s exists: requests run without the cache until it is removed", self._path)
            else:
                logger.info("kvferry: %s is gone: the cache is used again", self._path)
        return self._look_at
