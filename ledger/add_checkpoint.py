"""Requests to a witness in C2SP's tlog-witness format, and the witness's decision about one.

    old 20852014
    PlRNCrwHpqhGrupue0L7gxbjbMiKA9temvuZZDDpkaw=        RFC 6962 consistency proof, at most 63 lines

    example.com/behind-the-sofa                         the checkpoint, with the log's signature
    …

- A log sends the size of the checkpoint that the witness has signed last, the proof that the new one continues it, and
  the new one. The witness answers with its signature line, or with a status that says what is wrong.
- 400: not a request, or it shrinks. 403: no key of this log has signed. 404: an unknown log. 409: another size was
  signed last; it is the body. 422: no proof.
- `judge` decides; the caller records what was signed before it answers, and lets nobody come between.
"""

import base64
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from ledger import note, tree
from ledger.checkpoint import Checkpoint, open_any
from ledger.note import NOTE_MAX_BYTES, NoteKey
from ledger.tree import EMPTY_ROOT, HASH_BYTES, TREE_SIZE_MAX
from protocol.errors import CheckpointInvalid, MalformedMessage, ProofInvalid

PATH = "add-checkpoint"
"""The end of the address that takes a request."""

PROOF_MAX_LINES = 63

REQUEST_MAX_BYTES = NOTE_MAX_BYTES + (PROOF_MAX_LINES + 1) * 48
"""The size of a request: a note, a line of 45 bytes for each hash, and the old size."""

SIZE_KIND = "text/x.tlog.size"
"""The content type of a size in an answer with status 409."""

SIZE_MAX_BYTES = 21
"""The size of that body: the largest tree's size in decimal, and a newline."""

_OLD = re.compile(r"old (0|[1-9][0-9]{0,18})")
_SIZE = re.compile(rb"(0|[1-9][0-9]{0,18})\n?")


@dataclass(frozen=True)
class AddCheckpoint:
    """A request to sign a checkpoint, not yet checked."""

    old: int
    proof: tuple[bytes, ...]
    note: bytes

    def to_bytes(self) -> bytes:
        lines = "".join(f"{base64.b64encode(item).decode()}\n" for item in self.proof)
        return f"old {self.old}\n{lines}\n".encode() + self.note

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the request of a body."""
        head, blank, signed = data.partition(b"\n\n")
        try:
            old, *lines = head.decode("ascii").split("\n")
        except UnicodeDecodeError:
            old, lines = "", []
        match = _OLD.fullmatch(old)
        proof = tuple(map(note.decode, lines))
        if not blank or match is None or len(proof) > PROOF_MAX_LINES or any(len(item) != HASH_BYTES for item in proof):
            raise MalformedMessage("A request is the old size, at most 63 hashes, an empty line, and a checkpoint.")
        return cls(int(match[1]), proof, signed)

    @property
    def origin(self) -> str:
        """The name of the log that the checkpoint claims to be of."""
        return self.note.partition(b"\n")[0].decode(errors="replace")


@dataclass(frozen=True)
class Objection:
    """The reason why a witness does not sign, with the status that says so."""

    status: int
    text: str
    size: int | None = None
    """The size that was signed last, for status 409."""


def judge(request: AddCheckpoint, keys: Collection[NoteKey], last: Checkpoint | None) -> Checkpoint | Objection:
    """Return the checkpoint that a witness may sign, or the objection; `last` is the last one of this log it signed.

    `keys` are the trusted keys whose name is the request's origin.
    """
    if not keys:
        return Objection(404, "This witness does not know the log.")
    try:
        note.parse(request.note)
    except CheckpointInvalid as error:
        return Objection(400, error.message)
    try:
        checkpoint = open_any(request.note, keys)
    except CheckpointInvalid as error:
        return Objection(403, error.message)
    size = last.size if last else 0
    if request.old > checkpoint.size:
        return Objection(400, "The old size is larger than the checkpoint.")
    if request.old != size:
        return Objection(409, f"The last signed checkpoint has {size} entries.", size)
    try:
        if checkpoint.size == 0 and checkpoint.root != EMPTY_ROOT:
            raise ProofInvalid("The root is not that of an empty log.")
        if last is None or size == 0:
            _require_nothing_to_prove(request)
        else:
            tree.check_consistency(size, last.root, checkpoint.size, checkpoint.root, request.proof)
    except ProofInvalid as error:
        return Objection(422, error.message)
    return checkpoint


def parse_size(data: bytes) -> int:
    """Return the size in the body of an answer with status 409."""
    match = _SIZE.fullmatch(data)
    if match is None or int(match[1]) > TREE_SIZE_MAX:
        raise MalformedMessage("The answer is not the size of a log.")
    return int(match[1])


def _require_nothing_to_prove(request: AddCheckpoint) -> None:
    if request.proof:
        raise ProofInvalid("An empty log needs no proof.")
