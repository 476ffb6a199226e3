"""Identifies files on which the bytes of pages depend, by their metadata and the time of their last change.

Names, sizes and times stand for the bytes of weights, which are too large to be read. Any modification time can be set,
and container images give all their files the same one; the change time (``ctime``) cannot be set.
"""

import contextlib
import errno
import functools
import math
import os
import stat
import time
from typing import NamedTuple

#: Most symbolic links in the resolution of a path, as in Linux.
LINKS_MAX = 40
#: Change time of files that may change without a visible sign.
UNKNOWN = math.inf
#: File name suffixes of weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Local(NamedTuple):
    """A file, or a folder with files in it."""

    #: Real path.
    path: str
    #: Name, size, modification time and change time of each file, both in ns; sorted.
    files: tuple[tuple[str, int, int, int], ...]
    #: When a file, the folder, or a symbolic link on the path was last changed or renamed, in seconds of the wall
    #: clock; :data:`UNKNOWN` if that cannot be determined.
    changed_at: float

    def text(self, *, declared: bool = False) -> str:
        """Returns path and files as text. ``declared``: without change times, which ``chown`` and hard links set."""
        return f"{self.path} {[file[:3] if declared else file for file in self.files]}"


def look(path: str, names: tuple[str, ...] = ()) -> Local | None:
    """Reads the metadata at a path. For a folder: all files, and weights one level down; or only the given ``names``.

    None if the path is neither file nor folder, cannot be read, or has none of the ``names``.
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
            # A file may be deleted meanwhile, or be a broken link.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, _LinkLoop):
                file, linked_at = _resolve(os.path.join(real, name))
                found = os.stat(file)
                if stat.S_ISREG(found.st_mode):
                    files.append(_file(name, found))
                    # The change times of the links count, as does that of the file.
                    changed_at = max(changed_at, found.st_ctime, linked_at)
    except OSError:
        return None
    return Local(real, tuple(sorted(files)), changed_at) if files or not names else None


def _names(folder: str) -> list[str]:
    """Returns the names in a folder, and the weights in its direct subfolders, as relative paths."""
    names = os.listdir(folder)
    for name in tuple(names):
        with contextlib.suppress(OSError):
            below = os.listdir(os.path.join(folder, name))
            names += [os.path.join(name, each) for each in below if each.endswith(WEIGHTS)]
    return names


class _LinkLoop(OSError):
    """A symbolic link that leads to itself, or through more than :data:`LINKS_MAX` others."""


def _resolve(path: str) -> tuple[str, float]:
    """Returns the real path, and the newest change time of the symbolic links on it, 0 without one.

    Resolves as Linux does: the rest of the path after a link, also ``..``, is relative to the link's target.
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
    """Returns when this process began, in seconds of the wall clock: before it loaded any weights.

    The first result in this process, at the import of this module or the first use after a fork, is an upper bound. A
    clock that is later set forward therefore does not change the result. A clock that is set back does, as it also
    shifts the times of files that change later.
    """
    return min(_first_seen(os.getpid()), _began_at())


@functools.lru_cache(maxsize=1)
def _first_seen(process: int) -> float:
    """Returns the first result of :func:`_began_at` in a process. A forked process gets its own."""
    return _began_at()


def _began_at() -> float:
    with open("/proc/self/stat") as file:
        # The fields follow the last closing parenthesis, because the program's name may hold any character.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


_first_seen(os.getpid())
