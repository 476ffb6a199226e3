"""Files on which the bytes of pages depend: what lies at a path, and since when.

Names, sizes and times stand for the bytes of weights, which are too many to be read. A time of modification can be set
to anything, and images of containers give all their files the same one; the time of change cannot be set.
"""

import contextlib
import errno
import functools
import math
import os
import stat
import time
from typing import NamedTuple

#: Symbolic links on the way to a path, as Linux follows them.
LINKS_MAX = 40
#: The time of change of what may change unseen.
UNKNOWN = math.inf
#: How names of files with weights end.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Local(NamedTuple):
    """A file, or a folder and files in it."""

    #: Real path.
    path: str
    #: Name, size, time of modification and time of change, both in ns; in order.
    files: tuple[tuple[str, int, int, int], ...]
    #: When one of them, the folder, or a symbolic link on the way was last changed or renamed, in seconds of the wall
    #: clock; :data:`UNKNOWN` where that cannot be said.
    changed_at: float

    def text(self, *, declared: bool = False) -> str:
        """Names path and files. ``declared``: without times of change, which ``chown`` and hard links set, too."""
        return f"{self.path} {[file[:3] if declared else file for file in self.files]}"


def look(path: str, names: tuple[str, ...] = ()) -> Local | None:
    """What lies at a path: of a folder all files, and those with weights one level down; or those with these ``names``.

    None for what is neither file nor folder, cannot be read, or has none of the ``names``.
    """
    try:
        real, changed_at = _resolve(path)
        found = os.stat(real)
        changed_at = max(changed_at, found.st_ctime)
        if stat.S_ISREG(found.st_mode):
            return Local(real, (_file(os.path.basename(real), found),), changed_at)
        if not stat.S_ISDIR(found.st_mode):
            return None
        files = []
        for name in names or _names(real):
            # A file may vanish meanwhile, or be a link to nowhere.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, _LinkLoop):
                file, linked_at = _resolve(os.path.join(real, name))
                found = os.stat(file)
                if stat.S_ISREG(found.st_mode):
                    files.append(_file(name, found))
                    # A link's own time counts beside that of the file.
                    changed_at = max(changed_at, found.st_ctime, linked_at)
    except OSError:
        return None
    return Local(real, tuple(sorted(files)), changed_at) if files or not names else None


def _names(folder: str) -> list[str]:
    """Everything in a folder, and files with weights in the folders there, relative to it."""
    names = os.listdir(folder)
    for name in tuple(names):
        with contextlib.suppress(OSError):
            below = os.listdir(os.path.join(folder, name))
            names += [os.path.join(name, each) for each in below if each.endswith(WEIGHTS)]
    return names


class _LinkLoop(OSError):
    """A symbolic link that leads to itself, or over too many others."""


def _resolve(path: str) -> tuple[str, float]:
    """The real path, and when the last of the symbolic links on the way was made, 0 without one.

    Goes as Linux does: what follows a link, ``..`` too, counts from where the link leads.
    """
    real, newest, links = "/", 0.0, 0
    parts = os.path.join(os.getcwd(), path).split("/")[::-1]
    while parts:
        part = parts.pop()
        if part == "..":
            real = os.path.dirname(real)
        elif part not in ("", "."):
            step = os.path.join(real, part)
            found = os.lstat(step)
            if not stat.S_ISLNK(found.st_mode):
                real = step
                continue
            newest, links = max(newest, found.st_ctime), links + 1
            if links > LINKS_MAX:
                raise _LinkLoop(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(step)
            real = "/" if target.startswith("/") else real
            parts += target.split("/")[::-1]
    return real, newest


def _file(name: str, found: os.stat_result) -> tuple[str, int, int, int]:
    return name, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def began_at() -> float:
    """When this process began, in seconds of the wall clock: before it loaded any weights.

    A clock that was set forward since this was asked first in this process, which is when the module is loaded or used
    after a fork, does not move it; one that was set back does, as it does with the times of files that change later.
    """
    return min(_first_seen(os.getpid()), _began_at())


@functools.lru_cache(maxsize=1)
def _first_seen(process: int) -> float:
    """When this process began, as it was seen first. One that was forked looks itself."""
    return _began_at()


def _began_at() -> float:
    with open("/proc/self/stat") as file:
        # The name of the program may hold anything but its closing parenthesis.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


_first_seen(os.getpid())
