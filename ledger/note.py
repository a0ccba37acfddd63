"""Signed notes in the format of C2SP signed-note: a readable text, followed by signatures of named keys.

    <text, whose last line ends in a newline>
    <empty line>
    — <key name> <base64 of key id and signature>

- A key has a name and a kind: `LOG` signs the text itself, `WITNESS` the text of cosignature/v1. Its id is the first
  four bytes of SHA-256 over name, newline, kind and public key; the written form is
  `<name>+<id>+<base64 of kind and key>`.
- Parsing is strict: a note must have its canonical bytes. Signatures of unknown keys are ignored, as the standard
  requires; of a known key there is at most one.
- The caller decides which keys count.
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
"""The size of a note: a checkpoint is three short lines, and the signatures of a hundred witnesses must fit."""

SIGNATURES_MAX = 100

_NAME = r"[^\s+]{1,200}"
_SIGNATURE_LINE = re.compile(rf"— ({_NAME}) ([A-Za-z0-9+/=]+)\n")


class KeyKind(IntEnum):
    """The kinds of keys, by the bytes that the standards define."""

    LOG = 1
    WITNESS = 4


@dataclass(frozen=True)
class NoteKey:
    """A public key with the name with which it signs notes."""

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
        """Return the key of a written form."""
        name, _, rest = text.partition("+")
        raw = decode(rest.partition("+")[2])
        if len(raw) == 33 and raw[0] in list(KeyKind):
            key = cls(name, raw[1:], KeyKind(raw[0]))
            if str(key) == text:
                return key
        raise CheckpointInvalid(
            f"{text[:100]!r} is not the public key of a witness or a log.",
            hint="Such a key looks like name+0a1b2c3d+Base64=; `swarm-node ledger witness` prints its own.",
        )

    def verify(self, signature: bytes, signed: bytes) -> None:
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, signed)
        except InvalidSignature:
            raise CheckpointInvalid(f"A signature of {self.name[:80]} does not match its key.") from None


@dataclass(frozen=True)
class Signature:
    """A signature line of a note, not yet checked; `value` is the part after the key's id."""

    name: str
    key_id: bytes
    value: bytes

    def __str__(self) -> str:
        return f"— {self.name} {_encode(self.key_id + self.value)}\n"


@dataclass(frozen=True)
class Note:
    """A text and its signature lines, not yet checked."""

    text: str
    signatures: tuple[Signature, ...]

    def to_bytes(self) -> bytes:
        return f"{self.text}\n{''.join(map(str, self.signatures))}".encode()

    def signature_by(self, key: NoteKey) -> Signature | None:
        """Return the signature line of a key, or None."""
        lines = [line for line in self.signatures if (line.name, line.key_id) == (key.name, key.id)]
        if len(lines) > 1:
            raise CheckpointInvalid(f"The note has two signatures of {key.name[:80]}.")
        return lines[0] if lines else None

    def signed_by(self, key: NoteKey, value: bytes) -> "Note":
        """Return the note with one more signature."""
        return Note(self.text, (*self.signatures, Signature(key.name, key.id, value)))


def parse(data: bytes) -> Note:
    """Parse the bytes of a note."""
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
        raise CheckpointInvalid("The note is not in its canonical form.")
    return note


def _signatures(lines: Sequence[str]) -> tuple[Signature, ...]:
    signatures = []
    for line in lines:
        match = _SIGNATURE_LINE.fullmatch(line)
        raw = decode(match[2]) if match else b""
        if not match or len(raw) < 5:
            raise CheckpointInvalid(f"{line[:60]!r} is not a signature line.")
        signatures.append(Signature(match[1], raw[:4], raw[4:]))
    return tuple(signatures)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    """Return the bytes of canonical base64; empty for any other text."""
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return b""
    return data if _encode(data) == text else b""
