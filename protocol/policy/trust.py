"""TUF's client workflow, from a pinned fingerprint to the newest policy manifest, as a generator without I/O.

`refresh` is a generator: it yields the next document to fetch, is sent the bytes, and returns what can be trusted.
The caller fetches and persists; every decision is made here, in this order:

1. the root is the pinned one, or was reached from it by signed rotations, one version at a time;
2. the timestamp is signed, not older than the stored one, and not expired;
3. the snapshot has the hash the timestamp names, and no role in it went backwards;
4. the targets have the version and hash the snapshot names;
5. the newest policy is not older than the one already seen, as long as the keys that named that one still count;
6. its manifest has the length and hash the targets name, and belongs to this round.

- Persist `Refreshed.documents` only after `refresh` returned; a failed refresh changes nothing.
- Documents signed by revoked keys are ignored: they set no floor. So an attacker who stole a key and signed a version
  with a very high number has gained nothing once the key is replaced.
- An expired timestamp is a security error: somebody may be withholding newer versions. So is a missing answer: a proof
  is valid until `Refreshed.proved_until`, whatever the reason that no newer one arrived.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from tuf.api.exceptions import (
    BadVersionNumberError,
    EqualVersionNumberError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
)
from tuf.api.metadata import Metadata, Root, Targets
from tuf.ngclient._internal.trusted_metadata_set import TrustedMetadataSet
from tuf.ngclient.config import EnvelopeType

from protocol import limits
from protocol.errors import MetadataExpired, RolledBack, UntrustedMetadata
from protocol.policy.description import find_description
from protocol.policy.manifest import PolicyManifest, open_manifest, target_path, version_of
from protocol.policy.root_document import RESUMED_FIELD, Documents, ledger_key_of, pin


@dataclass(frozen=True)
class WantedDocument:
    """A document to fetch; an `optional` one may not exist: then the caller sends None."""

    name: str
    max_bytes: int
    optional: bool = False


@dataclass(frozen=True)
class Refreshed:
    """The result of a completed refresh; no manifest means that nothing was published yet."""

    documents: Documents
    manifest: PolicyManifest | None
    proved_until: datetime
    """The time when the timestamp expires: without a newer one, nothing is proved after it."""


Conversation = Generator[WantedDocument, bytes | None, Refreshed]


def wanted_description(documents: Documents) -> WantedDocument | None:
    """Return the name and size of the round's description, if the targets of a completed refresh list one."""
    if documents.targets is None:
        return None
    with _named():
        targets = Metadata[Targets].from_bytes(documents.targets).signed.targets
    path = find_description(targets)
    return None if path is None else WantedDocument(path, min(targets[path].length, limits.DESCRIPTION_MAX_BYTES))


def ledger_roots(roots: Sequence[bytes], round_id: str) -> list[tuple[bytes, object]]:
    """Return the ledger's key, and a gap or None, from each document of a round's whole chain of roots."""
    pin(roots[0], round_id)
    with _named():
        trusted = TrustedMetadataSet(roots[0], EnvelopeType.METADATA)
        fields = [_ledger_field(trusted.root)]
        for data in roots[1:]:
            fields.append(_ledger_field(trusted.update_root(data)))
    return fields


def ledger_keys(roots: Sequence[bytes], round_id: str) -> list[bytes]:
    """Return the ledger's keys in a round's whole chain of roots, the oldest first."""
    return list(dict.fromkeys(key for key, _ in ledger_roots(roots, round_id)))


def _ledger_field(root: Root) -> tuple[bytes, object]:
    fields = root.unrecognized_fields
    return ledger_key_of(fields), fields.get(RESUMED_FIELD)


def refresh(stored: Documents, now: datetime) -> Conversation:
    """Update the stored documents; see the module's numbered steps."""
    with _named():
        trusted = TrustedMetadataSet(stored.root, EnvelopeType.METADATA)
    trusted.reference_time = now
    root = yield from _follow_roots(trusted, stored.root)
    timestamp = yield from _newest_timestamp(trusted, stored.timestamp)
    snapshot = yield from _snapshot(trusted, stored.snapshot)
    targets = yield from _targets(trusted, stored.targets)
    version = _newest_policy(trusted, stored.policy_version if _vouched(trusted, stored.targets) else 0)
    data: bytes | None = None
    manifest: PolicyManifest | None = None
    if version:
        data = yield from _manifest_bytes(trusted, target_path(version), stored.manifest)
        manifest = open_manifest(data, round_id=stored.round_id, version=version)
    documents = Documents(stored.round_id, root, timestamp, snapshot, targets, data, version)
    return Refreshed(documents, manifest, trusted.timestamp.expires)


