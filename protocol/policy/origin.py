"""Origins: plain web servers with a round's public files (a static host, a cache, an object store).

Layout below a base URL; the coordinator's own base is `<its address>/v1`:

    metadata/<document>       trust metadata and manifests; all but `timestamp.json` never change
    chunks/<ab>/<hash>        chunks; they never change

- The list of origins is a hint: a chunk is checked by its hash, a document by its signature.
- A base is a bare `http` or `https` URL: no user, no query, no fragment, nothing escaped, no dot segment.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path
from protocol.wire.message import Message

_HOST = r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)"
_PATH = r"(/[A-Za-z0-9_~][A-Za-z0-9._~+=@-]*)*"

_URL = rf"^https?://{_HOST}(:[0-9]{{1,5}})?{_PATH}$"

OriginUrl = Annotated[str, StringConstraints(pattern=_URL, max_length=limits.ORIGIN_URL_MAX_CHARS)]


class OriginList(Message):
    """The servers besides the coordinator that have the round's chunks and documents."""

    urls: tuple[OriginUrl, ...] = Field(max_length=limits.ORIGINS_MAX)


def document_path(name: str) -> str:
    """Return the path of a trust document below a base."""
    return f"metadata/{name}"


def chunk_path(chunk: ChunkId) -> str:
    """Return the path of a chunk below a base."""
    return f"chunks/{blob_path(chunk)}"


def may_change(document: str) -> bool:
    """Return True if a document is replaced under its name, so that a cache may hold an old one."""
    return document == "timestamp.json"
