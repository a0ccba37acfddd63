"""The join string: the address of a coordinator, and the fingerprint of its round's root."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import ConfigInvalid


@dataclass(frozen=True)
class JoinString:
    """Parsed join string, `http://host:port#<64 hex digits>`."""

    url: str
    round_id: str


def round_folder(home: Path, join: JoinString) -> Path:
    """Return the folder of a round in a node's home."""
    return home / "rounds" / join.round_id[:16]


def parse(text: str) -> JoinString:
    parts = urlsplit(text.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigInvalid(
            f"{text[:80]!r} is not a join string.", hint="A join string has the form http://host:port#fingerprint."
        )
    if not re.fullmatch(r"[0-9a-f]{64}", parts.fragment):
        raise ConfigInvalid(
            "The join string has no root fingerprint after its #.",
            hint="Copy the whole join string; the node verifies the coordinator by its fingerprint.",
        )
    return JoinString(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", parts.fragment)
