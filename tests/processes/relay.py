"""A line between a learner and its coordinator."""

import socket
import threading
from contextlib import closing, suppress

from tests.processes.programs import free_address


class Relay:
    """The line between a learner and its coordinator, which can hold up one request in the middle of its body."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.address = free_address()
        host, _, port = self.address.partition(":")
        self._door = socket.create_server((host, int(port)))
        self._words = b""
        self.held = threading.Event()
        threading.Thread(target=self._let_in, daemon=True).start()

    def hold(self, words: bytes) -> None:
        """Hold the next request whose head contains `words`: pass on only a few bytes of its body."""
        self._words = words
        self.held.clear()

    def close(self) -> None:
        self._door.close()

    def _let_in(self) -> None:
        with suppress(OSError):  # the door is closed
            while True:
                threading.Thread(target=self._serve, args=self._door.accept()[:1], daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        host, _, port = self._target.partition(":")
        with closing(caller):
            with suppress(OSError), socket.create_connection((host, int(port))) as called:
                threading.Thread(target=self._ask, args=(caller, called), daemon=True).start()
                while data := called.recv(1 << 16):
                    caller.sendall(data)
            with suppress(OSError):  # it has gone by itself
                caller.shutdown(socket.SHUT_RDWR)  # closing does not wake who reads from it

    def _ask(self, caller: socket.socket, called: socket.socket) -> None:
        with suppress(OSError):
            while data := caller.recv(1 << 16):
                if self._words and self._words in data:
                    head, end, body = data.partition(b"\r\n\r\n")
                    called.sendall(head + end + body[:100])
                    self._words = b""
                    self.held.set()
                    return
                called.sendall(data)
            called.shutdown(socket.SHUT_RDWR)
