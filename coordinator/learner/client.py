"""The learner's side of the coordinator's API: batches in, reports and versions out.

    asking ─→ answered
       └─→ away ─→ asking …      logged once when it begins and once when it ends, for any number of threads

- While the coordinator is away, the client waits, as nodes do, and then repeats the same request. The coordinator may
  have carried it out already, which changes nothing: a batch is formed once, a report counts once, a version has its
  number, a file its digest. So no group is trained on twice, and none is lost.
- `coordinator.base.answers` decides which errors mean "away"; any other refusal is raised as its own error class, and
  ends the learner.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import httpx

from coordinator.base.answers import named, refusal
from coordinator.base.files import file_digest
from protocol import limits
from protocol.errors import ChunkMismatch, ManifestInvalid, Unreachable
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.learning import (
    EvaluationSamples,
    KnownUploads,
    LearnerProgress,
    LearnerState,
    OfferedVersion,
    OfferOutcome,
    Publication,
    TrainingBatch,
    UpdateCommitment,
    UpdateReport,
    UploadedFile,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTING_S = 10.0
"""The longest time to connect: a machine that is off sends no answer at all."""

BATCH_WAIT_S = 60.0
"""The longest time to read: longer than the coordinator holds a request for a batch open."""

PUBLICATION_S = 3600.0
"""The longest time to cut, hash and sync the largest policies."""

BATCH_MAX_BYTES = limits.KEPT_BATCH_MAX_BYTES
"""512 groups, each the largest that a round may request. The learner's machine must hold such a batch in memory."""


def _unchecked() -> None:
    """Check nothing."""


class Absence:
    """A time in which the coordinator does not answer, for all clients of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting = 0
        self._began_s = 0.0

    def enter(self, error: Unreachable) -> None:
        """Count another thread that waits, and log the wait if it is the first."""
        with self._lock:
            self._waiting += 1
            if self._waiting == 1:
                self._began_s = time.monotonic()
                log.warning("waiting for the coordinator: %s", error)

    def end(self) -> None:
        """Count a thread less, and log the end of the wait if it was the last."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                log.info("the coordinator answers again after %.1f s", time.monotonic() - self._began_s)


