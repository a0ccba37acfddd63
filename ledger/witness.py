"""Witnesses: outsiders who sign that the log they saw has only grown (C2SP tlog-cosignature, cosignature/v1).

- A witness signs a checkpoint, with the time, after it has proved it consistent with all that it signed before. Its
  program makes that proof; this module has the format of the signature, and the quorum.
- The signed text: `cosignature/v1`, `time <seconds>`, and the checkpoint's text, each on lines of its own. The line
  below the note has the time in eight bytes, then the signature.
- Two keys with one name or one key with two names count once: k of n are k different keys.
- Witnesses sign at different times, so two rarely sign the same checkpoint. A witness of a larger one also vouches for
  its beginning. So k of n vouch for as many entries as the k-th largest of their checkpoints has, if all of these are
  beginnings of one log, which the reader has to prove.
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
