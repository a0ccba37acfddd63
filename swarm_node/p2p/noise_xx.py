"""The Noise handshake `Noise_XX_25519_ChaChaPoly_SHA256`: bytes in and bytes out, no I/O.

    1.  initiator → responder   e                   nothing is encrypted yet
    2.  responder → initiator   e, ee, s, es        the responder's static key, encrypted
    3.  initiator → responder   s, se               the initiator's static key, encrypted

- `TABLE` is the whole state machine: role × messages passed × event. An unlisted pair is an error of the caller.
- A message that is too short, too long, damaged, replayed or forged ends the handshake (`NoiseBroken`). So does a point
  of low order, since the shared secret would then be public.
- After the first error the handshake has ended: each later call raises the same error.
- A message has at most `limits.HANDSHAKE_MESSAGE_MAX_BYTES`; no more is ever held.
- Primitives come from `cryptography` and the standard library.
"""

import hashlib
import hmac
from collections.abc import Mapping
from enum import Enum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protocol import limits
from protocol.errors import PeerFault

NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
"""The protocol name; with exactly 32 bytes it is also the first hash."""

KEY_BYTES, TAG_BYTES = 32, 16


class NoiseBroken(PeerFault):
    """The received bytes are not the peer's next message; the connection can no longer be trusted."""

    code = "noise_broken"


class Role(Enum):
    """Side of a handshake: the initiator sends the first message."""

    INITIATOR = "initiator"
    RESPONDER = "responder"


class HandshakeStep(Enum):
    """Direction of the next message."""

    WRITE = "write"
    READ = "read"


_FIRST, _SECOND, _THIRD = ("e",), ("e", "ee", "s", "es"), ("s", "se")

TABLE: Mapping[tuple[Role, int, HandshakeStep], tuple[str, ...]] = {
    (Role.INITIATOR, 0, HandshakeStep.WRITE): _FIRST,
    (Role.RESPONDER, 0, HandshakeStep.READ): _FIRST,
    (Role.INITIATOR, 1, HandshakeStep.READ): _SECOND,
    (Role.RESPONDER, 1, HandshakeStep.WRITE): _SECOND,
    (Role.INITIATOR, 2, HandshakeStep.WRITE): _THIRD,
    (Role.RESPONDER, 2, HandshakeStep.READ): _THIRD,
}
"""The tokens of the message that is due; each entry advances the handshake by one message, and there are three."""

MESSAGES = 3


class _Symmetric:
    """Chaining key, transcript hash and cipher between two messages."""

    def __init__(self, prologue: bytes) -> None:
        self.hash = self._chain = NAME
        self._cipher: ChaCha20Poly1305 | None = None
        self._nonce = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self._chain, key = self._derive(secret)
        self._cipher, self._nonce = ChaCha20Poly1305(key), 0

    def seal(self, plaintext: bytes) -> bytes:
        sealed = plaintext
        if self._cipher is not None:
            sealed = self._cipher.encrypt(self._next_nonce(), plaintext, self.hash)
        self.mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        plaintext = sealed
        if self._cipher is not None:
            try:
                plaintext = self._cipher.decrypt(self._next_nonce(), sealed, self.hash)
            except InvalidTag:
                raise NoiseBroken("A handshake message does not decrypt: it was damaged or forged.") from None
        self.mix_hash(sealed)
        return plaintext

    @property
    def tag_bytes(self) -> int:
        """Bytes that encryption now adds to a plaintext."""
        return 0 if self._cipher is None else TAG_BYTES

    def split(self) -> tuple[bytes, bytes]:
        return self._derive(b"")

    def _derive(self, secret: bytes) -> tuple[bytes, bytes]:
        """Return the two outputs of HKDF."""
        master = hmac.digest(self._chain, secret, "sha256")
        first = hmac.digest(master, b"\1", "sha256")
        return first, hmac.digest(master, first + b"\2", "sha256")

    def _next_nonce(self) -> bytes:
        nonce, self._nonce = self._nonce, self._nonce + 1
        return b"\0\0\0\0" + nonce.to_bytes(8, "little")


