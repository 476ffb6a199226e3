"""A peer that misbehaves: a proxy before a process of kvferry, which passes bytes on, or does not."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from daemon import TIMEOUT_S
from raw_peer import COMMAND, GREETING, LONG, MORE

#: How a connection is treated, from its beginning to its end.
WELL = "passes all bytes on"
DEAF = "accepts no connection"
CLOSED = "closes each connection at once"
SILENT = "accepts connections, and never sends a byte"
GREETED = "sends the welcome, and nothing after it"
SLOW = "sends a byte a second"
SLOW_ANSWERS = "sends the welcome, and then a byte a second"
TORN = "sends the welcome, and closes the connection in the middle of the next message"
#: Bytes of that message that are sent: the frame of its header, and one byte of the next frame.
TORN_AT = 2 + 32 + 1
#: All but the first one.
MODES = [DEAF, CLOSED, SILENT, GREETED, SLOW, SLOW_ANSWERS, TORN]


class Welcomed:
    """Finds the end of a server's first message."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._at = len(GREETING)
        self.done = False

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """Divides what was received into bytes up to that end, and those after it."""
        before = len(self._bytes)
        self._bytes += data
        while not self.done and len(self._bytes) >= self._at + 9:
            flags = self._bytes[self._at]
            wide = 8 if flags & LONG else 1
            self._at += 1 + wide + int.from_bytes(self._bytes[self._at + 1 : self._at + 1 + wide], "big")
            self.done = not flags & (COMMAND | MORE)
        cut = max(self._at - before, 0) if self.done else len(data)
        return data[:cut], data[cut:]


class Proxy:
    """Listens in a directory of its own for the process that listens in another one."""

    def __init__(self, directory: Path, behind: Path):
        directory.mkdir(mode=0o700)
        self.directory, self.behind = directory, behind
        self.mode = WELL
        #: Connections that were accepted in the present mode.
        self.accepted = 0
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(directory / "kvferry.sock"))
        self._listener.listen(1)
        self._accepts = threading.Event()
        self._accepts.set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def turns(self, mode: str) -> None:
        """Changes the mode of later connections. Those that are open stay as they are."""
        self.mode, self.accepted = mode, 0
        if mode == DEAF:
            self._accepts.clear()
        else:
            self._accepts.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                self._accepts.wait()
                client, _ = self._listener.accept()
                # A connection that was made before the mode changed.
                if not self._accepts.is_set() and not self._ended.is_set():
                    client.close()
                    continue
                self.accepted += 1
                self._sockets.append(client)
                if self.mode == CLOSED:
                    client.close()
                elif self.mode != SILENT:
                    self._join(client, self.mode)

    def _join(self, client: socket.socket, mode: str) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(os.fspath(self.behind / "kvferry.sock"))
        self._sockets.append(server)
        for run, args in ((self._pass, (client, server)), (self._answer, (server, client, mode))):
            thread = threading.Thread(target=run, args=args, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        self._shut(other)

    def _answer(self, server: socket.socket, client: socket.socket, mode: str) -> None:
        welcomed = Welcomed()
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                first, rest = welcomed.split(data)
                if mode == SLOW:
                    self._dribble(client, data)
                    continue
                client.sendall(first)
                if mode == WELL:
                    client.sendall(rest)
                elif mode == SLOW_ANSWERS:
                    self._dribble(client, rest)
                elif mode == TORN and rest:
                    client.sendall(rest[:TORN_AT])
                    break
        self._shut(client)
        self._shut(server)

    def _dribble(self, client: socket.socket, data: bytes) -> None:
        for byte in data:
            client.sendall(bytes([byte]))
            if self._ended.wait(1.0):
                return

    @staticmethod
    def _shut(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended.set()
        self._accepts.set()
        self._shut(self._listener)
        for each in self._sockets:
            self._shut(each)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for each in (self._listener, *self._sockets):
            each.close()


@contextlib.contextmanager
def before(behind: Path, directory: Path) -> Iterator[Proxy]:
    proxy = Proxy(directory, behind)
    try:
        yield proxy
    finally:
        proxy.close()
