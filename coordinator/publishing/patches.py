"""Which patches a file is published with, and when it is published in full again.

- A patch must be worth it: at most half as large as the file. At dense changes every version is full.
- Whoever begins with nothing fetches the anchor and the patches after it: less than twice the file. When one more patch
  would break that, or is one too many, the version becomes the anchor; who holds the version before fetches the patch
  all the same.
- A patch is published only if it was seen to lead from the base to exactly the uploaded file.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from coordinator.files import mapped
from protocol import delta, limits
from protocol.errors import PatchInvalid
from protocol.manifest import FileEntry, Patch

PATCHED = ".safetensors"
"""The files that may be patched; the others are small, or never change."""

WORTH_IT = 2
"""How many times smaller than the file a patch has to be: else it costs the nodes' processors more than it saves."""


def write_patch(base: memoryview, base_digest: str, new: memoryview, new_digest: str, target: Path) -> bool:
    """Write the patch if there is one that is worth it and leads to exactly the new file."""
    with ThreadPoolExecutor(os.cpu_count()) as threads, target.open("wb") as file:
        try:
            for piece in delta.encode(base, new, base_digest=base_digest, each=threads.map):
                if (file.tell() + len(piece)) * WORTH_IT > len(new):
                    return False
                file.write(piece)
            file.flush()
            hasher = blake3(max_threads=blake3.AUTO)
            for block in delta.apply(base, mapped(target), base_digest=base_digest, each=threads.map):
                hasher.update(block)
        except PatchInvalid:  # not the tensor files that patches are made of
            return False
    return hasher.hexdigest() == new_digest


def extend(previous: FileEntry, patch: Patch, size_bytes: int) -> tuple[tuple[Patch, ...], int]:
    """The chain with one more patch, and how many of it follow the anchor; 0 makes the new file the anchor."""
    patches = (*previous.patches, patch)
    count = previous.patches_after_anchor + 1
    fetched = previous.anchor_size_bytes + _bytes(patches[-count:])
    if count > limits.PATCHES_MAX or fetched >= 2 * size_bytes:
        count = 0
    while len(patches) > max(count, 1) and (len(patches) > limits.PATCHES_MAX or _bytes(patches) >= size_bytes):
        patches = patches[1:]
    return patches, count


def _bytes(patches: tuple[Patch, ...]) -> int:
    return sum(patch.size_bytes for patch in patches)
