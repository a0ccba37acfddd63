"""Rules for the files of a policy version, checked in its manifest before any of them is fetched or written.

- Only files that an engine, a tokenizer or a trainer reads by this name are allowed, each no larger than its use needs.
- The bytes written to a disk are at most a few times the bytes fetched. So an attacker who wants to fill a volunteer's
  disk has to send the bytes, and the node first checks that they fit.
- The publisher checks the same rules, so that an operator sees an error before any node does.
"""

import re
from typing import NamedTuple

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.policy.manifest import FileEntry, PolicyManifest


class FileKind(NamedTuple):
    """A kind of files with the same use."""

    names: re.Pattern[str]
    max_bytes: int | None
    """The limit for one file; None for weights, which are as large as their chunks."""


KINDS = (
    FileKind(re.compile(r"[\w.-]+\.safetensors"), None),
    FileKind(re.compile(r"[\w.-]+\.safetensors\.index\.json"), limits.TENSOR_INDEX_MAX_BYTES),
    FileKind(re.compile(r"chat_template[\w.-]*\.(jinja|json)"), limits.CHAT_TEMPLATE_MAX_BYTES),
    FileKind(re.compile(r"(tokenizer|added_tokens|vocab)[\w.-]*\.json"), limits.TOKENIZER_MAX_BYTES),
    FileKind(re.compile(r"(merges|vocab)\.txt|[\w.-]+\.model"), limits.TOKENIZER_MAX_BYTES),
    FileKind(re.compile(r"([\w.-]*config|canary|special_tokens[\w.-]*)\.json"), limits.POLICY_CONFIG_MAX_BYTES),
)
"""The first pattern that matches the whole name counts."""


def kind_of(name: str) -> FileKind | None:
    """Return the kind of a file by its name; None if policies have no such file."""
    return next((kind for kind in KINDS if kind.names.fullmatch(name)), None)


def require_files(manifest: PolicyManifest) -> None:
    """Reject a version with a file of unknown use or too large for its use, or files far larger than their chunks."""
    for entry in manifest.files:
        _require_kind(manifest.version, entry)
    written = sum(max(entry.sizes().values()) for entry in manifest.files)
    fetched = sum(manifest.chunk_sizes().values())
    allowed = max(limits.REPEATED_MIN_BYTES, limits.REPEATED_FACTOR_MAX * fetched)
    if written > allowed:
        raise ManifestInvalid(
            f"Version {manifest.version} has {written} bytes of files but only {fetched} bytes of distinct chunks; "
            f"at most {allowed} bytes of files are allowed.",
            hint="It is not fetched. Weights never repeat so much: ask the operator.",
        )


def _require_kind(version: int, entry: FileEntry) -> None:
    kind, size_bytes = kind_of(entry.path), max(entry.sizes().values())
    if kind is None:
        raise ManifestInvalid(
            f"Version {version} has a file {entry.path}, which no engine reads.",
            hint="A policy has weights (*.safetensors), its configuration, its tokenizer and its chat template.",
        )
    if kind.max_bytes is None:
        return
    if size_bytes > kind.max_bytes:
        raise ManifestInvalid(
            f"Version {version} has a {entry.path} of {size_bytes} bytes; {kind.max_bytes} are allowed.",
            hint="It is not fetched. Ask the operator.",
        )
    if entry.patches:
        raise ManifestInvalid(f"Version {version} patches {entry.path}; only *.safetensors are patched.")
