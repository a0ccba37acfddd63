"""The private keys of the four trust roles: files in a folder, told apart by what they are and not by their names.

- Which keys a role has, and how many must sign, is what the root document says; a file counts if it is listed there.
- So files may be moved away and put back, spread over several folders, and lie beside keys of the past and the future.
- A key is read when it signs, and not kept.
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
"""The ledger's key: no role of TUF's, but kept and replaced like theirs."""


class RoleKeys:
    """The key files of a round; new ones are written into the first folder."""

    def __init__(self, folder: Path, others: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._folders = (folder, *others)

    def make(self, role: str, *, name: str = "") -> CryptoSigner:
        """A new key for a role, on the disk before anybody relies on it."""
        signer = CryptoSigner.generate_ed25519()
        name = name or f"{role}-{signer.public_key.keyid[:8]}"
        write_durably(self.folder / f"{name}.pem", signer.private_bytes)
        return signer

    def all(self) -> dict[str, CryptoSigner]:
        """Key id → signer, of every key file there is."""
        found = [_load(path) for folder in self._folders for path in sorted(folder.glob("*.pem"))]
        return {signer.public_key.keyid: signer for signer in found}

    def present(self, root: Root, role: str) -> list[CryptoSigner]:
        """The keys of a role, as far as they are here."""
        found = self.all()
        return [found[keyid] for keyid in root.roles[role].keyids if keyid in found]

    def signers(self, root: Root, role: str) -> list[CryptoSigner]:
        """Enough keys of a role to sign for it."""
        found, needed = self.present(root, role), root.roles[role].threshold
        if len(found) < needed:
            raise ConfigInvalid(
                f"The {role} key is missing: {len(found)} of {needed} that must sign are here.",
                hint=f"Put {role}.pem or {role}-….pem back into {self.folder}.",
            )
        return found

    def delete(self, keyids: set[str]) -> None:
        """Remove the files of keys that are of no use any more."""
        for path in self.folder.glob("*.pem"):
            if _load(path).public_key.keyid in keyids:
                path.unlink()


def _load(path: Path) -> CryptoSigner:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigInvalid(f"{path} is no private key: {error}.", hint="Keep nothing else in this folder.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigInvalid(f"{path} is no Ed25519 key.", hint="Keep nothing else in this folder.")
    return CryptoSigner(key)
