"""Every named failure of the swarm: what it is called on the wire, its HTTP status, and whose side it is on.

- The message says what happened, the hint what to do next, to people; `code` never changes its meaning, for programs.
- A normal outcome ("already accepted") is a result, not an error, and has no place here.
"""

from typing import ClassVar, Literal

from protocol.breach import UNSAID, Breach
from protocol.text.plain import one_line

Fault = Literal["node", "peer", "coordinator", "operator", "network"]


class SwarmError(Exception):
    """Something failed that has no better name; raise a subclass."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "coordinator"

    def __init__(self, message: str, *, hint: str = "", breach: Breach = UNSAID) -> None:
        super().__init__(message)
        self.message, self.hint, self.breach = message, hint, breach

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def to_wire(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "hint": self.hint, **self.breach.to_wire()}

    @staticmethod
    def from_wire(value: object) -> "SwarmError":
        """Rebuild the error a server named; an unknown code stays readable as a plain `SwarmError`."""
        fields = value if isinstance(value, dict) else {}
        known = ERRORS.get(str(fields.get("code")), SwarmError)
        message = str(fields.get("message", "The other side failed without saying why."))
        return known(message[:500], hint=str(fields.get("hint", ""))[:500], breach=Breach.from_wire(fields))


class MalformedMessage(SwarmError):
    """The bytes are not the message they should be."""

    code, http_status, fault = "malformed_message", 400, "node"


class MessageTooLarge(SwarmError):
    """A size, count or depth limit of `protocol.limits` is passed."""

    code, http_status, fault = "message_too_large", 413, "node"


class NotCanonical(SwarmError):
    """The bytes mean something, but are not the one encoding of it."""

    code, http_status, fault = "not_canonical", 400, "node"


class NotRead(SwarmError):
    """A rollout behind too many malformed ones of its request; it may be sent again by itself."""

    code, http_status, fault = "not_read", 422, "node"


class NonFiniteNumber(SwarmError):
    """A NaN or an infinity where a number is needed."""

    code, http_status, fault = "non_finite_number", 422, "node"


class BadSignature(SwarmError):
    """The signature does not belong to the message and the key."""

    code, http_status, fault = "bad_signature", 401, "node"


class WrongAudience(SwarmError):
    """A signed request that was made for another round or another path."""

    code, http_status, fault = "wrong_audience", 401, "node"


class RequestExpired(SwarmError):
    """A signed request too far from the coordinator's clock."""

    code, http_status, fault = "request_expired", 401, "node"


class NonceReplayed(SwarmError):
    """A signed request that was already used once."""

    code, http_status, fault = "nonce_replayed", 409, "node"


class NotAuthorised(SwarmError):
    """The operator's credential is missing or wrong."""

    code, http_status, fault = "not_authorised", 401, "operator"


class UnknownNode(SwarmError):
    """The key is sound, but has not registered in this round."""

    code, http_status, fault = "unknown_node", 403, "node"


class AgentTooOld(SwarmError):
    """The node speaks a generation of the protocol whose work does not count any more."""

    code, http_status, fault = "agent_too_old", 426, "node"


class OwnerBanned(SwarmError):
    """Audits have found two rollouts of this owner's that no honest node could have produced."""

    code, http_status, fault = "owner_banned", 403, "node"


class OwnerConflict(SwarmError):
    """The node works for another owner: it has one for ever, and a new one needs a new node key."""

    code, http_status, fault = "owner_conflict", 409, "node"


class KeyRevoked(SwarmError):
    """The owner has revoked this node's key."""

    code, http_status, fault = "key_revoked", 403, "node"


class UnknownOwner(SwarmError):
    """No node works for this owner in this round."""

    code, http_status, fault = "unknown_owner", 403, "node"


class StatementStale(SwarmError):
    """An owner's statement that another one has overtaken."""

    code, http_status, fault = "statement_stale", 409, "node"


