"""Appeals: what a node, or its owner, says against a fault or a ban, and what it is told of it.

- An appeal is an envelope of the domain `appeal`, delivered as it is by anybody: a banned node's word counts, too.
- It names a lease or a claim from which something was taken. The coordinator looks up what took it: one appeal stands
  for all that this fault or ban took, whoever of the owner's nodes speaks.
- The words are kept beside the log, which holds their digest alone.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.errors import WrongAudience
from protocol.ids import Hex32, Hex64, NodeId
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey, open_envelope

Standing = Literal["", "possible", "open", "granted", "denied"]
"""Of an appeal against what took a claim: nothing was taken, it may be made, it waits, or how it was ruled."""


class Appeal(Message):
    """This was honest work: look at it again."""

    kind: Literal["appeal"] = "appeal"
    round_id: Hex64
    about: Hex32 | Hex64
    """A lease or a claim."""
    reason: Annotated[str, StringConstraints(max_length=limits.APPEAL_REASON_MAX_CHARS)]


class AppealReply(Message):
    """The appeal is in the log, or was before; saying it again is harmless."""

    outcome: Literal["recorded", "already_recorded"]
    number: int = Field(ge=1)
    claim_id: Hex64
    """The claim that it is about: the one at fault."""
    standing: Standing
    ruling: str
    """The reason code of the ruling and the operator's words; empty before."""


def seal_appeal(key: NodeKey, appeal: Appeal) -> bytes:
    return key.seal("appeal", appeal.to_bytes())


def open_appeal(data: bytes, round_id: str) -> tuple[NodeId, Appeal]:
    """Who appeals, and against what, after size, form, signature and round."""
    signed = open_envelope("appeal", data, max_bytes=limits.APPEAL_MAX_BYTES)
    appeal = Appeal.from_bytes(signed.payload)
    if appeal.round_id != round_id:
        raise WrongAudience("The appeal was signed for another round.", hint="Sign it with this round's join string.")
    return signed.signer, appeal
