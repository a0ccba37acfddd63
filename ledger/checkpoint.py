"""Checkpoints: the size and the root of the log, signed by the ledger's key (C2SP tlog-checkpoint).

    echo-swarm/<round id>
    20852163
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

    — echo-swarm/<round id> <base64>

- The origin, which is also the key's name, contains the round id: a checkpoint is not valid in another round.
- Only `open_checkpoint` turns bytes into a `Checkpoint`: one that came over a wire is a signed one.
- Our log has no extension lines, and no leading zeros in the size: a state of it has exactly one text. `open_any` reads
  checkpoints of other logs, which may have such lines.
"""

import base64
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ledger import note
from ledger.note import Note, NoteKey
from ledger.tree import EMPTY_ROOT, HASH_BYTES, TREE_SIZE_MAX
from protocol.errors import CheckpointInvalid

_TEXT = re.compile(r"(\S+)\n(0|[1-9][0-9]{0,18})\n([A-Za-z0-9+/=]{44})\n")
_EXTENDED = re.compile(rf"{_TEXT.pattern}(?:[^\n]+\n)*")

Sign = Callable[[bytes], bytes]
"""A function from a text to its Ed25519 signature; the holder of the key passes it."""


@dataclass(frozen=True)
class Checkpoint:
    """A state of the log."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def ledger_key(round_id: str, public: bytes) -> NoteKey:
    """Return the key of a round's ledger, with the name that its notes are signed with."""
    return NoteKey(f"echo-swarm/{round_id}", public)


def sign(checkpoint: Checkpoint, key: NoteKey, signature_of: Sign) -> bytes:
    """Return the signed note of a checkpoint."""
    text = checkpoint.text
    return Note(text, ()).signed_by(key, signature_of(text.encode())).to_bytes()


def open_checkpoint(data: bytes, keys: Iterable[NoteKey]) -> Checkpoint:
    """Return a note's checkpoint if one of the ledger's keys has signed it: the current one, or a former one."""
    checkpoint = _open(data, keys, _TEXT)
    if checkpoint.size == 0 and checkpoint.root != EMPTY_ROOT:
        raise CheckpointInvalid("The checkpoint's root is not that of an empty log.")
    return checkpoint


def open_any(data: bytes, keys: Iterable[NoteKey]) -> Checkpoint:
    """Return the checkpoint of any log that names its key by its origin, if one of these keys has signed it.

    The caller compares the root of an empty log.
    """
    return _open(data, keys, _EXTENDED)


def read_saved(data: bytes) -> Checkpoint:
    """Return the checkpoint of a note that the caller itself checked and saved: no signature is checked again."""
    text = note.parse(data).text
    return _read(text, text.partition("\n")[0], _EXTENDED)


def _open(data: bytes, keys: Iterable[NoteKey], form: re.Pattern[str]) -> Checkpoint:
    signed_note = note.parse(data)
    signers = {key: line for key in keys if (line := signed_note.signature_by(key))}
    if not signers:
        raise CheckpointInvalid("The ledger's key has not signed this checkpoint.")
    for key, line in signers.items():  # one wrong line of a known key makes the note wrong
        key.verify(line.value, signed_note.text.encode())
    return _read(signed_note.text, next(iter(signers)).name, form)


def _read(text: str, origin: str, form: re.Pattern[str]) -> Checkpoint:
    match = form.fullmatch(text)
    if match is None:
        raise CheckpointInvalid("The note is signed, but it is not a checkpoint.")
    checkpoint = Checkpoint(match[1], int(match[2]), note.decode(match[3]))
    if checkpoint.origin != origin:
        raise CheckpointInvalid(f"The checkpoint is of {checkpoint.origin[:80]}, not of {origin[:80]}.")
    if len(checkpoint.root) != HASH_BYTES or checkpoint.size > TREE_SIZE_MAX:
        raise CheckpointInvalid("The checkpoint's root or size is not valid for a log.")
    return checkpoint
