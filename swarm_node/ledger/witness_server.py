"""Witness that logs call: C2SP's tlog-witness over HTTP (`ledger.add_checkpoint` has the format and the decision).

- `POST /add-checkpoint` signs for the logs whose keys the owner named, and for no others.
- `GET /<hash of an origin>/checkpoint` returns the last note of that log, with the witness's line.
- One request is decided at a time, and its note is saved before the answer.
"""

import re
from collections.abc import Collection

import trio

from ledger import note
from ledger.add_checkpoint import PATH, REQUEST_MAX_BYTES, SIZE_KIND, AddCheckpoint, Objection, judge
from ledger.checkpoint import read_saved
from ledger.note import NoteKey
from protocol.errors import ConfigInvalid, MalformedMessage
from swarm_node.base.http_server import PageReply, PageRequest, plain
from swarm_node.ledger.witness_record import WitnessRecord

_READ = re.compile(r"/([0-9a-f]{64})/checkpoint")
_PLAIN = "text/plain; charset=utf-8"


class WitnessServer:
    """The answers of one witness."""

    def __init__(self, record: WitnessRecord, logs: Collection[NoteKey]) -> None:
        self._record = record
        self._logs = tuple(logs)
        self._turn = trio.Lock()

    async def answer(self, request: PageRequest) -> PageReply:
        """Answer a request."""
        if request.method == "POST" and request.path == f"/{PATH}":
            async with self._turn:
                return await trio.to_thread.run_sync(self._add, request.body)
        if request.method in ("GET", "HEAD") and (match := _READ.fullmatch(request.path)):
            found = self._record.by_hash(match[1])
            return PageReply(found, kind=_PLAIN) if found else plain("This witness has signed no such log.", 404)
        return plain(f"A witness answers POST /{PATH}.", 404)

    def _add(self, body: bytes) -> PageReply:
        if len(body) > REQUEST_MAX_BYTES:
            return plain(f"The request is larger than {REQUEST_MAX_BYTES} bytes.", 413)
        try:
            asked = AddCheckpoint.parse(body)
        except MalformedMessage as error:
            return plain(error.message, 400)
        keys = [key for key in self._logs if key.name == asked.origin]
        before = self._record.find(asked.origin) if keys else None
        decision = judge(asked, keys, read_saved(before) if before else None)
        if isinstance(decision, Objection):
            return _objection(decision)
        signer = next(key for key in keys if note.parse(asked.note).signature_by(key))
        try:
            signed = self._record.sign(asked.origin, before, signer, asked.note)
        except ConfigInvalid as error:
            return plain(error.message, 503)
        if signed is None:
            return plain("Another program of this witness has just signed. Try again.", 503)
        line = note.parse(signed).signature_by(self._record.key)
        return PageReply(str(line).encode(), kind=_PLAIN)


def _objection(objection: Objection) -> PageReply:
    if objection.size is not None:
        return PageReply(f"{objection.size}\n".encode(), objection.status, SIZE_KIND)
    return plain(objection.text, objection.status)
