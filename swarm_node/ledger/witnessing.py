"""The witness of this machine: the record of what it has signed, and its answers to logs that call it.

- A note is signed only in the place of the one that its consistency was proved with, and saved before it is shown.
  The lock is held from the comparison to the save: two programs of one witness cannot sign two histories.
- Every way to sign goes through the record: the command that reads a round's log, and the server that logs call.
- The server is C2SP's tlog-witness over HTTP (`ledger.witness` has the format and the decision). It signs for
  the logs whose keys the owner named, and for no others. `GET /<hash of an origin>/checkpoint` returns the last note of
  a log. After a rotation the newer key of a round counts, too, without a restart, and the older one until the newer has
  signed. One request is decided at a time. While the record cannot be read or saved, nothing is signed.
"""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import trio

from ledger import note, witness
from ledger.checkpoint import Sign, read_saved
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES, Note, NoteKey
from ledger.witness import PATH, REQUEST_MAX_BYTES, SIZE_KIND, AddCheckpoint, Objection, judge
from protocol.errors import CheckpointInvalid, ConfigInvalid, MalformedMessage, SwarmError
from swarm_node.base import disk
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.base.http_server import PageReply, PageRequest, plain
from swarm_node.ledger.log_watch import load_seen

log = logging.getLogger(__name__)

_READ = re.compile(r"/([0-9a-f]{64})/checkpoint")
_ORIGIN = re.compile(r"echo-swarm/([0-9a-f]{64})")
_PLAIN = "text/plain; charset=utf-8"


def watch_folder(folder: Path, round_id: str) -> Path:
    """Return the folder with what the witness whose record is in `folder` has seen of a round's log."""
    return folder / round_id[:16]


@dataclass(frozen=True)
class WitnessRecord:
    """The notes that one key has signed."""

    folder: Path
    key: NoteKey
    signature_of: Sign
    now_s: Callable[[], int]

    def find(self, origin: str) -> bytes | None:
        """Return the last note of a log that was signed; None before the first."""
        path = self._path(origin)
        return path.read_bytes() if path.exists() else None

    def sign(self, origin: str, after: bytes | None, log_key: NoteKey, data: bytes) -> bytes | None:
        """Sign a note that continues `after`, save and return it; None if another one was signed meanwhile."""
        busy = ConfigInvalid(f"Another program signs with {self.key.name[:80]}.", hint="Try again.")
        with disk_named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with disk.hold_lock(self.folder / "sign.lock", busy):
            if self.find(origin) != after:
                return None
            parsed = note.parse(data)
            line = parsed.signature_by(log_key)
            assert line is not None, "the caller has checked the log's signature"
            bare = Note(parsed.text, (line,)).to_bytes()
            signed = witness.cosign(bare, self.key, self.signature_of, self.now_s())
            if len(signed) > NOTE_MAX_BYTES:
                raise CheckpointInvalid("The note leaves no room for a signature.")
            write_durably(self._path(origin), signed, temp_folder=self.folder)
            return signed

    def adopt(self, origin: str) -> None:
        """Sign what this witness saw of a round's log before it had a record: older versions saved only that."""
        match = _ORIGIN.fullmatch(origin)
        if match is None or self.find(origin) is not None:
            return
        seen = load_seen(watch_folder(self.folder, match[1]))
        if seen.checkpoint:
            _, signer = Keys(seen.roots, match[1]).signed(seen.checkpoint)
            self.sign(origin, None, signer, seen.checkpoint)

    def by_hash(self, digest: str) -> bytes | None:
        """Return the last note of the log whose origin has this hash; None if there is none."""
        path = self.folder / f"{digest}.note"
        return path.read_bytes() if path.exists() else None

    def _path(self, origin: str) -> Path:
        return self.folder / f"{sha256(origin.encode()).hexdigest()}.note"


class WitnessServer:
    """The answers of one witness."""

    def __init__(self, record: WitnessRecord, logs: Collection[NoteKey]) -> None:
        self._record = record
        self._logs = tuple(logs)
        self._replaced = frozenset[NoteKey]()
        """Keys in whose place the log's roots have named a newer one, which has signed nothing yet."""
        self._turn = trio.Lock()
        for key in self._logs:
            record.adopt(key.name)

    async def trust(self, newest_first: Sequence[NoteKey]) -> NoteKey | None:
        """Trust the newest of a log's keys, too, and return it; None if it is trusted already, or the list is too old.

        The keys before it count until it has signed a note: its log may sign with them until it is restarted.
        """
        newest = newest_first[0]
        async with self._turn:
            before = {key for key in self._logs if key.name == newest.name}
            if not before <= set(newest_first):
                return None
            self._replaced |= before - {newest}
            if newest in before:
                return None
            self._logs = (newest, *self._logs)
            return newest

    async def answer(self, request: PageRequest) -> PageReply:
        """Answer a request."""
        if request.method == "POST" and request.path == f"/{PATH}":
            async with self._turn:
                return await trio.to_thread.run_sync(self._answer_log, request.body)
        if request.method in ("GET", "HEAD") and (match := _READ.fullmatch(request.path)):
            found = self._record.by_hash(match[1])
            return PageReply(found, kind=_PLAIN) if found else plain("This witness has signed no such log.", 404)
        return plain(f"A witness answers POST /{PATH}.", 404)

    def _answer_log(self, body: bytes) -> PageReply:
        try:
            return self._add(body)
        except SwarmError as error:  # the record is damaged or busy, or the disk is full
            log.warning("cannot sign code=%s: %s", error.code, error)
            return plain("This witness cannot sign now; its log has the reason.", 503)

    def _add(self, body: bytes) -> PageReply:
        if len(body) > REQUEST_MAX_BYTES:
            return plain(f"The request is larger than {REQUEST_MAX_BYTES} bytes.", 413)
        try:
            asked = AddCheckpoint.parse(body)
        except MalformedMessage as error:
            return plain(error.message, 400)
        keys = [key for key in self._logs if key.name == asked.origin]
        before = self._record.find(asked.origin) if keys else None
        decision = judge(asked, keys, read_saved(before) if before is not None else None)
        if isinstance(decision, Objection):
            return _objection(decision)
        signer = next(key for key in keys if note.parse(asked.note).signature_by(key))
        try:
            signed = self._record.sign(asked.origin, before, signer, asked.note)
        except CheckpointInvalid as error:
            return plain(error.message, 400)
        if signed is None:
            return plain("Another program of this witness has just signed. Try again.", 503)
        if signer not in self._replaced:
            self._logs = tuple(key for key in self._logs if key.name != signer.name or key not in self._replaced)
        line = note.parse(signed).signature_by(self._record.key)
        return PageReply(str(line).encode(), kind=_PLAIN)


def _objection(objection: Objection) -> PageReply:
    if objection.size is not None:
        return PageReply(f"{objection.size}\n".encode(), objection.status, SIZE_KIND)
    return plain(objection.text, objection.status)
