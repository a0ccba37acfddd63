"""The private keys of the four trust roles: files in a folder, recognised by their content and not by their names.

- The root document lists the keys of a role and the number that must sign; a file counts if its key is listed there.
- So files may be moved away and back, be in several folders, and be beside old and future keys.
- A key is read when it signs, and not kept in memory.
"""

from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Root

from coordinator.base.files import write_durably
from protocol.errors import ConfigInvalid

ROLES = ("root", "targets", "snapshot", "timestamp")

LEDGER = "ledger"
"""The ledger's key: not a TUF role, but stored and replaced like the keys of the roles."""


class RoleKeys:
    """The key files of a round; new ones are written into the first folder."""

    def __init__(self, folder: Path, others: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._folders = (folder, *others)

    def make(self, role: str, *, name: str = "") -> CryptoSigner:
        """Return a new key for a role, which is durable on the disk before it is used."""
        signer = CryptoSigner.generate_ed25519()
        name = name or f"{role}-{signer.public_key.keyid[:8]}"
        write_durably(self.folder / f"{name}.pem", signer.private_bytes)
        return signer

    def all(self) -> dict[str, CryptoSigner]:
        """Return the signer of every key file, by key id."""
        signers = [_load(path) for folder in self._folders for path in sorted(folder.glob("*.pem"))]
        return {signer.public_key.keyid: signer for signer in signers}

    def present(self, root: Root, role: str) -> list[CryptoSigner]:
        """Return the keys of a role whose files exist."""
        signers = self.all()
        return [signers[keyid] for keyid in root.roles[role].keyids if keyid in signers]

    def signers(self, root: Root, role: str) -> list[CryptoSigner]:
        """Return enough keys of a role to sign for it."""
        signers, needed = self.present(root, role), root.roles[role].threshold
        if len(signers) < needed:
            raise ConfigInvalid(
                f"The {role} key is missing: {len(signers)} of the {needed} keys that must sign were found.",
                hint=f"Restore {role}.pem or {role}-….pem in {self.folder}.",
            )
        return signers

    def delete(self, keyids: set[str]) -> None:
        """Delete the files of keys that are not used any more."""
        for path in self.folder.glob("*.pem"):
            if _load(path).public_key.keyid in keyids:
                path.unlink()


def _load(path: Path) -> CryptoSigner:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigInvalid(f"{path} is not a private key: {error}.", hint="Keep only keys in this folder.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigInvalid(f"{path} is not an Ed25519 key.", hint="Keep only keys in this folder.")
    return CryptoSigner(key)
