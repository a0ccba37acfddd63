"""Web servers of every character, as origins: each thread of theirs ends with the test.

- A manner gets the handler of one request; what it does to the connection is up to it.
- A stalling one waits for the end of the test, not for a time.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    web: "Web"

    def do_GET(self) -> None:
        self.web.asked[self.path] += 1
        with suppress(OSError):
            self.web.manner(self)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


Manner = Callable[[Handler], None]


class Web:
    """A server on a port of its own, and what was asked of it."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()
        handler = type("_Handler", (Handler,), {"web": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def web(manner: Manner) -> Iterator[Web]:
    made = Web(manner)
    try:
        yield made
    finally:
        made.close()


def serves(files: Mapping[str, bytes]) -> Manner:
    """An honest one: these files, and nothing else."""

    def manner(request: Handler) -> None:
        data = files.get(request.path.lstrip("/"))
        request.answer(404, b"") if data is None else request.answer(200, data)

    return manner


def lies(request: Handler) -> None:
    """Other bytes than were asked for."""
    request.answer(200, b"not what you wanted")


def lacks(request: Handler) -> None:
    """Nothing is here."""
    request.answer(404, b"")


def hides(request: Handler) -> None:
    """Answer as an object store says that nothing is here."""
    request.answer(403, b"<Error><Code>AccessDenied</Code></Error>")


def fails(request: Handler) -> None:
    request.answer(500, b"oops")


def stalls(request: Handler) -> None:
    """Takes the request and never answers."""
    request.web.over.wait()


def stalls_midway(request: Handler) -> None:
    """Promises a file, sends its beginning, and no more."""
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"x")
    request.wfile.flush()
    request.web.over.wait()


def drips(request: Handler) -> None:
    """Is never silent for long, and never gets done."""
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    while not request.web.over.wait(0.02):
        request.wfile.write(b"x")


def never_ends(request: Handler) -> None:
    """Sends as fast as it can, for ever."""
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    while not request.web.over.is_set():
        request.wfile.write(bytes(65536))


def goes_away_midway(request: Handler) -> None:
    """Promises a file, sends half of it, and is gone."""
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(bytes(500))
    request.close_connection = True


def redirects_to(url: str) -> Manner:
    return lambda request: request.answer(302, b"", Location=url)