class XxHandshake:
    """Handshake of one side: `write` and `read` in turns, then `keys`."""

    def __init__(
        self, role: Role, static: X25519PrivateKey, *, ephemeral: X25519PrivateKey | None = None, prologue: bytes = b""
    ) -> None:
        self._role, self._passed = role, 0
        self._static, self._ephemeral = static, ephemeral or X25519PrivateKey.generate()
        self._remote_ephemeral: X25519PublicKey | None = None
        self._remote_static: X25519PublicKey | None = None
        self._symmetric = _Symmetric(prologue)
        self._failure: NoiseBroken | None = None

    @property
    def is_finished(self) -> bool:
        """True once all messages have passed and none was refused."""
        return self._passed == MESSAGES and self._failure is None

    @property
    def remote_static(self) -> bytes:
        """The static key that the peer has proved to hold."""
        assert self._remote_static is not None, "the message with the static key has not passed"
        return self._remote_static.public_bytes_raw()

    @property
    def hash(self) -> bytes:
        """The transcript hash: the same on both sides, and different on every other connection."""
        return self._symmetric.hash

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys for sending and for receiving."""
        assert self.is_finished, "the handshake is not finished"
        of_initiator, of_responder = self._symmetric.split()
        if self._role is Role.INITIATOR:
            return of_initiator, of_responder
        return of_responder, of_initiator

    def write(self, payload: bytes = b"") -> bytes:
        """Return the next message, with `payload`."""
        message = b""
        tokens = self._due(HandshakeStep.WRITE)
        try:
            for token in tokens:
                if token == "e":
                    public = self._ephemeral.public_key().public_bytes_raw()
                    self._symmetric.mix_hash(public)
                    message += public
                elif token == "s":
                    message += self._symmetric.seal(self._static.public_key().public_bytes_raw())
                else:
                    self._mix_secret(token)
            message += self._symmetric.seal(payload)
        except NoiseBroken as error:
            self._failure = error
            raise
        assert len(message) <= limits.HANDSHAKE_MESSAGE_MAX_BYTES
        self._passed += 1
        return message

    def read(self, message: bytes) -> bytes:
        """Return the payload of the message that is due."""
        tokens = self._due(HandshakeStep.READ)
        try:
            if len(message) > limits.HANDSHAKE_MESSAGE_MAX_BYTES:
                raise NoiseBroken(f"A handshake message has {len(message)} bytes, which is too long.")
            for token in tokens:
                if token == "e":
                    key, message = _split(message, KEY_BYTES)
                    self._remote_ephemeral = X25519PublicKey.from_public_bytes(key)
                    self._symmetric.mix_hash(key)
                elif token == "s":
                    sealed, message = _split(message, KEY_BYTES + self._symmetric.tag_bytes)
                    self._remote_static = X25519PublicKey.from_public_bytes(self._symmetric.open(sealed))
                else:
                    self._mix_secret(token)
            payload = self._symmetric.open(message)
        except NoiseBroken as error:
            self._failure = error
            raise
        self._passed += 1
        return payload

    def _due(self, event: HandshakeStep) -> tuple[str, ...]:
        if self._failure is not None:
            raise self._failure
        tokens = TABLE.get((self._role, self._passed, event))
        if tokens is None:
            raise RuntimeError(f"The {self._role.value} must not {event.value} after {self._passed} messages.")
        return tokens

    def _mix_secret(self, token: str) -> None:
        """Mix in a shared secret; in "es" and "se" the first letter is the initiator's key."""
        mine, theirs = token[:1], token[1:]
        if self._role is Role.RESPONDER:
            mine, theirs = theirs, mine
        private = self._ephemeral if mine == "e" else self._static
        public = self._remote_ephemeral if theirs == "e" else self._remote_static
        assert public is not None, "the table reads a key before it is used"
        try:
            secret = private.exchange(public)
        except ValueError:
            raise NoiseBroken("The peer's key is a point of low order, so the shared secret would be public.") from None
        self._symmetric.mix_key(secret)


def _split(message: bytes, size: int) -> tuple[bytes, bytes]:
    if len(message) < size:
        raise NoiseBroken("A handshake message is too short.")
    return message[:size], message[size:]
