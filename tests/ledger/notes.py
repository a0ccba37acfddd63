"""Keys and checkpoints that tests sign with; the seeds are fixed, so what is signed is, too."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.note import KeyKind, NoteKey

ROUND_ID = "ab" * 32

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(32))
KEY = ledger_key(ROUND_ID, PRIVATE.public_key().public_bytes_raw())

THIEF = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)


def witness(number: int) -> tuple[NoteKey, Ed25519PrivateKey]:
    private = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    return NoteKey(f"witness-{number}", private.public_key().public_bytes_raw(), KeyKind.WITNESS), private


def checkpoint(size: int, root: bytes = b"r" * 32) -> bytes:
    return sign(Checkpoint(KEY.name, size, root), KEY, PRIVATE.sign)
