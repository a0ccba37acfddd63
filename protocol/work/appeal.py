"""Appeals: a node's or its owner's objection to a fault or a ban, and the answer to it.

- An appeal is an envelope of the domain `appeal`. Anybody may deliver it, so a banned node can appeal, too.
- It names a lease or a claim whose credit was voided. The coordinator finds the fault or ban that voided it: one appeal
  is about all that this fault or ban voided, whichever of the owner's nodes appeals.
- The text is kept beside the log, which holds only its digest.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.errors import WrongAudience
from protocol.ids import Hex64, NodeId
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey, open_envelope

Standing = Literal["", "possible", "open", "granted", "denied"]
"""The state of an appeal about a claim: nothing was voided, it is possible, it waits for a ruling, or the ruling."""


class Appeal(Message):
    """An objection to a fault or a ban: the work was honest and should be checked again."""

    kind: Literal["appeal"] = "appeal"
    round_id: Hex64
    about: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}){1,2}$")]
    """A lease or a claim."""
    reason: Annotated[str, StringConstraints(max_length=limits.APPEAL_REASON_MAX_CHARS)]


class AppealReply(Message):
    """The answer to an appeal, which is in the log now; sending it again is harmless."""

    outcome: Literal["recorded", "already_recorded"]
    number: int = Field(ge=1)
    claim_id: Hex64
    """The claim at fault, which the appeal is about."""
    standing: Standing
    ruling: str
    """The reason code of the ruling and the operator's text; empty before the ruling."""


def seal_appeal(key: NodeKey, appeal: Appeal) -> bytes:
    return key.seal("appeal", appeal.to_bytes())


def open_appeal(data: bytes, round_id: str) -> tuple[NodeId, Appeal]:
    """Check the size, form, signature and round of an appeal; return its signer and the appeal."""
    signed = open_envelope("appeal", data, max_bytes=limits.APPEAL_MAX_BYTES)
    appeal = Appeal.from_bytes(signed.payload)
    if appeal.round_id != round_id:
        raise WrongAudience("The appeal was signed for another round.", hint="Sign it with this round's join string.")
    return signed.signer, appeal
