"""Signed notes, as C2SP signed-note has them: a text that people can read, and below it signatures by named keys.

    <text, whose last line ends in a newline>
    <empty line>
    — <key name> <base64 of key id and signature>

- A key has a name and a kind: `LOG` signs the text itself, `WITNESS` what cosignature/v1 says. Its id is the first four
  bytes of SHA-256 over name, newline, kind and public key; the written form is `<name>+<id>+<base64 of kind and key>`.
- Parsing is strict: what is no note in its one byte form is refused. Signatures of keys that nobody asked about are
  passed over, as the standard demands; of a key that counts there is at most one.
- What makes a key count is the caller's affair.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import sha256
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.errors import CheckpointInvalid

NOTE_MAX_BYTES = 16_384
"""A checkpoint is three short lines; this leaves room for the signatures of a hundred witnesses."""

SIGNATURES_MAX = 100

_NAME = r"[^\s+]{1,200}"
_SIGNATURE_LINE = re.compile(rf"— ({_NAME}) ([A-Za-z0-9+/=]+)\n")


class KeyKind(IntEnum):
    """What a key's signatures say; the byte that the standards give it."""

    LOG = 1
    WITNESS = 4


@dataclass(frozen=True)
class NoteKey:
    """A public key with the name that it signs notes under."""

    name: str
    public: bytes
    kind: KeyKind = KeyKind.LOG

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name) or len(self.public) != 32:
            raise CheckpointInvalid(
                f"{self.name[:80]!r} is not the name of a 32-byte key.", hint="A name has no spaces and no plus sign."
            )

    def __str__(self) -> str:
        return f"{self.name}+{self.id.hex()}+{_encode(bytes([self.kind]) + self.public)}"

    @cached_property
    def id(self) -> bytes:
        return sha256(f"{self.name}\n".encode() + bytes([self.kind]) + self.public).digest()[:4]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key of its written form."""
        name, _, rest = text.partition("+")
        raw = decode(rest.partition("+")[2])
        if len(raw) == 33 and raw[0] in list(KeyKind):
            key = cls(name, raw[1:], KeyKind(raw[0]))
            if str(key) == text:
                return key
        raise CheckpointInvalid(f"{text[:100]!r} is not a key for notes.", hint="It looks like name+0a1b2c3d+Base64=.")

    def verify(self, signature: bytes, signed: bytes) -> None:
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, signed)
        except InvalidSignature:
            raise CheckpointInvalid(f"A signature in the name of {self.name[:80]} is not that key's.") from None


@dataclass(frozen=True)
class Signature:
    """A line below a note, not yet checked; `value` is what follows the key's id."""

    name: str
    key_id: bytes
    value: bytes

    def __str__(self) -> str:
        return f"— {self.name} {_encode(self.key_id + self.value)}\n"


@dataclass(frozen=True)
class Note:
    """A text and what stands below it; nothing of it is checked yet."""

    text: str
    signatures: tuple[Signature, ...]

    def to_bytes(self) -> bytes:
        return f"{self.text}\n{''.join(map(str, self.signatures))}".encode()

    def signature_by(self, key: NoteKey) -> Signature | None:
        """The signature line of a key, if there is one."""
        found = [line for line in self.signatures if (line.name, line.key_id) == (key.name, key.id)]
        if len(found) > 1:
            raise CheckpointInvalid(f"{key.name[:80]} has signed the same note twice.")
        return found[0] if found else None

    def signed_by(self, key: NoteKey, value: bytes) -> "Note":
        """The note with one signature more."""
        return Note(self.text, (*self.signatures, Signature(key.name, key.id, value)))


def parse(data: bytes) -> Note:
    """The note of its bytes."""
    if len(data) > NOTE_MAX_BYTES:
        raise CheckpointInvalid(f"The note has {len(data)} bytes; at most {NOTE_MAX_BYTES} are read.")
    try:
        written = data.decode()
    except UnicodeDecodeError:
        raise CheckpointInvalid("The note is not UTF-8.") from None
    text, blank, below = written.rpartition("\n\n")
    lines = below.splitlines(keepends=True)
    if not blank or not 0 < len(lines) <= SIGNATURES_MAX:
        raise CheckpointInvalid(f"A note is a text, an empty line, and 1 to {SIGNATURES_MAX} signatures.")
    note = Note(text + "\n", _signatures(lines))
    if note.to_bytes() != data or any(ord(character) < 32 and character != "\n" for character in written):
        raise CheckpointInvalid("The note is not in its one byte form.")
    return note


def _signatures(lines: Sequence[str]) -> tuple[Signature, ...]:
    found = []
    for line in lines:
        match = _SIGNATURE_LINE.fullmatch(line)
        raw = decode(match[2]) if match else b""
        if not match or len(raw) < 5:
            raise CheckpointInvalid(f"{line[:60]!r} is not a signature line.")
        found.append(Signature(match[1], raw[:4], raw[4:]))
    return tuple(found)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    """The bytes of base64 in its one form; nothing for anything else."""
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return b""
    return data if _encode(data) == text else b""
