"""Check that a version fits on this disk, before any of it is downloaded.

- The need follows from the signed manifest and the existing files: the missing chunks, and the files that `assemble`
  builds from them. A manifest with absurd sizes is never downloaded.
- No existing file is removed to make room: the error states the missing amount, and the owner decides.
- The disk may still fill up, by other programs or because of a hidden quota: that is handled when it happens.
"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from protocol.errors import DiskFull
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from protocol.text.plain import size_text
from swarm_node.base.disk import existing
from swarm_node.chunks.blobs import BlobStore
from swarm_node.versions import assemble


class VersionTooLarge(DiskFull):
    """The disk has less free space than a version needs; the version is not fetched."""

    code = "version_too_large"


def needed_bytes(manifest: PolicyManifest, held: Collection[str], missing_bytes: int) -> int:
    """Return the peak disk usage of building the version, given files with the digests in `held`.

    First all anchors grow while their chunks arrive. Then one file after the other is patched: a patch is unpacked, a
    new file is built with it, and the previous one is removed if it belongs to this version.
    """
    routes = [(entry, entry.route(held)) for entry in manifest.files]
    taken = missing_bytes + sum(route.anchor_bytes for _, route in routes)
    most = taken
    for entry, route in routes:
        before = route.anchor_bytes
        sizes = list(entry.sizes().values())
        for patch, size in zip(route.patches, sizes[len(sizes) - len(route.patches) :], strict=True):
            most = max(most, taken + patch.size_bytes + size)
            taken += size - before
            before = size
    return most


def require(
    folder: Path, manifest: PolicyManifest, held: Collection[str], sizes: Mapping[ChunkId, int], blobs: BlobStore
) -> None:
    """Raise an error if a version with chunks of these sizes needs more than the free space; blocks."""
    assemble.clear(folder)
    needed = needed_bytes(manifest, held, sum(size for chunk, size in sizes.items() if not blobs.has(chunk)))
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise VersionTooLarge(
            f"Version {manifest.version} needs {size_text(needed)} of disk space, "
            f"but only {size_text(free)} are free in {folder}.",
            hint="Free some space there, or move the node's folder to a larger disk; "
            "the version is fetched as soon as there is room.",
        )
