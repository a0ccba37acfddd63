"""Witnesses: outsiders who sign that the log they saw has only grown (C2SP tlog-cosignature, cosignature/v1).

- A witness signs a checkpoint, with the time, after it has proved it consistent with all that it signed before. Its
  program makes that proof; this module has the formats of the signature and the request, and the quorum.
- The signed text: `cosignature/v1`, `time <seconds>`, and the checkpoint's text, each on lines of its own. The line
  below the note has the time in eight bytes, then the signature.
- Two keys with one name or one key with two names count once: k of n are k different keys.
- Witnesses sign at different times, so two rarely sign the same checkpoint. A witness of a larger one also vouches for
  its beginning. So k of n vouch for as many entries as the k-th largest of their checkpoints has, if all of these are
  beginnings of one log, which the reader has to prove.

A request to a witness has C2SP's tlog-witness format:

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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field

from ledger import note, tree
from ledger.checkpoint import Checkpoint, Sign, open_any, open_checkpoint
from ledger.note import NOTE_MAX_BYTES, KeyKind, NoteKey, Signature
from ledger.tree import EMPTY_ROOT, HASH_BYTES, TREE_SIZE_MAX
from protocol.errors import CheckpointInvalid, MalformedMessage, NotWitnessed, ProofInvalid
from protocol.wire.message import Message

TIME_BYTES = 8

WITNESSES_MAX = 32
"""Witnesses that an operator may name for a round; their lines fit below any checkpoint."""


class Cosigned(Message):
    """The last checkpoint that each witness of a round has signed, with the signatures of the log and the witness."""

    kind: Literal["echo-swarm/cosigned"] = "echo-swarm/cosigned"
    notes: Annotated[tuple[Annotated[bytes, Field(max_length=NOTE_MAX_BYTES)], ...], Field(max_length=WITNESSES_MAX)]


class CosignatureReply(Message):
    """The outcome of a cosignature; `stale`: this witness has sent a later one."""

    outcome: Literal["recorded", "already_recorded", "stale"]


@dataclass(frozen=True)
class Vouched:
    """The last checkpoint that a witness has signed, and the time by its own clock."""

    key: NoteKey
    checkpoint: Checkpoint
    time_s: int
    note: bytes


@dataclass(frozen=True)
class Witnesses:
    """A quorum of witnesses that must have signed."""

    keys: tuple[NoteKey, ...] = ()
    quorum: int = 0

    def require(self, vouchers: Collection[Vouched]) -> int:
        """Return the number of entries for which `quorum` witnesses vouch; raise `NotWitnessed` if there are fewer."""
        require([voucher.key for voucher in vouchers], self.keys, self.quorum)
        largest: dict[bytes, int] = {}
        for voucher in vouchers:
            largest[voucher.key.public] = max(voucher.checkpoint.size, largest.get(voucher.key.public, 0))
        return sorted(largest.values(), reverse=True)[self.quorum - 1] if self.quorum else 0


def cosign(data: bytes, key: NoteKey, signature_of: Sign, now_s: int) -> bytes:
    """Return the note with a witness's signature added; an earlier one of the same key is replaced."""
    unsigned = note.parse(data)
    kept = tuple(line for line in unsigned.signatures if (line.name, line.key_id) != (key.name, key.id))
    signature = signature_of(_signed(unsigned.text, now_s))
    return note.Note(unsigned.text, kept).signed_by(key, now_s.to_bytes(TIME_BYTES) + signature).to_bytes()


def cosigned(data: bytes, witnesses: Collection[NoteKey]) -> Mapping[NoteKey, int]:
    """Return the time in seconds at which each of these witnesses has signed a note; reject a wrong signature."""
    signed = note.parse(data)
    lines = {key: line for key in witnesses if (line := signed.signature_by(key))}
    return {key: _time(signed.text, key, line) for key, line in lines.items()}


def vouched(notes: Iterable[bytes], log_keys: Collection[NoteKey], witnesses: Collection[NoteKey]) -> list[Vouched]:
    """Return the largest checkpoint of a log that each witness has signed; reject a note of another log."""
    largest: dict[NoteKey, Vouched] = {}
    for data in notes:
        checkpoint = open_checkpoint(data, log_keys)
        for key, time_s in cosigned(data, witnesses).items():
            if key not in largest or largest[key].checkpoint.size < checkpoint.size:
                largest[key] = Vouched(key, checkpoint, time_s, data)
    return list(largest.values())


def require(present: Collection[NoteKey], witnesses: Collection[NoteKey], quorum: int) -> None:
    """Raise `NotWitnessed` if fewer than `quorum` of the witnesses have signed a log."""
    count = len({key.public for key in present})
    if count < quorum:
        raise NotWitnessed(
            f"{count} of the {len(witnesses)} witnesses have signed this log; {quorum} are required.",
            hint="Fetch the checkpoint from a place where more witnesses publish, or lower the quorum.",
        )


def _time(text: str, key: NoteKey, line: Signature) -> int:
    if key.kind is not KeyKind.WITNESS:
        raise CheckpointInvalid(f"{key.name[:80]} is the key of a log, not of a witness.")
    now_s = int.from_bytes(line.value[:TIME_BYTES])
    key.verify(line.value[TIME_BYTES:], _signed(text, now_s))
    return now_s


def _signed(text: str, now_s: int) -> bytes:
    return f"cosignature/v1\ntime {now_s}\n{text}".encode()


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
