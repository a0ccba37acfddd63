"""Who vouches for the round's ledger."""

from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, Field

from coordinator.config.section import Section
from ledger.note import KeyKind, NoteKey
from ledger.witness import WITNESSES_MAX
from protocol.errors import CheckpointInvalid


def _a_witness(text: str) -> str:
    try:
        key = NoteKey.parse(text)
    except CheckpointInvalid as error:
        raise ValueError(str(error)) from None
    if key.kind is not KeyKind.WITNESS:
        raise ValueError(f"{key.name[:80]} is the key of a log, not of a witness")
    return text


class LedgerSection(Section):
    """Who vouches for the round's ledger."""

    witnesses: tuple[Annotated[str, AfterValidator(_a_witness)], ...] = Field(
        (),
        max_length=WITNESSES_MAX,
        description="keys whose cosignatures are kept and shown; `ledger witness` tells one",
    )

    @cached_property
    def keys(self) -> tuple[NoteKey, ...]:
        """The same, read."""
        return tuple(dict.fromkeys(map(NoteKey.parse, self.witnesses)))
