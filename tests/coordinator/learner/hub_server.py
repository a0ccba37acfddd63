"""A model hub on a free port: what huggingface_hub asks of it for an upload, with files kept as they came."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_write"


class Hub(ThreadingHTTPServer):
    """A fake model hub with one repository and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._answer({"url": f"{self.server.url}/somebody/policy"})
        if path == "/api/validate-yaml":
            return self._answer({"warnings": [], "errors": []})
        if path == "/api/models/somebody/policy/preupload/main":
            return self._answer({"files": [_mode(file) for file in json.loads(body)["files"]]})
        if path == "/somebody/policy.git/info/lfs/objects/batch":
            return self._answer(
                {"transfer": "basic", "objects": [self._place(one) for one in json.loads(body)["objects"]]}
            )
        if path == "/api/models/somebody/policy/commit/main":
            self._commit([json.loads(line) for line in body.splitlines()])
            return self._answer({"commitUrl": f"{self.server.url}/somebody/policy/commit/1", "commitOid": "1" * 40})
        return self._answer({"error": f"{path} is not here"}, 404)

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return wanted | {"actions": {"upload": {"href": f"{self.server.url}/large/{wanted['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.server.files[value["path"]] = self.server.large[value["oid"]]

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(".safetensors")
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
