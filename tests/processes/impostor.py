"""An impostor of the coordinator: it passes every request on, but may answer for any file itself.

- What he serves is a folder, byte for byte: an older copy, a frozen one, or one that others have signed.
- He counts what was asked of him, so that "no work was done" is a number.
"""

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from protocol.errors import NotFound
from protocol.wire import canonical

METADATA = "/v1/metadata/"


class Impostor:
    """A proxy on a port of its own."""

    def __init__(self, coordinator_address: str) -> None:
        self.metadata: Path | None = None
        """The folder whose documents he serves; None passes those of the coordinator on."""
        self.lies: dict[str, bytes] = {}
        """Contents that it serves in place of single files, by path."""
        self.blocked = ""
        """Paths that begin so are answered as by a proxy that is broken; nothing is blocked at first."""
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        impostor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(b"")

            def do_POST(self) -> None:
                self._reply(self.rfile.read(int(self.headers["Content-Length"])))

            def _reply(self, body: bytes) -> None:
                impostor.asked[self.path] += 1
                if own := impostor._own(self.path):
                    self._answer(*own)
                else:
                    self._pass_on(body)

            def _pass_on(self, body: bytes) -> None:
                connection = http.client.HTTPConnection(coordinator_address, timeout=30)
                try:
                    connection.request(self.command, self.path, body)
                    response = connection.getresponse()
                    self._answer(response.status, response.read())
                except OSError:
                    self.close_connection = True
                finally:
                    connection.close()

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="impostor", daemon=True)
        self._thread.start()

    def _own(self, path: str) -> tuple[int, bytes] | None:
        """Return its own answer for a path."""
        if self.blocked and path.startswith(self.blocked):
            return 502, b""
        if path in self.lies:
            return 200, self.lies[path]
        if self.metadata is None or not path.startswith(METADATA):
            return None
        document = self.metadata / path.removeprefix(METADATA)
        if document.is_file():
            return 200, document.read_bytes()
        return 404, canonical.encode(NotFound("There is no such document.").to_wire())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
