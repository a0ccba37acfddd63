"""Reports on the published versions and whether they are kept; read-only, from the round's folder and store."""

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.store.rows import find_row, read_rows
from coordinator.store.tables import versions
from coordinator.transactions import broadcasts
from protocol.errors import NotFound, SwarmError
from protocol.ids import ChunkId
from protocol.policy import adapter, chunks
from protocol.policy.manifest import FileEntry, PolicyManifest, target_path

LOOK = "`swarm-coordinator policy list` shows the versions."


class VersionRow(NamedTuple):
    """A published version as it is stored."""

    version: int
    policy_update: int
    manifest_digest: str
    size_bytes: int
    published_ms: int


def listed(
    connection: sa.Connection, publisher: Publisher, metadata: SignedMetadata, *, last: int
) -> list[dict[str, Any]]:
    """Return the last `last` versions, the newest first; all versions if `last` is 0."""
    newest_first = sa.select(versions).order_by(versions.c.version.desc()).limit(last or None)
    signed = metadata.targets()
    return [_line(connection, publisher, row, signed) for row in read_rows(connection, newest_first, VersionRow)]


def version_report(
    connection: sa.Connection, publisher: Publisher, metadata: SignedMetadata, *, version: int
) -> dict[str, Any]:
    """Return the report on one version: its line in `listed`, its manifest, its files and the metadata's signers."""
    row = find_row(connection, sa.select(versions).where(versions.c.version == version), VersionRow)
    if row is None:
        raise NotFound(f"Version {version} was not published.", hint=LOOK)
    manifest = _manifest(publisher, version)
    return _line(connection, publisher, row, metadata.targets()) | {
        "parent": manifest.parent if manifest else None,
        "task": manifest.task if manifest else None,
        "sampler": manifest.sampler.model_dump() if manifest else None,
        "chunk_size_bytes": manifest.chunk_size_bytes if manifest else None,
        "files": [_file(entry) for entry in manifest.files] if manifest else [],
        "signers": {
            role: {"keys": sorted(result.signed), "threshold": result.threshold}
            for role, result in metadata.signers().items()
        },
    }


def _line(connection: sa.Connection, publisher: Publisher, row: VersionRow, signed: Collection[str]) -> dict[str, Any]:
    version = row.version
    manifest, before = _manifest(publisher, version), _manifest(publisher, version - 1)
    held = [entry.digest for entry in before.files] if before else []
    return {
        "version": version,
        "update": row.policy_update,
        "published_ms": row.published_ms,
        "manifest_digest": row.manifest_digest,
        "size_bytes": row.size_bytes,
        "newcomer_bytes": sum(manifest.chunk_sizes_for(()).values()) if manifest else None,
        "patch_bytes": sum(manifest.chunk_sizes_for(held).values()) if manifest and before else None,
        "adapter_bytes": _adapter_bytes(manifest) if manifest else None,
        "kept": bool(manifest and _is_kept(publisher, manifest)),
        "signed": target_path(version) in signed,
        "broadcast": broadcasts.spread(connection, version),
    }


def _manifest(publisher: Publisher, version: int) -> PolicyManifest | None:
    """Return the manifest of a version; None if it is missing or damaged, which `verify` explains."""
    try:
        return publisher.manifest(version) if version > 0 else None
    except SwarmError:
        return None


def _adapter_bytes(manifest: PolicyManifest) -> int | None:
    """Return the size of the adapter; None if the policy has none."""
    sizes = [entry.size_bytes for entry in manifest.files if entry.path == adapter.WEIGHTS]
    return sizes[0] if sizes else None


def _is_kept(publisher: Publisher, manifest: PolicyManifest) -> bool:
    """Return True if the chunks on disk are enough to build the version from nothing, judged by their sizes."""
    each = manifest.chunk_sizes_for(())
    return all(_has(publisher, name, size_bytes) for name, size_bytes in each.items())


def _has(publisher: Publisher, name: str, size_bytes: int) -> bool:
    path = publisher.blobs / chunks.blob_path(ChunkId(name))
    return path.is_file() and path.stat().st_size == size_bytes


def _file(entry: FileEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "size_bytes": entry.size_bytes,
        "digest": entry.digest,
        "chunks": len(entry.chunks),
        "patches": [patch.size_bytes for patch in entry.patches],
        "patches_after_anchor": entry.patches_after_anchor,
    }


def recorded(connection: sa.Connection, version: int) -> str:
    """Return the digest of a version's manifest, which is also in the ledger."""
    digest = connection.execute(sa.select(versions.c.manifest_digest).where(versions.c.version == version)).scalar()
    if digest is None:
        raise NotFound(f"Version {version} was not published.", hint=LOOK)
    return str(digest)
