"""Evidence of intake: why a rollout was rejected, in one form for every code.

- Step, field and rule of a code stand in `RULES`, once; what the check itself has seen (`Breach`) goes before them.
- Every field is filled, whatever was wrong. The claim is named by its signed payload, as everywhere; bytes that hold no
  payload are named by themselves.
- The command repeats the check: `--replay` on the node's own machine, where bytes decide; else it asks what the lease
  has come to, which only the coordinator knows.
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
"""Changes whenever a rule does."""

EXACT = "exact"

Text = Annotated[str, Field(min_length=1, max_length=TEXT_MAX)]


class TokenPlace(Message):
    """A token of a claim, both counted from 0."""

    sample: int = Field(ge=0)
    position: int = Field(ge=0)


class RejectionEvidence(Message):
    """One rejection."""

    code: Text
    step: Text
    """Of intake: size, schema, signature, nonce, lease, duplicate, version, tokens, reward or budget."""
    claim_id: Hex64
    field: Text
    """Of the message that is not as it must be."""
    expected: Text
    observed: Text
    tolerance: Text
    """How far off would have passed."""
    positions: tuple[TokenPlace, ...] = Field((), max_length=POSITIONS_MAX)
    """Where, if single tokens are wrong."""
    validator: Text
    command: Text


class CodeRule(NamedTuple):
    """What holds for a code wherever it is raised."""

    step: str
    field: str
    expected: str
    replays: bool = False
    """Whether the bytes alone decide, so that anybody can repeat it."""


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
    errors.LeaseMismatch.code: CodeRule("lease", "claim", "what the lease says, repeated", True),
    errors.LeaseConflict.code: CodeRule("duplicate", "claim", "the answer that was accepted first"),
    errors.StaleVersion.code: CodeRule("version", "version", "a version within the bound of staleness"),
    errors.TokensInvalid.code: CodeRule("tokens", "samples", "tokens that the policy could have drawn", True),
    errors.LogprobsInvalid.code: CodeRule(
        "tokens", "samples", "a log-probability for every token, at most 0 and not absurdly low", True
    ),
    errors.ObservationForged.code: CodeRule("tokens", "samples", "what the environment answers there", True),
    errors.EpisodeOverrun.code: CodeRule("tokens", "samples", "nothing after the end of the episode", True),
    errors.EpisodeCutShort.code: CodeRule("tokens", "samples", "an episode up to its end", True),
    errors.UnknownEnvironment.code: CodeRule("reward", "episode", "an environment that this coordinator knows"),
    errors.EnvironmentFailed.code: CodeRule("reward", "episode", "an environment that keeps its own rules"),
    errors.BudgetExhausted.code: CodeRule("budget", "credit", "a deposit that covers the rollout"),
}
"""Every code that a rollout may be rejected with, alone or with the request that brings it."""

_OTHER = CodeRule("intake", "message", "a rollout that can be taken")
"""For a code that no table has: intake answers whatever happens, and a test finds the gap."""


def build_evidence(error: SwarmError, *, envelope: bytes, lease_id: str, claim_id: str = "") -> RejectionEvidence:
    """The evidence for the rejection of these bytes; of a lease that could not be read, the command names none.

    Whoever has read the envelope before names its claim.
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
    """What repeats the check behind a code; whoever shows it makes it anew, since evidence is another's word."""
    replay = " --replay" if RULES.get(code, _OTHER).replays else ""
    return f"swarm-node why JOIN_STRING {lease_id[:32] or 'LEASE'}{replay}"


def _claim_id(envelope: bytes) -> str:
    try:
        return chunks.digest(Envelope.from_bytes(envelope).payload)
    except SwarmError:
        return chunks.digest(envelope)
