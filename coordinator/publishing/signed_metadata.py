"""The round's TUF repository: keys, signed metadata, and the order in which documents become visible.

- Four roles, each with one key at first; `rotation` changes the keys and the number that must sign. The root also lists
  the ledger's key, which signs checkpoints only.
- Root keys sign only root documents; move `keys/root.pem` to offline storage after `init`.
- A publication writes targets, then snapshot, then timestamp, each durably. After a crash at any point, the timestamp
  that nodes read refers to a complete, older set, and the next publication continues from that one.
- The timestamp is short-lived and signed again while the coordinator runs; a node stops working when it expires.

The private keys are files in a folder (`RoleKeys`), recognised by their content and not by their names.

- The root document lists the keys of a role and the number that must sign; a file counts if its key is listed there.
- So files may be moved away and back, be in several folders, and be beside old and future keys.
- A key is read when it signs, and not kept in memory.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp, VerificationResult

from coordinator.base.files import write_durably
from protocol.errors import ConfigInvalid
from protocol.policy import root_document
from protocol.policy.description import RoundDescription, description_path, find_description
from protocol.policy.manifest import target_path, version_of
from protocol.text.money import CREDITS, Unit

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


LONG_LIFETIME = timedelta(days=365)


class SignedMetadata:
    """The metadata folder of one round and the keys that sign it."""

    def __init__(self, keys: Path, folder: Path, timestamp_lifetime_s: float) -> None:
        self._keys = RoleKeys(keys)
        self._folder = folder
        self._timestamp_lifetime = timedelta(seconds=timestamp_lifetime_s)

    @classmethod
    def create(
        cls, keys: Path, folder: Path, timestamp_lifetime_s: float, now: datetime, *, unit: Unit = CREDITS
    ) -> "SignedMetadata":
        """Create the keys and the first, empty set of documents; the first root names the round's unit."""
        self = cls(keys, folder, timestamp_lifetime_s)
        root = Root(version=1, expires=whole(now + LONG_LIFETIME), consistent_snapshot=True)
        for role in ROLES:
            root.add_key(self._keys.make(role, name=role).public_key, role)
        name_ledger_key(root, self._keys.make(LEDGER, name=LEDGER))
        root.unrecognized_fields[root_document.UNIT_FIELD] = unit.to_json()
        document = Metadata(root)
        for signer in self._keys.signers(root, "root"):
            document.sign(signer)
        write_durably(folder / "1.root.json", document.to_bytes(), public=True)
        self._publish(Targets(), Snapshot(), Timestamp(), now)
        return self

    @property
    def round_id(self) -> str:
        """Return the fingerprint that join strings contain."""
        first = self.read("1.root.json")
        if first is None:
            raise ConfigInvalid(f"{self._folder}/1.root.json is missing.", hint="Restore it from a backup.")
        return root_document.fingerprint(first)

    def root(self) -> Root:
        """Return the newest root on the disk."""
        newest = max(int(path.name.partition(".")[0]) for path in self._folder.glob("[0-9]*.root.json"))
        return Metadata[Root].from_file(str(self._folder / f"{newest}.root.json")).signed

    def roots(self) -> tuple[bytes, ...]:
        """Return every root, the first one first."""
        numbers = range(1, self.root().version + 1)
        return tuple((self._folder / f"{number}.root.json").read_bytes() for number in numbers)

    def ledger_public(self) -> bytes:
        """Return the public key of the ledger."""
        return root_document.ledger_key(self.roots()[-1])

    def sign_for_ledger(self, text: bytes) -> bytes:
        """Return the ledger's signature of a checkpoint's text."""
        public = self.ledger_public().hex()
        for signer in self._keys.all().values():
            if signer.public_key.keyval["public"] == public:
                return bytes.fromhex(signer.sign(text).signature)
        raise ConfigInvalid("The ledger's key is missing.", hint=f"Restore ledger.pem in {self._keys.folder}.")

    def install_root(self, document: Metadata[Root], now: datetime) -> None:
        """Publish a root whose signatures were checked, and sign documents again that its keys have not signed."""
        write_durably(self._folder / f"{document.signed.version}.root.json", document.to_bytes(), public=True)
        self.mend(now)

    def mend(self, now: datetime) -> None:
        """Sign documents again that the newest root's keys have not signed, as a crash in `install_root` may leave."""
        root, (timestamp, snapshot, targets) = self.root(), self._documents()
        if not (_vouched(root, "targets", targets) and _vouched(root, "snapshot", snapshot)):
            for part in (targets.signed, snapshot.signed, timestamp.signed):
                part.version += 1
            self._publish(targets.signed, snapshot.signed, timestamp.signed, now)
        elif not _vouched(root, "timestamp", timestamp):
            self.renew_timestamp(now)

    def targets(self) -> tuple[str, ...]:
        """Return the names of the manifests and other files that nodes may trust now."""
        return tuple(self._documents()[2].signed.targets)

    def signers(self) -> dict[str, VerificationResult]:
        """Return by role the keys that signed the current documents, and the threshold."""
        root = self.root()
        results = {"root": _vouched(root, "root", Metadata[Any].from_bytes(self.roots()[-1]))}
        for document in self._documents():
            role = str(document.signed.type)
            results[role] = _vouched(root, role, document)
        return results

    def leap(self, numbers: int, now: datetime) -> None:
        """Sign all documents under version numbers raised by `numbers`, above all that were used after a backup."""
        timestamp, snapshot, targets = self._current()
        for part in (timestamp, snapshot, targets):
            part.version += numbers
        self._publish(targets, snapshot, timestamp, now)

    def add_manifest(self, version: int, manifest: bytes, keep: int, now: datetime) -> None:
        """Make a manifest the newest target; the oldest ones beyond `keep` are removed from the list."""
        write_durably(self._folder / target_path(version), manifest, public=True)
        timestamp, snapshot, targets = self._current()
        path = target_path(version)
        targets.targets[path] = TargetFile.from_data(path, manifest, ["sha256"])
        known = sorted(path for path in targets.targets if version_of(path) is not None)
        for old in known[:-keep]:
            del targets.targets[old]
        targets.version += 1
        snapshot.version += 1
        timestamp.version += 1
        self._publish(targets, snapshot, timestamp, now)

    def set_description(self, description: RoundDescription, now: datetime) -> None:
        """Make `description` the round's only signed description; an empty one removes it. Do nothing if it is."""
        timestamp, snapshot, targets = self._current()
        data = description.to_bytes()
        path = None if description.is_empty else description_path(data)
        if path == (old := find_description(targets.targets)):
            return
        if old is not None:
            del targets.targets[old]
        if path is not None:
            write_durably(self._folder / path, data, public=True)
            targets.targets[path] = TargetFile.from_data(path, data, ["sha256"])
        for part in (targets, snapshot, timestamp):
            part.version += 1
        self._publish(targets, snapshot, timestamp, now)

    def renew_timestamp(self, now: datetime) -> None:
        """Sign a fresh timestamp over the same snapshot."""
        timestamp, _, _ = self._current()
        timestamp.version += 1
        self._sign_timestamp(timestamp, timestamp.snapshot_meta, now)

    def read(self, name: str) -> bytes | None:
        """Return a document by its public name, or None.

        A standard TUF client requests a target as `<SHA-256>.<name>`: the root declares consistent snapshots.
        """
        digest, _, rest = name.partition(".")
        if len(digest) == 64 and rest:
            data = self._read_plain(rest)
            return data if data is not None and hashlib.sha256(data).hexdigest() == digest else None
        return self._read_plain(name)

    def _read_plain(self, name: str) -> bytes | None:
        path = self._folder / name
        plain = path.name == name and not name.startswith(".") and len(name) < 100
        return path.read_bytes() if plain and path.is_file() else None

    def _publish(self, targets: Targets, snapshot: Snapshot, timestamp: Timestamp, now: datetime) -> None:
        targets.expires = whole(now + LONG_LIFETIME)
        data = self._save(f"{targets.version}.targets.json", Metadata(targets), "targets")
        snapshot.expires = whole(now + LONG_LIFETIME)
        snapshot.meta = {"targets.json": MetaFile.from_data(targets.version, data, ["sha256"])}
        data = self._save(f"{snapshot.version}.snapshot.json", Metadata(snapshot), "snapshot")
        self._sign_timestamp(timestamp, MetaFile.from_data(snapshot.version, data, ["sha256"]), now)

    def _sign_timestamp(self, timestamp: Timestamp, snapshot: MetaFile, now: datetime) -> None:
        timestamp.expires = whole(now + self._timestamp_lifetime)
        timestamp.snapshot_meta = snapshot
        self._save("timestamp.json", Metadata(timestamp), "timestamp")

    def _current(self) -> tuple[Timestamp, Snapshot, Targets]:
        """Return the signed parts of the current documents."""
        timestamp, snapshot, targets = self._documents()
        return timestamp.signed, snapshot.signed, targets.signed

    def _documents(self) -> tuple[Metadata[Timestamp], Metadata[Snapshot], Metadata[Targets]]:
        """Return the current documents: those that the timestamp refers to, not the highest numbers on disk."""
        timestamp = Metadata[Timestamp].from_file(str(self._folder / "timestamp.json"))
        snapshot_name = f"{timestamp.signed.snapshot_meta.version}.snapshot.json"
        snapshot = Metadata[Snapshot].from_file(str(self._folder / snapshot_name))
        targets_name = f"{snapshot.signed.meta['targets.json'].version}.targets.json"
        return timestamp, snapshot, Metadata[Targets].from_file(str(self._folder / targets_name))

    def _save(self, name: str, document: Metadata[Any], role: str) -> bytes:
        for signer in self._keys.signers(self.root(), role):
            document.sign(signer, append=True)
        data = document.to_bytes()
        write_durably(self._folder / name, data, public=True)
        return data


def _vouched(root: Root, role: str, document: Metadata[Any]) -> VerificationResult:
    """Return the keys of a role that signed a document; the result is true if they are enough."""
    return root.get_verification_result(role, document.signed_bytes, document.signatures)


def name_ledger_key(root: Root, signer: CryptoSigner) -> None:
    """Make `signer`'s key the ledger's key in the root, in place of any other."""
    key = signer.public_key
    root.unrecognized_fields[root_document.LEDGER_FIELD] = {"keyid": key.keyid, **key.to_dict()}


def utc_now() -> datetime:
    """Return the current time of the trust metadata."""
    return datetime.now(UTC)


def whole(moment: datetime) -> datetime:
    """Return the time without microseconds: TUF writes whole seconds."""
    return moment.replace(microsecond=0)
