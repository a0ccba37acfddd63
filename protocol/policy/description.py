"""The description of a round: its title, purpose, licence, operator and contact, as its operator wrote them.

- It is a TUF target beside the manifests: its hash is in the signed targets, so nobody else can describe a round.
- Its name contains its hash: a new text is a new document, so caches and mirrors never hold an old one.
- It is optional. Nodes that do not know it ignore the target.
- Every text is one line of visible characters within its bound, so that pages and terminals show it as it is. It is
  still the operator's own claim about the round, and no proof.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

from protocol import limits
from protocol.errors import UntrustedMetadata
from protocol.ids import Hex64
from protocol.text.plain import visible
from protocol.wire.message import Message

_NAME = re.compile(r"^description-[0-9a-f]{64}\.round$")


def require_visible_line(text: str) -> str:
    """Return `text`; raise `ValueError` if a reader would not see exactly these characters on one line."""
    if visible(text, max(1, len(text))) != text:
        raise ValueError("must be one line of visible characters, without spaces at its ends")
    return text


Title = Annotated[str, Field(max_length=limits.ROUND_TITLE_MAX_CHARS), AfterValidator(require_visible_line)]
Fact = Annotated[str, Field(max_length=limits.ROUND_FACT_MAX_CHARS), AfterValidator(require_visible_line)]
Passage = Annotated[str, Field(max_length=limits.ROUND_TEXT_MAX_CHARS), AfterValidator(require_visible_line)]


class RoundDescription(Message):
    """Texts of an operator about a round; an empty text is not given."""

    round_id: Hex64
    title: Title
    description: Passage
    purpose: Passage
    licence: Fact
    operator: Fact
    contact: Fact

    @property
    def is_empty(self) -> bool:
        return not any(self.texts().values())

    def texts(self) -> dict[str, str]:
        """Return the texts by field, without the round id."""
        return self.model_dump(exclude={"round_id"})


def description_path(data: bytes) -> str:
    """Return the TUF target path of a description with these bytes."""
    return f"description-{hashlib.sha256(data).hexdigest()}.round"


def find_description(paths: Iterable[str]) -> str | None:
    """Return the description among target paths, or None; a round lists at most one."""
    return next((path for path in sorted(paths) if _NAME.match(path)), None)


def open_description(data: bytes, path: str, round_id: str) -> RoundDescription:
    """Check the bytes of the target `path`, which the signed targets list, and parse them."""
    if description_path(data) != path:
        raise UntrustedMetadata("The round's description does not have the hash that is signed.")
    description = RoundDescription.from_bytes(data, max_bytes=limits.DESCRIPTION_MAX_BYTES)
    if description.round_id != round_id:
        raise UntrustedMetadata("The description belongs to another round.")
    return description
