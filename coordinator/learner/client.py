"""The learner's side of the coordinator's API: batches in, reports and versions out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from blake3 import blake3

from protocol import canonical, limits
from protocol.errors import ChunkMismatch, SwarmError, Unreachable
from protocol.learning import Batch, LearnerState, Progress, Publication, Report, Upload, Uploads
from protocol.message import Message

BATCH_WAIT_S = 60.0
"""The coordinator holds a request for a batch open for a while; this is longer."""

PUBLICATION_S = 3600.0
"""Cutting, hashing and syncing the largest policies."""

BATCH_MAX_BYTES = 4096 * limits.MIB
"""512 groups, each the largest that a round may ask for. Whoever configures that trains on a machine that holds it."""


class CoordinatorClient:
    """Blocking calls with the operator's token."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=BATCH_WAIT_S, headers={"Authorization": f"Bearer {token}"})

    def state(self) -> LearnerState:
        return LearnerState.from_bytes(self._call("GET", "/v1/learner/state"))

    def batch(self, number: int) -> Batch:
        """The batch that leads to update `number`; waits until there is one."""
        while not (data := self._call("GET", f"/v1/learner/batches/{number}")):
            pass
        return read_batch(data)

    def report(self, report: Report) -> None:
        self._call("POST", "/v1/learner/reports", report)

    def progress(self, progress: Progress) -> None:
        self._call("POST", "/v1/learner/progress", progress)

    def finish(self) -> None:
        self._call("POST", "/v1/learner/finish")

    def publish(self, version: int, update: int, folder: Path) -> None:
        """Upload what the coordinator lacks of a policy folder, then ask for its publication."""
        entries, held = [], Uploads.from_bytes(self._call("GET", f"/v1/learner/uploads/{version}")).files
        for path in sorted(folder.iterdir()):
            digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
            entries.append(entry := Upload(path=path.name, digest=digest))
            if entry not in held:
                address = f"/v1/learner/uploads/{version}/{path.name}?digest={digest}"
                self._call("PUT", address, _pieces(path), timeout_s=PUBLICATION_S)
        publication = Publication(version=version, update=update, files=tuple(entries))
        self._call("POST", "/v1/learner/versions", publication, timeout_s=PUBLICATION_S)

    def fetch(self, version: int, folder: Path) -> None:
        """Write a published version's files into a folder, each only if it is what was signed."""
        for file in Publication.from_bytes(self._call("GET", f"/v1/learner/versions/{version}")).files:
            hasher = blake3()
            with (folder / file.path).open("wb") as target, self._answer(version, file.path) as pieces:
                for piece in pieces.iter_bytes(limits.MIB):
                    hasher.update(piece)
                    target.write(piece)
            if hasher.hexdigest() != file.digest:
                raise ChunkMismatch(f"{file.path} of version {version} did not come as it was published.")

    @contextmanager
    def _answer(self, version: int, name: str) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", f"/v1/learner/versions/{version}/{name}") as response:
                if response.is_error:
                    raise SwarmError.from_wire(canonical.decode(response.read()))
                yield response
        except httpx.HTTPError as error:
            raise _away(error) from error

    def _call(
        self, method: str, path: str, body: Message | Iterator[bytes] | None = None, timeout_s: float = BATCH_WAIT_S
    ) -> bytes:
        content = body.to_bytes() if isinstance(body, Message) else body
        try:
            response = self._http.request(method, path, content=content, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise _away(error) from error
        if response.is_error:
            raise SwarmError.from_wire(canonical.decode(response.content))
        return response.content


def read_batch(data: bytes) -> Batch:
    """A batch comes from the operator's own coordinator: it may have as many values as it has bytes."""
    return Batch.from_value(canonical.decode(data, max_bytes=BATCH_MAX_BYTES, max_items=BATCH_MAX_BYTES))


def _away(error: httpx.HTTPError) -> Unreachable:
    return Unreachable(f"The coordinator does not answer ({error}).")


def _pieces(path: Path) -> Iterator[bytes]:
    """A file a megabyte at a time: weights need not fit into memory twice."""
    with path.open("rb") as file:
        while piece := file.read(limits.MIB):
            yield piece
