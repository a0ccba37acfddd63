"""Witnesses: strangers who sign that the log they saw only ever grew (C2SP tlog-cosignature, cosignature/v1).

- A witness signs a checkpoint, with the time, after it has proved it consistent with all that it had signed before.
  That proof is its program's affair; here is what it writes, and how many of them are enough.
- What is signed: `cosignature/v1`, `time <seconds>`, and the checkpoint's text, each on lines of its own. The line
  below the note holds the time in eight bytes, then the signature.
- Two keys of one name or one key under two names count once: k of n are k different keys.
- Witnesses come when they like, so seldom do two sign the same checkpoint. That is no loss: who has signed a larger one
  vouches for its beginning, too. So k of n vouch for as many entries as the k-th largest of the logs that they signed,
  as long as all of these are beginnings of one log, which is the reader's to prove.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ledger import note
from ledger.checkpoint import Checkpoint, Sign, open_checkpoint
from ledger.note import NOTE_MAX_BYTES, KeyKind, NoteKey, Signature
from protocol.errors import CheckpointInvalid, NotWitnessed
from protocol.wire.message import Message

TIME_BYTES = 8

WITNESSES_MAX = 32
"""Whom a round's operator asks to vouch for it; their lines fit below any checkpoint."""


class Cosigned(Message):
    """The last checkpoint that each of a round's witnesses has signed, with the log's line and theirs."""

    kind: Literal["echo-swarm/cosigned"] = "echo-swarm/cosigned"
    notes: Annotated[tuple[Annotated[bytes, Field(max_length=NOTE_MAX_BYTES)], ...], Field(max_length=WITNESSES_MAX)]


class CosignatureReply(Message):
    """What became of a cosignature; `stale`: this witness has sent a later one."""

    outcome: Literal["recorded", "already_recorded", "stale"]


@dataclass(frozen=True)
class Vouched:
    """What one witness has signed last, and when by its own clock."""

    key: NoteKey
    checkpoint: Checkpoint
    time_s: int
    note: bytes


@dataclass(frozen=True)
class Witnesses:
    """Who must have signed: so many of these."""

    keys: tuple[NoteKey, ...] = ()
    quorum: int = 0

    def require(self, found: Collection[Vouched]) -> int:
        """How many entries enough of them vouch for, if enough of them do."""
        require([one.key for one in found], self.keys, self.quorum)
        largest: dict[bytes, int] = {}
        for one in found:
            largest[one.key.public] = max(one.checkpoint.size, largest.get(one.key.public, 0))
        return sorted(largest.values(), reverse=True)[self.quorum - 1] if self.quorum else 0


def cosign(data: bytes, key: NoteKey, signature_of: Sign, now_s: int) -> bytes:
    """The note with a witness's signature below the others; an earlier one of the same key is replaced."""
    found = note.parse(data)
    kept = tuple(line for line in found.signatures if (line.name, line.key_id) != (key.name, key.id))
    signature = signature_of(_signed(found.text, now_s))
    return note.Note(found.text, kept).signed_by(key, now_s.to_bytes(TIME_BYTES) + signature).to_bytes()


def cosigned(data: bytes, witnesses: Collection[NoteKey]) -> Mapping[NoteKey, int]:
    """Which of these witnesses have signed a note, and when, in seconds; a wrong signature is refused."""
    found = note.parse(data)
    lines = {key: line for key in witnesses if (line := found.signature_by(key))}
    return {key: _time(found.text, key, line) for key, line in lines.items()}


def vouched(notes: Iterable[bytes], log_keys: Collection[NoteKey], witnesses: Collection[NoteKey]) -> list[Vouched]:
    """What these witnesses have signed of a log, each the largest; a note that is not the log's is refused."""
    found: dict[NoteKey, Vouched] = {}
    for data in notes:
        checkpoint = open_checkpoint(data, log_keys)
        for key, time_s in cosigned(data, witnesses).items():
            if key not in found or found[key].checkpoint.size < checkpoint.size:
                found[key] = Vouched(key, checkpoint, time_s, data)
    return list(found.values())


def require(present: Collection[NoteKey], witnesses: Collection[NoteKey], quorum: int) -> None:
    """Refuse a log that fewer than so many of these witnesses have signed."""
    count = len({key.public for key in present})
    if count < quorum:
        raise NotWitnessed(
            f"{count} of the {len(witnesses)} witnesses have signed this log; {quorum} must.",
            hint="Fetch it from where they publish what they sign, or ask for fewer.",
        )


def _time(text: str, key: NoteKey, line: Signature) -> int:
    if key.kind is not KeyKind.WITNESS:
        raise CheckpointInvalid(f"{key.name[:80]} is the key of a log, not of a witness.")
    now_s = int.from_bytes(line.value[:TIME_BYTES])
    key.verify(line.value[TIME_BYTES:], _signed(text, now_s))
    return now_s


def _signed(text: str, now_s: int) -> bytes:
    return f"cosignature/v1\ntime {now_s}\n{text}".encode()
