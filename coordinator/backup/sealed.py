"""The secrets of a round under a passphrase: AES-256-GCM, the key by scrypt.

- Whoever finds a backup has to guess the passphrase, at a sixth of a second and 128 MiB a try.
- They are sealed together with what stands beside them: whoever can change a backup, but does not know the passphrase,
  makes one that does not open.
- A wrong passphrase, a damaged file and a changed backup look the same, and none gives a byte.
"""

import os
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from coordinator.backup.archive import BackupInvalid
from protocol import canonical

HEAD = b"echo-swarm sealed keys 1\n"
SALT_BYTES, NONCE_BYTES = 16, 12
COST = 2**17
SECRETS_MAX_BYTES = 2**24


class Sealer:
    """Seals again and again with one passphrase: the costly part is done once."""

    def __init__(self, passphrase: str) -> None:
        self._salt = os.urandom(SALT_BYTES)
        self._cipher = AESGCM(_key(passphrase, self._salt))

    def seal(self, files: Mapping[str, bytes], beside: bytes) -> bytes:
        """The files, for those who know the passphrase and have the same beside them."""
        nonce = os.urandom(NONCE_BYTES)
        data = canonical.encode([[name, files[name]] for name in sorted(files)])
        return HEAD + self._salt + nonce + self._cipher.encrypt(nonce, data, HEAD + beside)


def seal(files: Mapping[str, bytes], passphrase: str, beside: bytes) -> bytes:
    """The same, once."""
    return Sealer(passphrase).seal(files, beside)


def unseal(data: bytes, passphrase: str, beside: bytes) -> dict[str, bytes]:
    """The files again."""
    body = data.removeprefix(HEAD)
    salt, nonce, rest = body[:SALT_BYTES], body[SALT_BYTES:][:NONCE_BYTES], body[SALT_BYTES + NONCE_BYTES :]
    try:
        if body is data or len(salt + nonce) < SALT_BYTES + NONCE_BYTES:
            raise InvalidTag
        plain = AESGCM(_key(passphrase, salt)).decrypt(nonce, rest, HEAD + beside)
    except InvalidTag:
        raise BackupInvalid(
            "The passphrase does not open the keys of this backup, or somebody has changed it since.",
            hint="Try again; if you are sure of the passphrase, trust nothing in this backup and take another one.",
        ) from None
    found = canonical.decode(plain, max_bytes=SECRETS_MAX_BYTES)
    assert isinstance(found, list)
    return {str(name): bytes(content) for name, content in found}


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=8, p=1).derive(passphrase.encode())
