"""Somebody in the coordinator's place: passes every request on, but may answer for any file himself.

- What he serves is a folder, byte for byte: an older copy, a frozen one, or one that others have signed.
- He counts what was asked of him, so that "no work was done" is a number.
"""

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from protocol import canonical
from protocol.errors import NotFound

METADATA = "/v1/metadata/"


class Impostor:
    """A proxy on a port of its own."""

    def __init__(self, coordinator_address: str) -> None:
        self.metadata: Path | None = None
        """The folder whose documents he serves; None passes those of the coordinator on."""
        self.lies: dict[str, bytes] = {}
        """What he says in place of single files, by path."""
        self.blocked = ""
        """Paths that begin so are answered as by a proxy that is broken; nothing is blocked at first."""
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        impostor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                impostor.asked[self.path] += 1
                if impostor.blocked and self.path.startswith(impostor.blocked):
                    self._answer(502, b"")
                    return
                if self.path in impostor.lies:
                    self._answer(200, impostor.lies[self.path])
                    return
                if impostor.metadata is not None and self.path.startswith(METADATA):
                    document = impostor.metadata / self.path.removeprefix(METADATA)
                    if document.is_file():
                        self._answer(200, document.read_bytes())
                    else:
                        self._answer(404, canonical.encode(NotFound("There is no such document.").to_wire()))
                    return
                self._pass_on(b"")

            def do_POST(self) -> None:
                impostor.asked[self.path] += 1
                self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

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
                """He keeps no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="impostor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
