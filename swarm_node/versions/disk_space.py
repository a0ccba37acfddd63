"""Whether a version has room on this disk, asked before the first of its bytes is fetched.

- What a version needs follows from its signed manifest and from what is here: chunks that still have to come, and the
  files that are made of them, as `assemble` makes them. Of a manifest that names absurd sizes nothing comes.
- Nothing that is held makes room by itself: how much is lacking is said, and the owner decides.
- The disk may fill up all the same, by others or by what a quota hides: that is met when it happens.
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
    """The disk has less room than a version needs; nothing of it is fetched."""

    code = "version_too_large"


def needed_bytes(manifest: PolicyManifest, held: Collection[str], missing_bytes: int) -> int:
    """The most that is taken of the disk at a time, on the way from the files of these digests to the version.

    First all anchors grow while their chunks come. Then one file after the other is patched: a patch is unpacked, a new
    file made with it, and the one before removed if it is of this version.
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
    """Refuse a version that needs more than is free, with chunks of these sizes; it blocks."""
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