class TooManyStatements(SwarmError):
    """An owner has signed as many addresses as are taken in a day; `Retry-After` says when there is room again."""

    code, http_status, fault = "too_many_statements", 429, "node"

    def __init__(self, message: str, *, hint: str = "", breach: Breach = UNSAID, retry_after_s: int = 0) -> None:
        super().__init__(message, hint=hint, breach=breach)
        self.retry_after_s = retry_after_s


class PayoutFailed(SwarmError):
    """A payout that cannot be made or finished as things stand; nothing was paid twice, and it may be tried again."""

    code, http_status, fault = "payout_failed", 409, "operator"


class PriceTooHigh(SwarmError):
    """The node's price is above what this round pays."""

    code, http_status, fault = "price_too_high", 422, "node"


class NotInvited(SwarmError):
    """This round takes no strangers."""

    code, http_status, fault = "not_invited", 403, "operator"


class UnknownLease(SwarmError):
    """No such lease was ever given out."""

    code, http_status, fault = "unknown_lease", 404, "node"


class LeaseOfAnother(SwarmError):
    """The lease belongs to another node."""

    code, http_status, fault = "lease_of_another", 403, "node"


class LeaseClosed(SwarmError):
    """The lease has expired or was given up; its group went to somebody else."""

    code, http_status, fault = "lease_closed", 409, "node"


class LeaseConflict(SwarmError):
    """The lease was already answered with other content."""

    code, http_status, fault = "lease_conflict", 409, "node"


class LeaseMismatch(SwarmError):
    """A claim that does not repeat its lease: another round, version, seed or number of samples."""

    code, http_status, fault = "lease_mismatch", 422, "node"


class FragmentMismatch(SwarmError):
    """A fragment that does not continue what its node has told of its lease."""

    code, http_status, fault = "fragment_mismatch", 422, "node"


class StaleVersion(SwarmError):
    """A rollout of a policy version that is now more than S updates behind the learner."""

    code, http_status, fault = "stale_version", 409, "node"


class TokensInvalid(SwarmError):
    """Tokens that the policy could not have produced: out of vocabulary, too many, no end, or after the end."""

    code, http_status, fault = "tokens_invalid", 422, "node"


class LogprobsInvalid(SwarmError):
    """Log-probabilities that are missing, positive, absurdly low, or not numbers."""

    code, http_status, fault = "logprobs_invalid", 422, "node"


class BudgetExhausted(SwarmError):
    """The operator's deposit does not cover another lease."""

    code, http_status, fault = "budget_exhausted", 402, "operator"


class UnknownTask(SwarmError):
    """No task of that name is built in."""

    code, http_status, fault = "unknown_task", 422, "operator"


class UnknownEnvironment(SwarmError):
    """No environment of that name is built in here, or it takes no such parameters."""

    code, http_status, fault = "unknown_environment", 422, "operator"


class EnvironmentFailed(SwarmError):
    """An environment broke its own rules: our fault, whatever was played."""

    code, http_status, fault = "environment_failed", 500, "coordinator"


class ObservationForged(SwarmError):
    """An episode in which the environment says something that it did not say."""

    code, http_status, fault = "observation_forged", 422, "node"


class EpisodeOverrun(SwarmError):
    """An episode that goes on after its end."""

    code, http_status, fault = "episode_overrun", 422, "node"


class EpisodeCutShort(SwarmError):
    """An episode that stops before its end."""

    code, http_status, fault = "episode_cut_short", 422, "node"


class UnknownChunk(SwarmError):
    """This side does not hold the chunk."""

    code, http_status, fault = "unknown_chunk", 404, "peer"


class NotFound(SwarmError):
    """Nothing lives at this address."""

    code, http_status, fault = "not_found", 404, "node"


class OutOfOrder(SwarmError):
    """The learner asked for a step that does not follow the last one."""

    code, http_status, fault = "out_of_order", 409, "operator"


class ChunkMismatch(SwarmError):
    """The bytes are not those the chunk's name promises."""

    code, http_status, fault = "chunk_mismatch", 422, "peer"


