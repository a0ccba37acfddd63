"""A fake coordinator over real sockets that gives the answers of a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from protocol.errors import SwarmError
from protocol.wire import canonical


class Answer(NamedTuple):
    """An answer to a request. At 0 the connection is cut after this many bytes of the body."""

    status: int
    body: bytes = b""
    taken: int = 0
    lost: int = 0
    """So many bytes of the answer do not come."""


CUT = Answer(0)
PROXY = Answer(502, b"<html>Bad Gateway</html>")


def error(error: SwarmError) -> Answer:
    return Answer(error.http_status, canonical.encode(error.to_wire()))


class Asked(NamedTuple):
    """A request, and what came of its body."""

    method: str
    path: str
    body: bytes


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[Asked]]]:
    """The address of somebody who gives these answers, one after the other, and what was asked."""
    asked, left = list[Asked](), list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            answer = left.pop(0)
            asked.append(Asked(self.command, self.path, self._body(answer.taken if not answer.status else -1)))
            if not answer.status:
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body[: len(answer.body) - answer.lost])
            self.close_connection = answer.lost > 0

        def _body(self, most: int) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if most >= 0:
                return self.rfile.read(most)
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
