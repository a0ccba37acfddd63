"""The manifest of a policy version: everything a node must know to fetch it, rebuild it and sample with it.

- It travels as a TUF target: nobody acts on manifest bytes whose hash was not signed.
- It binds the round, the version, the parent, each file by digest and each chunk by name, the sampler and the task.
- File names are bare: no folder, no dot file, no surprise on a foreign file system.
"""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.ids import Hex64
from protocol.message import Message

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}$")]


class Sampler(Message):
    """How completions are drawn: temperature only, since truncated sampling would bias the importance ratios."""

    temperature: float = Field(gt=0, le=10)
    max_new_tokens: int = Field(ge=1, le=limits.TOKENS_MAX)


class FileEntry(Message):
    """One file of the policy folder."""

    path: FileName
    size_bytes: int = Field(ge=0)
    digest: Hex64
    chunks: tuple[Hex64, ...] = Field(max_length=limits.MANIFEST_MAX_CHUNKS)


class PolicyManifest(Message):
    """One published policy version."""

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
            if len(entry.chunks) != -(-entry.size_bytes // self.chunk_size_bytes):
                raise ValueError(f"{entry.path} has {entry.size_bytes} bytes, but {len(entry.chunks)} chunks")
        return self

    def chunk_sizes(self) -> dict[str, int]:
        """Every distinct chunk of the version and its size in bytes."""
        sizes: dict[str, int] = {}
        for entry in self.files:
            for number, chunk in enumerate(entry.chunks):
                left = entry.size_bytes - number * self.chunk_size_bytes
                sizes[chunk] = min(left, self.chunk_size_bytes)
        return sizes


def target_path(version: int) -> str:
    """The TUF target path of a version's manifest; zero-padded so that names sort as numbers do."""
    return f"policy-{version:012d}.manifest"


def version_of(path: str) -> int | None:
    """The version a target path names, or None for any other target."""
    # Cut, since int() refuses thousands of digits with an error of its own; the comparison sees the whole path.
    number = path[:40].removeprefix("policy-").removesuffix(".manifest")
    if number.isascii() and number.isdigit() and target_path(int(number)) == path:
        return int(number)
    return None


def open_manifest(data: bytes, *, round_id: str, version: int) -> PolicyManifest:
    """Parse a manifest whose bytes are already trusted, and check that it is the one asked for."""
    manifest = PolicyManifest.from_bytes(data, max_bytes=limits.MANIFEST_MAX_BYTES)
    if (manifest.round_id, manifest.version) != (round_id, version):
        raise ManifestInvalid(
            f"The manifest on offer is version {manifest.version}, not version {version} of this round."
        )
    return manifest
