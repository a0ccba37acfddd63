"""Evidence of intake: the reason why a rollout was rejected, in the same form for every code.

- `RULES` has the step, field and rule of each code; the values that the check observed (`Breach`) override them.
- Every field is filled, whatever was wrong. The claim id is the hash of its signed payload, as everywhere; for bytes
  without a payload it is the hash of these bytes.
- The command repeats the check: with `--replay` on the node's own machine if the bytes alone decide; else it asks the
  coordinator for the outcome of the lease.
"""

from typing import Annotated, NamedTuple

from pydantic import Field

from protocol import errors
from protocol.breach import POSITIONS_MAX, TEXT_MAX
from protocol.errors import SwarmError
from protocol.ids import Hex64
from protocol.policy import chunks
from protocol.wire.message import Message
from protocol.wire.signing import Envelope

VALIDATOR = "intake/1"
"""The version of the rules; it changes whenever a rule does."""

EXACT = "exact"

Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX)]


class TokenPlace(Message):
    """The place of a token in a claim; sample and position are counted from 0."""

    sample: int = Field(ge=0)
    position: int = Field(ge=0)


class RejectionEvidence(Message):
    """The evidence of a rejection."""

    code: Text
    step: Text
    """The step of intake: size, schema, signature, nonce, lease, duplicate, version, tokens or budget."""
    claim_id: Hex64
    field: Text
    """The field that breaks the rule."""
    expected: Text
    observed: Text
    tolerance: Text
    """The largest difference that would have passed."""
    positions: tuple[TokenPlace, ...] = Field((), max_length=POSITIONS_MAX)
    """The places, if single tokens are wrong."""
    validator: Text
    command: Text


class CodeRule(NamedTuple):
    """The step, field and expected value of a code, wherever it is raised."""

    step: str
    field: str
    expected: str
    replays: bool = False
    """True if the bytes alone decide, so that anybody can repeat the check."""


RULES: dict[str, CodeRule] = {
    errors.MessageTooLarge.code: CodeRule("size", "message", "a message within the limits of this protocol", True),
    errors.MalformedMessage.code: CodeRule("schema", "message", "the fields that the message has, and no others", True),
    errors.NotRead.code: CodeRule("schema", "message", "no malformed rollouts before it in its request"),
    errors.NotCanonical.code: CodeRule("schema", "message", "the one canonical encoding of its value", True),
    errors.NonFiniteNumber.code: CodeRule("schema", "message", "finite numbers", True),
    errors.BadSignature.code: CodeRule("signature", "signature", "the named signer's signature of this payload", True),
    errors.WrongAudience.code: CodeRule("signature", "path", "a request that was signed for this round and address"),
    errors.UnknownNode.code: CodeRule("signature", "signer", "a node that has registered"),
    errors.KeyRevoked.code: CodeRule("signature", "signer", "a key that its owner has not revoked"),
    errors.RequestExpired.code: CodeRule("nonce", "sent_ms", "a request sent a moment ago, by the coordinator's clock"),
    errors.NonceReplayed.code: CodeRule("nonce", "nonce", "a nonce that was not used before"),
    errors.UnknownLease.code: CodeRule("lease", "lease_id", "a lease that was given out in this round"),
    errors.LeaseOfAnother.code: CodeRule("lease", "signer", "the node that the lease was given to"),
    errors.LeaseClosed.code: CodeRule("lease", "lease_id", "a lease that is open and in time"),
    errors.LeaseMismatch.code: CodeRule("lease", "claim", "the same values as in the lease", True),
    errors.LeaseConflict.code: CodeRule("duplicate", "claim", "the answer that was accepted first"),
    errors.StaleVersion.code: CodeRule("version", "version", "a version within the bound of staleness"),
    errors.TokensInvalid.code: CodeRule("tokens", "samples", "tokens that the policy could have drawn", True),
    errors.LogprobsInvalid.code: CodeRule(
        "tokens", "samples", "a log-probability for every token, at most 0 and not absurdly low", True
    ),
    errors.BudgetExhausted.code: CodeRule("budget", "credit", "a deposit that covers the rollout"),
}
"""Every code with which a rollout may be rejected, alone or with its whole request."""

_OTHER = CodeRule("intake", "message", "a rollout that can be accepted")
"""The rule of codes that are missing in `RULES`: intake must always answer, and a test finds the gap."""


def build_evidence(error: SwarmError, *, envelope: bytes, lease_id: str, claim_id: str = "") -> RejectionEvidence:
    """Return the evidence for the rejection of an envelope; without a readable lease id the command has a placeholder.

    A caller that has already decoded the envelope passes `claim_id`.
    """
    rule, seen = RULES.get(error.code, _OTHER), error.breach
    return RejectionEvidence(
        code=error.code,
        step=rule.step,
        claim_id=claim_id or _claim_id(envelope),
        field=(seen.field or rule.field)[:TEXT_MAX],
        expected=(seen.expected or rule.expected)[:TEXT_MAX],
        observed=(seen.observed or error.message or error.code)[:TEXT_MAX],
        tolerance=seen.tolerance or EXACT,
        positions=tuple(
            TokenPlace(sample=sample, position=position) for sample, position in seen.positions[:POSITIONS_MAX]
        ),
        validator=VALIDATOR,
        command=command(error.code, lease_id),
    )


def command(code: str, lease_id: str) -> str:
    """Return the command that repeats the check of a code; viewers rebuild it, because evidence is untrusted."""
    replay = " --replay" if RULES.get(code, _OTHER).replays else ""
    return f"swarm-node why {lease_id[:32] or 'LEASE'}{replay}"


def _claim_id(envelope: bytes) -> str:
    try:
        return chunks.digest(Envelope.from_bytes(envelope).payload)
    except SwarmError:
        return chunks.digest(envelope)
