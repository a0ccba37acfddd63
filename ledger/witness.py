"""Witnesses: strangers who sign that the log they saw only ever grew (C2SP tlog-cosignature, cosignature/v1).

- A witness signs a checkpoint, with the time, after it has proved it consistent with all that it had signed before.
  That proof is its program's affair; here is what it writes, and how many of them are enough.
- What is signed: `cosignature/v1`, `time <seconds>`, and the checkpoint's text, each on lines of its own. The line
  below the note holds the time in eight bytes, then the signature.
- Two keys of one name or one key under two names count once: k of n are k different keys.
"""

from collections.abc import Collection, Mapping

from ledger import note
from ledger.checkpoint import Sign
from ledger.note import Key, Kind, Signature
from protocol.errors import CheckpointInvalid, NotWitnessed

TIME_BYTES = 8


def cosign(data: bytes, key: Key, signature_of: Sign, now_s: int) -> bytes:
    """The note with a witness's signature below the others; an earlier one of the same key is replaced."""
    found = note.parse(data)
    kept = tuple(line for line in found.signatures if (line.name, line.key_id) != (key.name, key.id))
    signature = signature_of(_signed(found.text, now_s))
    return note.Note(found.text, kept).signed_by(key, now_s.to_bytes(TIME_BYTES) + signature).to_bytes()


def cosigned(data: bytes, witnesses: Collection[Key]) -> Mapping[Key, int]:
    """Which of these witnesses have signed a note, and when, in seconds; a wrong signature is refused."""
    found = note.parse(data)
    lines = {key: line for key in witnesses if (line := found.of(key))}
    return {key: _time(found.text, key, line) for key, line in lines.items()}


def require(data: bytes, witnesses: Collection[Key], quorum: int) -> None:
    """Refuse a checkpoint that fewer than so many of these witnesses have signed."""
    present = {key.public for key in cosigned(data, witnesses)}
    if len(present) < quorum:
        raise NotWitnessed(
            f"{len(present)} of the {len(witnesses)} witnesses have signed this checkpoint; {quorum} must.",
            hint="Fetch it from where they publish what they sign, or ask for fewer.",
        )


def _time(text: str, key: Key, line: Signature) -> int:
    if key.kind is not Kind.WITNESS:
        raise CheckpointInvalid(f"{key.name[:80]} is the key of a log, not of a witness.")
    now_s = int.from_bytes(line.value[:TIME_BYTES])
    key.verify(line.value[TIME_BYTES:], _signed(text, now_s))
    return now_s


def _signed(text: str, now_s: int) -> bytes:
    return f"cosignature/v1\ntime {now_s}\n{text}".encode()
