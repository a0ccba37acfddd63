"""The manifest of a policy version: all that a node needs to fetch it, rebuild it and sample with it.

- It is a TUF target: nobody uses manifest bytes whose hash was not signed.
- It binds the round, the version, the parent, each file by digest and each chunk by name, the sampler and the task.
- It is complete: a node that trusts it can build the version from the files of any earlier one in its chains, or from
  nothing, and needs no other manifest. So nobody can mix patches of different versions.
- File names are bare: no folder and no dot file, so that they are valid on every file system.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.ids import Hex64
from protocol.wire.message import Message

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}$")]

POLICY_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})
"""Suffixes of a policy's files: numbers and text, nothing that a library would run or unpickle."""


class Sampler(Message):
    """The sampling settings: temperature only, since truncated sampling would bias the importance ratios."""

    temperature: float = Field(gt=0, le=10)
    max_new_tokens: int = Field(ge=1, le=limits.TOKENS_MAX)


class Patch(Message):
    """A patch that builds a file from an earlier one: `protocol.policy.delta`, applied to the file of `base_digest`."""

    base_digest: Hex64
    base_size_bytes: int = Field(ge=0)
    size_bytes: int = Field(ge=1)
    """The size of the patch itself, which is cut into `chunks`."""
    chunks: tuple[Hex64, ...] = Field(max_length=limits.MANIFEST_MAX_CHUNKS)


class FileEntry(Message):
    """A file of the policy folder, and the patches that lead to it.

    - The patches are a chain: each builds the base of the next, and the last one builds the file.
    - One file of the chain, the anchor, is available in full: the base of the last `patches_after_anchor` patches, or
      the file itself if that is 0. Patches before the anchor are for nodes that hold an older file.
    """

    path: FileName
    size_bytes: int = Field(ge=0)
    digest: Hex64
    chunks: tuple[Hex64, ...] = Field(max_length=limits.MANIFEST_MAX_CHUNKS)
    """The chunks of the anchor."""
    patches: tuple[Patch, ...] = Field(default=(), max_length=limits.PATCHES_MAX)
    patches_after_anchor: int = Field(default=0, ge=0, le=limits.PATCHES_MAX)

    @model_validator(mode="after")
    def _is_one_chain(self) -> "FileEntry":
        if self.patches_after_anchor > len(self.patches):
            raise ValueError(f"{self.path} has its anchor before its first patch")
        if len(self.sizes()) != len(self.patches) + 1:
            raise ValueError(f"{self.path} comes back to a file that it came from")
        return self

    @property
    def after_anchor(self) -> tuple[Patch, ...]:
        """The patches that lead from the anchor to the file."""
        return self.patches[len(self.patches) - self.patches_after_anchor :]

    @property
    def anchor_size_bytes(self) -> int:
        return self.after_anchor[0].base_size_bytes if self.after_anchor else self.size_bytes

    @property
    def anchor_digest(self) -> Hex64:
        return self.after_anchor[0].base_digest if self.after_anchor else self.digest

    def sizes(self) -> dict[str, int]:
        """Return the size of every file of the chain by its digest."""
        return {patch.base_digest: patch.base_size_bytes for patch in self.patches} | {self.digest: self.size_bytes}

    def route(self, held: Collection[str]) -> "Route":
        """Return the route to the file that fetches the fewest bytes, for a node with the files of digests `held`."""
        routes = [Route(None, self.anchor_size_bytes, self.after_anchor)]
        for number, digest in enumerate(self.sizes()):
            if digest in held:
                routes.append(Route(digest, 0, self.patches[number:]))
        return min(routes, key=lambda route: route.fetched_bytes)


@dataclass(frozen=True)
class Route:
    """A route to a file: the file to begin with, and the patches to apply to it in order."""

    held: str | None
    """The digest of the file to begin with, or None for the anchor."""
    anchor_bytes: int
    patches: tuple[Patch, ...]

    @property
    def fetched_bytes(self) -> int:
        return self.anchor_bytes + sum(patch.size_bytes for patch in self.patches)


class PolicyManifest(Message):
    """A published policy version."""

    round_id: Hex64
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    update: int = Field(ge=0, le=limits.VERSION_MAX)
    parent: Hex64 | None
    task: str = Field(min_length=1, max_length=100)
    sampler: Sampler
    chunk_size_bytes: int = Field(ge=1, le=limits.CHUNK_MAX_BYTES)
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=limits.MANIFEST_MAX_FILES)

    @model_validator(mode="after")
    def _sizes_and_chunks_agree(self) -> "PolicyManifest":
        if len({entry.path.lower() for entry in self.files}) != len(self.files):
            raise ValueError("two files share a name")
        for entry in self.files:
            self._require_chunks(entry.path, entry.anchor_size_bytes, entry.chunks)
            for patch in entry.patches:
                self._require_chunks(f"a patch of {entry.path}", patch.size_bytes, patch.chunks)
            if max(entry.sizes().values()) > limits.MANIFEST_MAX_CHUNKS * self.chunk_size_bytes:
                raise ValueError(f"{entry.path} or a base of it is larger than the chunks of a file can describe")
        return self

    def _require_chunks(self, what: str, size_bytes: int, names: tuple[Hex64, ...]) -> None:
        if len(names) != -(-size_bytes // self.chunk_size_bytes):
            raise ValueError(f"{what} has {size_bytes} bytes, but {len(names)} chunks")

    def chunk_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every distinct chunk of this version and of the patches that lead to it."""
        sizes: dict[str, int] = {}
        for entry in self.files:
            sizes |= self._cut(entry.anchor_size_bytes, entry.chunks)
            for patch in entry.patches:
                sizes |= self._cut(patch.size_bytes, patch.chunks)
        return sizes

    def chunk_sizes_for(self, held: Collection[str]) -> dict[str, int]:
        """Return the chunks, with their sizes in bytes, that a node with the files `held` must fetch at the least."""
        sizes: dict[str, int] = {}
        for entry in self.files:
            route = entry.route(held)
            if route.held is None:
                sizes |= self._cut(entry.anchor_size_bytes, entry.chunks)
            for patch in route.patches:
                sizes |= self._cut(patch.size_bytes, patch.chunks)
        return sizes

    def _cut(self, size_bytes: int, names: tuple[Hex64, ...]) -> dict[str, int]:
        starts = range(0, size_bytes, self.chunk_size_bytes)
        return {name: min(size_bytes - start, self.chunk_size_bytes) for start, name in zip(starts, names, strict=True)}


def target_path(version: int) -> str:
    """Return the TUF target path of a version's manifest; zero-padded so that names sort as numbers do."""
    return f"policy-{version:012d}.manifest"


def version_of(path: str) -> int | None:
    """Return the version that a target path names, or None for any other target."""
    # Cut, since int() rejects thousands of digits with its own error; the comparison uses the whole path.
    number = path[:40].removeprefix("policy-").removesuffix(".manifest")
    if number.isascii() and number.isdigit() and target_path(int(number)) == path:
        return int(number)
    return None


def open_manifest(data: bytes, *, round_id: str, version: int) -> PolicyManifest:
    """Parse a manifest whose bytes are already trusted, and check that it is the requested one."""
    manifest = PolicyManifest.from_bytes(data, max_bytes=limits.MANIFEST_MAX_BYTES)
    if (manifest.round_id, manifest.version) != (round_id, version):
        raise ManifestInvalid(f"The manifest is of version {manifest.version}, not of version {version} of this round.")
    return manifest
