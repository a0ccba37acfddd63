"""Checkpoints: how many entries the log has and what their root is, signed by the ledger's key (C2SP tlog-checkpoint).

    echo-swarm/<round id>
    20852163
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

    — echo-swarm/<round id> <base64>

- The origin, which is the key's name too, carries the round: no round's checkpoint passes for another's.
- `bytes → Checkpoint` is `open_checkpoint` alone: a `Checkpoint` that came over a wire is a signed one.
- No extension lines, and a size without leading zeros: there is one text for one state of the log.
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
"""From a text to its Ed25519 signature; whoever holds the key passes it."""


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
    """The key of a round's ledger, under the name that its notes are signed with."""
    return NoteKey(f"echo-swarm/{round_id}", public)


def sign(checkpoint: Checkpoint, key: NoteKey, signature_of: Sign) -> bytes:
    """The note that says so."""
    text = checkpoint.text
    return Note(text, ()).signed_by(key, signature_of(text.encode())).to_bytes()


def open_checkpoint(data: bytes, keys: Iterable[NoteKey]) -> Checkpoint:
    """What a note says, if one of the ledger's keys has signed it: the present one, for old notes a former one, too."""
    found = note.parse(data)
    for key in keys:
        if signature := found.signature_by(key):
            key.verify(signature.value, found.text.encode())
            return _read(found.text, key.name)
    raise CheckpointInvalid("The ledger's key has not signed this checkpoint.")


def _read(text: str, origin: str) -> Checkpoint:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CheckpointInvalid("The note is signed, but is no checkpoint.")
    checkpoint = Checkpoint(match[1], int(match[2]), note.decode(match[3]))
    if checkpoint.origin != origin:
        raise CheckpointInvalid(f"The checkpoint is one of {checkpoint.origin[:80]}, not of {origin[:80]}.")
    if len(checkpoint.root) != HASH_BYTES or checkpoint.size > TREE_SIZE_MAX:
        raise CheckpointInvalid("The checkpoint's root or size cannot be that of a log.")
    if checkpoint.size == 0 and checkpoint.root != EMPTY_ROOT:
        raise CheckpointInvalid("An empty log has one root, and this is another.")
    return checkpoint