def _follow_roots(trusted: TrustedMetadataSet, root: bytes) -> Generator[WantedDocument, bytes | None, bytes]:
    """Step 1: follow the chain of signed root rotations to its end."""
    for _ in range(limits.ROOT_ROTATIONS_MAX):
        name = f"{trusted.root.version + 1}.root.json"
        data = yield WantedDocument(name, limits.METADATA_MAX_BYTES, optional=True)
        if data is None:
            break
        with _named():
            trusted.update_root(data)
        root = data
    return root


def _newest_timestamp(
    trusted: TrustedMetadataSet, stored: bytes | None
) -> Generator[WantedDocument, bytes | None, bytes]:
    """Step 2: the stored timestamp sets the floor, even if expired; the fetched one must be valid and not expired."""
    if stored is not None:
        _load_as_floor(trusted.update_timestamp, stored)
    data = yield WantedDocument("timestamp.json", limits.METADATA_MAX_BYTES)
    assert data is not None
    try:
        with _named():
            trusted.update_timestamp(data)
    except _Unchanged:
        assert stored is not None
        if trusted.timestamp.is_expired(trusted.reference_time):
            raise MetadataExpired(
                f"The coordinator's timestamp expired at {trusted.timestamp.expires:%Y-%m-%d %H:%M:%S} UTC.",
                hint=FROZEN,
            ) from None
        return stored
    return data


def _snapshot(trusted: TrustedMetadataSet, stored: bytes | None) -> Generator[WantedDocument, bytes | None, bytes]:
    """Step 3: keep the stored snapshot if the timestamp still names it, else fetch the named one."""
    wanted = trusted.timestamp.snapshot_meta.version
    if stored is not None:
        _load_as_floor(lambda data: trusted.update_snapshot(data, trusted=True), stored)
        if "snapshot" in trusted and trusted.snapshot.version == wanted:
            return stored
    data = yield WantedDocument(f"{wanted}.snapshot.json", limits.METADATA_MAX_BYTES)
    assert data is not None
    with _named():
        trusted.update_snapshot(data)
    return data


def _targets(trusted: TrustedMetadataSet, stored: bytes | None) -> Generator[WantedDocument, bytes | None, bytes]:
    """Step 4: the same for the targets."""
    if stored is not None:
        _load_as_floor(trusted.update_targets, stored)
        if "targets" in trusted:
            return stored
    data = yield WantedDocument(
        f"{trusted.snapshot.meta['targets.json'].version}.targets.json", limits.METADATA_MAX_BYTES
    )
    assert data is not None
    with _named():
        trusted.update_targets(data)
    return data


def _newest_policy(trusted: TrustedMetadataSet, seen: int) -> int:
    """Step 5: return the highest policy version among the targets; 0 before the first."""
    newest = max((version_of(path) or 0 for path in trusted.targets.targets), default=0)
    if newest < seen:
        raise RolledBack(f"The newest policy offered is version {newest}, but version {seen} was already published.")
    return newest


def _vouched(trusted: TrustedMetadataSet, targets: bytes | None) -> bool:
    """Return True if the keys that signed the stored targets are still valid; targets of revoked keys set no floor."""
    with suppress(RepositoryError):
        document = Metadata[Targets].from_bytes(targets or b"")
        trusted.root.verify_delegate("targets", document.signed_bytes, document.signatures)
        return True
    return False


def _manifest_bytes(
    trusted: TrustedMetadataSet, path: str, stored: bytes | None
) -> Generator[WantedDocument, bytes | None, bytes]:
    """Step 6: return the manifest's bytes, from the store if they are the same."""
    entry = trusted.targets.targets[path]
    with suppress(LengthOrHashMismatchError):
        entry.verify_length_and_hashes(stored or b"")
        return stored or b""
    data = yield WantedDocument(path, min(entry.length, limits.MANIFEST_MAX_BYTES))
    assert data is not None
    with _named():
        entry.verify_length_and_hashes(data)
    return data


class _Unchanged(Exception):
    """The fetched timestamp is the one already stored."""


FROZEN = "Newer versions may be withheld, or a clock is wrong. Check this machine's clock, then ask the operator."


def _load_as_floor(load: Callable[[bytes], object], data: bytes) -> None:
    """Load a stored document for rollback protection; it may be expired, replaced, or signed by a rotated key."""
    with suppress(RepositoryError):
        load(data)


@contextmanager
def _named() -> Iterator[None]:
    """Convert TUF's errors to this package's errors."""
    try:
        yield
    except EqualVersionNumberError:
        raise _Unchanged from None
    except BadVersionNumberError as error:
        raise RolledBack(f"Older trust metadata was served: {error}.") from error
    except ExpiredMetadataError as error:
        raise MetadataExpired(f"The coordinator's trust metadata is out of date: {error}.", hint=FROZEN) from error
    except RepositoryError as error:
        raise UntrustedMetadata(f"The coordinator's trust metadata is not valid: {error}.") from error
