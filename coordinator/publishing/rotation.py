"""New keys for a trust role: a new root document, signed by enough holders of the old root keys, then installed.

1. `prepare` makes the new keys and a root that lists them, and signs it with every root key on this machine.
2. `add_signatures` signs it on other machines with root keys: it needs only the file and the keys.
3. `install` checks the signatures as a node does, publishes the root, and signs again what the old keys had signed.

- A root that replaces root keys is signed by enough of the old and enough of the new ones.
- Before step 3 nodes see no change; after a crash in step 3, the coordinator completes it when it opens the round.
- The files of replaced keys are deleted at the end. A copy of them can sign nothing that nodes accept.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root

from coordinator.publishing.signed_metadata import (
    LEDGER,
    LONG_LIFETIME,
    RoleKeys,
    SignedMetadata,
    name_ledger_key,
    whole,
)
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.policy import root_document

PENDING = "pending.root.json"
"""The file of a prepared root that lacks signatures, in the round's folder."""


def prepare(metadata: SignedMetadata, keys: RoleKeys, role: str, count: int, threshold: int, now: datetime) -> bytes:
    """(1) Return the next root, not yet published, with new keys for a role, signed with the keys on this machine."""
    if not 1 <= threshold <= count:
        raise ConfigInvalid(f"{threshold} of {count} keys cannot sign.", hint="Choose 1 <= --threshold <= --keys.")
    root = _present(metadata)
    if role == LEDGER:
        if count != 1:
            raise ConfigInvalid("The ledger has one key.", hint="Omit --keys and --threshold.")
        name_ledger_key(root, keys.make(LEDGER))
    else:
        for keyid in list(root.roles[role].keyids):
            root.revoke_key(keyid, role)
        for _ in range(count):
            root.add_key(keys.make(role).public_key, role)
        root.roles[role].threshold = threshold
    return _next(metadata, root, keys, now)


def prepare_resumption(metadata: SignedMetadata, keys: RoleKeys, gap: Mapping[str, int | str], now: datetime) -> bytes:
    """(1) Return the next root, which states that the log was resumed after a gap; a new ledger key signs the rest."""
    root = _present(metadata)
    name_ledger_key(root, keys.make(LEDGER))
    root.unrecognized_fields[root_document.RESUMED_FIELD] = dict(gap)
    return _next(metadata, root, keys, now)


def _present(metadata: SignedMetadata) -> Root:
    """Return a copy of the newest root to change, without its statement of a gap, which is made only once."""
    root = metadata.root()
    if root.version >= limits.ROOT_ROTATIONS_MAX:
        raise ConfigInvalid(
            f"Root {root.version} is the last one that clients accept: keys cannot be replaced any more.",
            hint="Start a new round from this round's policy.",
        )
    root.unrecognized_fields.pop(root_document.RESUMED_FIELD, None)
    return root


def _next(metadata: SignedMetadata, root: Root, keys: RoleKeys, now: datetime) -> bytes:
    """Return the changed root under the next number, signed with the keys on this machine."""
    root.version += 1
    root.expires = whole(now + LONG_LIFETIME)
    document = Metadata(root)
    for signer in [*keys.present(metadata.root(), "root"), *keys.present(root, "root")]:
        document.sign(signer, append=True)
    return document.to_bytes()


def add_signatures(data: bytes, folder: Path) -> tuple[bytes, int]:
    """(2) Return the root with the signatures of all keys in a folder, and the number of these keys."""
    document = _parse(data)
    signers = RoleKeys(folder).all().values()
    for signer in signers:
        document.sign(signer, append=True)
    return document.to_bytes(), len(signers)


def missing_signatures(metadata: SignedMetadata, data: bytes) -> int:
    """Return the number of root signatures that a prepared root still needs."""
    old, document = metadata.root(), _parse(data)
    if document.signed.version != old.version + 1:
        raise ConfigInvalid(
            f"The prepared root has version {document.signed.version}, but the next version is {old.version + 1}.",
            hint="Delete it, and rotate again.",
        )
    result = document.signed.get_root_verification_result(old, document.signed_bytes, document.signatures)
    return result.first.missing if result.first == result.second else result.first.missing + result.second.missing


def install(metadata: SignedMetadata, keys: RoleKeys, data: bytes, now: datetime) -> None:
    """(3) Publish a prepared root, and sign again the documents that need it."""
    if missing := missing_signatures(metadata, data):
        raise ConfigInvalid(
            f"The prepared root lacks {missing} signatures.", hint="Add them with `swarm-coordinator keys sign`."
        )
    old, document = metadata.root(), _parse(data)
    listed = {*old.roles["root"].keyids, *document.signed.roles["root"].keyids}
    document.signatures = {keyid: document.signatures[keyid] for keyid in document.signatures if keyid in listed}
    for role in ("targets", "snapshot", "timestamp"):
        keys.signers(document.signed, role)  # otherwise nodes would get a root whose documents cannot be signed
    metadata.install_root(document, now)
    used = _keyids(document.signed)
    keys.delete(_keyids(old) - used)


def _keyids(root: Root) -> set[str]:
    """Return the key ids of all roles and of the ledger."""
    ledger: Any = root.unrecognized_fields.get(root_document.LEDGER_FIELD, {})
    return {keyid for role in root.roles.values() for keyid in role.keyids} | {ledger.get("keyid", "")}


def _parse(data: bytes) -> Metadata[Root]:
    try:
        return Metadata[Root].from_bytes(data)
    except RepositoryError as error:
        raise ConfigInvalid(f"The file is not a prepared root: {error}.", hint="Copy the file again.") from error