class CoordinatorClient:
    """A client with the operator's token and blocking calls."""

    def __init__(self, url: str, token: str, absence: Absence | None = None) -> None:
        self._url, self._token, self._absence = url, token, absence or Absence()
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"})
        self.away_s = 0.0
        """The total time for which this client waited for the coordinator, in seconds."""

    def another(self) -> "CoordinatorClient":
        """Return a client for another thread, which counts its own `away_s`."""
        return CoordinatorClient(self._url, self._token, self._absence)

    def close(self) -> None:
        self._http.close()

    def state(self) -> LearnerState:
        return LearnerState.from_bytes(self._call("GET", "/v1/learner/state"))

    def batch(self, number: int, check: Callable[[], None] = _unchecked) -> TrainingBatch:
        """Return the batch that leads to update `number`; wait until there is one, and call `check` meanwhile."""
        check()
        while not (data := self._call("GET", f"/v1/learner/batches/{number}")):
            check()
        return read_batch(data)

    def evaluation_samples(self, number: int, count: int) -> EvaluationSamples:
        """Return the first `count` samples of an evaluation that has ended, as text."""
        return EvaluationSamples.from_bytes(
            self._call("GET", f"/v1/learner/evaluations/{number}/samples?count={count}")
        )

    def report(self, report: UpdateReport) -> None:
        self._call("POST", "/v1/learner/reports", report)

    def commit(self, commitment: UpdateCommitment) -> None:
        """Have an update recorded in the ledger; again is harmless."""
        self._call("POST", "/v1/learner/commitments", commitment)

    def progress(self, progress: LearnerProgress) -> None:
        self._call("POST", "/v1/learner/progress", progress)

    def mention(self, progress: LearnerProgress) -> None:
        """Report progress in the middle of a step, without waiting: if the coordinator is away, the report is lost."""
        with suppress(Unreachable):
            self._once("POST", "/v1/learner/progress", progress)

    def offer(self) -> OfferedVersion | None:
        """Return the weights that a trainer offers; None if nobody offers any for a while."""
        data = self._call("GET", "/v1/learner/offers")
        return OfferedVersion.from_bytes(data) if data else None

    def answer(self, outcome: OfferOutcome) -> None:
        """Tell a trainer which version has its weights, or why they are refused."""
        self._call("POST", "/v1/learner/offers", outcome)

    def finish(self) -> None:
        self._call("POST", "/v1/learner/finish")

    def publish(self, version: int, update: int, folder: Path) -> None:
        """Upload the files of a policy folder that the coordinator lacks, then request its publication."""
        files = tuple(UploadedFile(path=path.name, digest=file_digest(path)) for path in sorted(folder.iterdir()))
        publication = Publication(version=version, update=update, files=files)
        try:
            self._upload(publication, folder)
        except ManifestInvalid as error:  # uploads are not synced: a power cut may have lost some
            log.warning("uploading version=%d again: %s", version, error)
            self._upload(publication, folder)

    def fetch(self, version: int, folder: Path) -> None:
        """Write a published version's files into `folder`, and compare each with its signed digest."""
        for file in Publication.from_bytes(self._call("GET", f"/v1/learner/versions/{version}")).files:
            target = folder / file.path
            self._patiently(partial(self._download, f"/v1/learner/versions/{version}/{file.path}", target))
            if file_digest(target) != file.digest:
                raise ChunkMismatch(f"{file.path} of version {version} did not come as it was published.")

    def _upload(self, publication: Publication, folder: Path) -> None:
        place = f"/v1/learner/uploads/{publication.version}"
        held = KnownUploads.from_bytes(self._call("GET", place)).files
        for file in publication.files:
            if file not in held:
                self._call("PUT", f"{place}/{file.path}?digest={file.digest}", folder / file.path, PUBLICATION_S)
        self._call("POST", "/v1/learner/versions", publication, PUBLICATION_S)

    def _download(self, address: str, target: Path) -> None:
        with target.open("wb") as file, self._answer("GET", address, None, BATCH_WAIT_S) as response:
            for piece in response.iter_bytes(limits.MIB):
                file.write(piece)

    def _call(
        self, method: str, address: str, body: Message | Path | None = None, wait_s: float = BATCH_WAIT_S
    ) -> bytes:
        return self._patiently(partial(self._once, method, address, body, wait_s))

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which is repeated as long as the coordinator is away."""
        failures, began = 0, time.monotonic()
        while True:
            try:
                result = attempt()
            except Unreachable as error:
                if not failures:
                    self._absence.enter(error)
                time.sleep(limits.retry_pause_s(failures))  # no event tells that the coordinator is back
                failures += 1
                continue
            if failures:
                self.away_s += time.monotonic() - began
                self._absence.end()
            return result

    def _once(
        self, method: str, address: str, body: Message | Path | None = None, wait_s: float = BATCH_WAIT_S
    ) -> bytes:
        with self._answer(method, address, body, wait_s) as response:
            return response.read()

    @contextmanager
    def _answer(
        self, method: str, address: str, body: Message | Path | None, wait_s: float
    ) -> Iterator[httpx.Response]:
        """Yield the response to one request if it is no error; `Unreachable` may pass, so the caller may retry."""
        content = body.to_bytes() if isinstance(body, Message) else _pieces(body) if body else None
        timeout = httpx.Timeout(BATCH_WAIT_S, connect=CONNECTING_S, read=wait_s)
        with named(), self._http.stream(method, address, content=content, timeout=timeout) as response:
            if not response.is_success:
                raise refusal(response.status_code, response.read())
            yield response


def read_batch(data: bytes) -> TrainingBatch:
    """Decode a batch. It comes from the operator's own coordinator, so it may have as many values as bytes."""
    return TrainingBatch.from_value(canonical.decode(data, max_bytes=BATCH_MAX_BYTES, max_items=BATCH_MAX_BYTES))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces of 1 MiB: weights need not fit into memory twice."""
    with path.open("rb") as file:
        while piece := file.read(limits.MIB):
            yield piece
