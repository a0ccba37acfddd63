"""Which files a policy version may have, judged from its manifest before one of them is fetched or written.

- Only files that an engine, a tokenizer or a trainer reads by this name, and each no larger than its use needs.
- Nothing that unfolds: what is written to a disk is at most a few times what has to be fetched for it. So whoever wants
  to fill a volunteer's disk has to send the bytes, and the node asks first whether they fit.
- The publisher judges by the same rules, so that an operator learns it before any node does.
"""

import re
from typing import NamedTuple

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.policy.manifest import FileEntry, PolicyManifest


class FileKind(NamedTuple):
    """Files of one use."""

    names: re.Pattern[str]
    max_bytes: int | None
    """Of one file; None for weights, which are as large as their chunks."""


KINDS = (
    FileKind(re.compile(r"[\w.-]+\.safetensors"), None),
    FileKind(re.compile(r"[\w.-]+\.safetensors\.index\.json"), limits.TENSOR_INDEX_MAX_BYTES),
    FileKind(re.compile(r"chat_template[\w.-]*\.(jinja|json)"), limits.CHAT_TEMPLATE_MAX_BYTES),
    FileKind(re.compile(r"(tokenizer|added_tokens|vocab)[\w.-]*\.json"), limits.TOKENIZER_MAX_BYTES),
    FileKind(re.compile(r"(merges|vocab)\.txt|[\w.-]+\.model"), limits.TOKENIZER_MAX_BYTES),
    FileKind(re.compile(r"([\w.-]*config|canary|special_tokens[\w.-]*)\.json"), limits.POLICY_CONFIG_MAX_BYTES),
)
"""By the first pattern that is the whole name."""


def kind_of(name: str) -> FileKind | None:
    """Return the kind of a file by its name; None if no policy has such a file."""
    return next((kind for kind in KINDS if kind.names.fullmatch(name)), None)


def require_files(manifest: PolicyManifest) -> None:
    """Refuse a version with a file of no known use, a file that is too large for its use, or files that unfold."""
    for entry in manifest.files:
        _require_kind(manifest.version, entry)
    written = sum(max(entry.sizes().values()) for entry in manifest.files)
    fetched = sum(manifest.chunk_sizes().values())
    allowed = max(limits.REPEATED_MIN_BYTES, limits.REPEATED_FACTOR_MAX * fetched)
    if written > allowed:
        raise ManifestInvalid(
            f"Version {manifest.version} makes {written} bytes of files out of {fetched} bytes of distinct chunks; "
            f"{allowed} are allowed.",
            hint="Nothing of it is fetched. No weights repeat themselves like that: ask the operator.",
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
            hint="Nothing of it is fetched. Ask the operator.",
        )
    if entry.patches:
        raise ManifestInvalid(f"Version {version} patches {entry.path}; only *.safetensors are patched.")
