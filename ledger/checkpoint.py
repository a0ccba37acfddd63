"""Checkpoints: the size and the root of the log, signed by the ledger's key (C2SP tlog-checkpoint).

    echo-swarm/<round id>
    20852163
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

    — echo-swarm/<round id> <base64>

- The origin, which is also the key's name, contains the round id: a checkpoint is not valid in another round.
- Only `open_checkpoint` turns bytes into a `Checkpoint`: one that came over a wire is a signed one.
- There are no extension lines, and no leading zeros in the size: a state of the log has exactly one text.
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
    signed_note = note.parse(data)
    for key in keys:
        if signature := signed_note.signature_by(key):
            key.verify(signature.value, signed_note.text.encode())
            return _read(signed_note.text, key.name)
    raise CheckpointInvalid("The ledger's key has not signed this checkpoint.")


def _read(text: str, origin: str) -> Checkpoint:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CheckpointInvalid("The note is signed, but it is not a checkpoint.")
    checkpoint = Checkpoint(match[1], int(match[2]), note.decode(match[3]))
    if checkpoint.origin != origin:
        raise CheckpointInvalid(f"The checkpoint is of {checkpoint.origin[:80]}, not of {origin[:80]}.")
    if len(checkpoint.root) != HASH_BYTES or checkpoint.size > TREE_SIZE_MAX:
        raise CheckpointInvalid("The checkpoint's root or size is not valid for a log.")
    if checkpoint.size == 0 and checkpoint.root != EMPTY_ROOT:
        raise CheckpointInvalid("The checkpoint's root is not that of an empty log.")
    return checkpoint