class PeerFault(SwarmError):
    """A peer broke the exchange protocol, stalled or vanished."""

    code, http_status, fault = "peer_fault", 502, "peer"


class ManifestInvalid(SwarmError):
    """A policy manifest that contradicts itself, its name or its predecessor."""

    code, http_status, fault = "manifest_invalid", 422, "coordinator"


class PatchInvalid(SwarmError):
    """A patch or a weight file that is damaged, or a patch that is not made for its base."""

    code, http_status, fault = "patch_invalid", 422, "coordinator"


class UntrustedRoot(SwarmError):
    """The coordinator's root is not the one in the join string."""

    code, http_status, fault = "untrusted_root", 401, "coordinator"


class UntrustedMetadata(SwarmError):
    """Trust metadata with a wrong signature, hash or shape."""

    code, http_status, fault = "untrusted_metadata", 401, "coordinator"


class RolledBack(SwarmError):
    """Older trust metadata than what was already seen."""

    code, http_status, fault = "rolled_back", 409, "coordinator"


class MetadataExpired(SwarmError):
    """Trust metadata past its date: somebody withholds news, or a clock is wrong."""

    code, http_status, fault = "metadata_expired", 409, "coordinator"


class LedgerForked(SwarmError):
    """Two checkpoints with the ledger's signature that cannot both be true, and the proof of it."""

    code, http_status, fault = "ledger_forked", 409, "coordinator"


class CheckpointInvalid(SwarmError):
    """A checkpoint of the ledger that is malformed, or signed by somebody else."""

    code, http_status, fault = "checkpoint_invalid", 422, "coordinator"


class ProofInvalid(SwarmError):
    """A receipt, proof or tile of the ledger, or a lease told later, that does not show what it should."""

    code, http_status, fault = "proof_invalid", 422, "coordinator"


class NotWitnessed(SwarmError):
    """A checkpoint of the ledger that too few witnesses have signed."""

    code, http_status, fault = "not_witnessed", 422, "coordinator"


class DiskFull(SwarmError):
    """No room left to store what must be stored."""

    code, http_status, fault = "disk_full", 507, "node"


class EngineFailed(SwarmError):
    """The sampling engine crashed, hung, or could not load the policy."""

    code, http_status, fault = "engine_failed", 500, "node"


class EngineNotStarted(EngineFailed):
    """The engine's program is missing or does not come up: no policy is at fault."""

    code = "engine_not_started"


class AuditFailed(SwarmError):
    """An audit that could not come to a verdict: evidence or a policy is missing, damaged or of no known kind."""

    code, http_status, fault = "audit_failed", 500, "coordinator"


class VerifierFailed(SwarmError):
    """A reward process hung, crashed, or gave no proper reward for a group's completions."""

    code, http_status, fault = "verifier_error", 500, "coordinator"


class VerifierDown(SwarmError):
    """Reward processes do not even start; groups wait until they do."""

    code, http_status, fault = "verifier_down", 500, "operator"


class Unreachable(SwarmError):
    """The coordinator did not answer in time."""

    code, http_status = "unreachable", 503
    fault: ClassVar[Fault] = "network"


class Overloaded(Unreachable):
    """The coordinator has more to do than it can; the header Retry-After says when to come again."""

    code, http_status, fault = "overloaded", 503, "coordinator"


class ConfigInvalid(SwarmError):
    """A setting that is unknown or out of range."""

    code, http_status, fault = "config_invalid", 422, "operator"


def named(error: BaseException) -> str:
    """What an error says on a terminal, with its code behind it if it has one."""
    code = f" [{error.code}]" if isinstance(error, SwarmError) else ""
    return (one_line(str(error)) or type(error).__name__) + code


def _table(base: type[SwarmError]) -> dict[str, type[SwarmError]]:
    return {base.code: base} | {code: error for child in base.__subclasses__() for code, error in _table(child).items()}


ERRORS: dict[str, type[SwarmError]] = _table(SwarmError)  # by their wire codes
