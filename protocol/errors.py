"""All error classes of the swarm, with their wire code, HTTP status and fault (the side that caused the error).

- The message tells people what happened, the hint what to do next. Programs use `code`; its meaning never changes.
- A normal outcome ("already accepted") is a result, not an error, and is not listed here.
"""

from typing import ClassVar, Literal

from protocol.breach import UNSAID, Breach
from protocol.text.plain import one_line

Fault = Literal["node", "peer", "coordinator", "operator", "network", "caller"]


class SwarmError(Exception):
    """An internal error without a specific code; raise a subclass."""

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
        """Rebuild an error from its wire fields; an unknown code becomes a plain `SwarmError` with its text."""
        fields = value if isinstance(value, dict) else {}
        known = ERRORS.get(str(fields.get("code")), SwarmError)
        message = str(fields.get("message", "The other side reported an error without a message."))
        return known(message[:500], hint=str(fields.get("hint", ""))[:500], breach=Breach.from_wire(fields))


class MalformedMessage(SwarmError):
    """The message cannot be decoded, or a field is missing or has the wrong type."""

    code, http_status, fault = "malformed_message", 400, "node"


class MessageTooLarge(SwarmError):
    """The message exceeds a size, count or depth limit of `protocol.limits`."""

    code, http_status, fault = "message_too_large", 413, "node"


class FieldRefused(SwarmError):
    """A field of a query is unknown, out of range, or has a value that the endpoint does not offer."""

    code, http_status, fault = "field_refused", 400, "caller"


class NotCanonical(SwarmError):
    """The message can be decoded, but it is not in the canonical encoding."""

    code, http_status, fault = "not_canonical", 400, "node"


class NotRead(SwarmError):
    """The coordinator skipped this rollout: its request contained too many malformed ones. Send it again alone."""

    code, http_status, fault = "not_read", 422, "node"


class NonFiniteNumber(SwarmError):
    """The message contains NaN or infinity where a finite number is required."""

    code, http_status, fault = "non_finite_number", 422, "node"


class BadSignature(SwarmError):
    """The signature does not match the message and the key."""

    code, http_status, fault = "bad_signature", 401, "node"


class WrongAudience(SwarmError):
    """The request was signed for another round or another path."""

    code, http_status, fault = "wrong_audience", 401, "node"


class RequestExpired(SwarmError):
    """The request's timestamp differs too much from the coordinator's clock."""

    code, http_status, fault = "request_expired", 401, "node"


class NonceReplayed(SwarmError):
    """A request with this nonce was already accepted."""

    code, http_status, fault = "nonce_replayed", 409, "node"


class NotAuthorised(SwarmError):
    """The operator's credential is missing or wrong."""

    code, http_status, fault = "not_authorised", 401, "operator"


class UnknownNode(SwarmError):
    """The key is valid, but this node has not registered in this round."""

    code, http_status, fault = "unknown_node", 403, "node"


class AgentTooOld(SwarmError):
    """The node uses a version of the protocol that this round no longer accepts."""

    code, http_status, fault = "agent_too_old", 426, "node"


class OwnerBanned(SwarmError):
    """The owner is banned: audits found two rollouts that no honest node could have produced."""

    code, http_status, fault = "owner_banned", 403, "node"


class OwnerConflict(SwarmError):
    """The node already works for another owner. A node's owner never changes; a new owner needs a new node key."""

    code, http_status, fault = "owner_conflict", 409, "node"


class KeyRevoked(SwarmError):
    """The owner has revoked this node's key."""

    code, http_status, fault = "key_revoked", 403, "node"


class UnknownOwner(SwarmError):
    """The owner has no node in this round."""

    code, http_status, fault = "unknown_owner", 403, "node"


class StatementStale(SwarmError):
    """A newer statement of this owner was already accepted."""

    code, http_status, fault = "statement_stale", 409, "node"


class KeyInUse(SwarmError):
    """Two agents use one node's key at the same time, such as one in a copy of the other's home."""

    code, http_status, fault = "key_in_use", 409, "node"


class TooManyStatements(SwarmError):
    """The owner has signed too many addresses today; `Retry-After` gives the seconds to wait."""

    code, http_status, fault = "too_many_statements", 429, "node"

    def __init__(self, message: str, *, hint: str = "", breach: Breach = UNSAID, retry_after_s: int = 0) -> None:
        super().__init__(message, hint=hint, breach=breach)
        self.retry_after_s = retry_after_s


class PayoutFailed(SwarmError):
    """The payout cannot be made or completed now. Nothing was paid twice; try again later."""

    code, http_status, fault = "payout_failed", 409, "operator"


class PriceTooHigh(SwarmError):
    """The node's price is above the round's maximum price."""

    code, http_status, fault = "price_too_high", 422, "node"


class NotInvited(SwarmError):
    """The round accepts invited nodes only."""

    code, http_status, fault = "not_invited", 403, "operator"


class UnknownLease(SwarmError):
    """The coordinator never issued a lease with this id."""

    code, http_status, fault = "unknown_lease", 404, "node"


class LeaseOfAnother(SwarmError):
    """The lease belongs to another node."""

    code, http_status, fault = "lease_of_another", 403, "node"


class LeaseClosed(SwarmError):
    """The lease has expired or was returned; its group went to another node."""

    code, http_status, fault = "lease_closed", 409, "node"


class LeaseConflict(SwarmError):
    """The lease already has a claim with different content."""

    code, http_status, fault = "lease_conflict", 409, "node"


class LeaseMismatch(SwarmError):
    """The claim does not match its lease: the round id, the version, the seed or the number of samples differs."""

    code, http_status, fault = "lease_mismatch", 422, "node"


class FragmentMismatch(SwarmError):
    """The fragment does not continue the fragments that the node sent earlier for this lease."""

    code, http_status, fault = "fragment_mismatch", 422, "node"


class StaleVersion(SwarmError):
    """The rollout's model version is more than S updates behind the learner."""

    code, http_status, fault = "stale_version", 409, "node"


class TokensInvalid(SwarmError):
    """The tokens cannot come from the policy: out of vocabulary, too many, without an end, or after the end."""

    code, http_status, fault = "tokens_invalid", 422, "node"


class LogprobsInvalid(SwarmError):
    """Log-probabilities are missing, positive, too low, or not finite."""

    code, http_status, fault = "logprobs_invalid", 422, "node"


class BudgetExhausted(SwarmError):
    """The round's remaining budget does not cover another lease."""

    code, http_status, fault = "budget_exhausted", 402, "operator"


class KeyRefused(SwarmError):
    """The API key of a query is missing, unknown, expired or revoked."""

    code, http_status, fault = "key_refused", 401, "caller"


class KeyBudgetUsed(SwarmError):
    """The budget of an API key does not cover a query."""

    code, http_status, fault = "key_budget_used", 429, "caller"


class UnknownTask(SwarmError):
    """The task's name or a parameter of it is unknown."""

    code, http_status, fault = "unknown_task", 422, "operator"


class UnknownChunk(SwarmError):
    """The peer does not have this chunk."""

    code, http_status, fault = "unknown_chunk", 404, "peer"


class Misdirected(SwarmError):
    """The request names a host that is not this coordinator's, as a page of another site does that leads here."""

    code, http_status, fault = "misdirected", 421, "caller"


class NotFound(SwarmError):
    """The resource at this address does not exist."""

    code, http_status, fault = "not_found", 404, "node"


class OutOfOrder(SwarmError):
    """The learner's request does not follow its previous step."""

    code, http_status, fault = "out_of_order", 409, "operator"


class ChunkMismatch(SwarmError):
    """The chunk's bytes do not match its hash."""

    code, http_status, fault = "chunk_mismatch", 422, "peer"


class PeerFault(SwarmError):
    """A peer broke the exchange protocol, stalled or disconnected."""

    code, http_status, fault = "peer_fault", 502, "peer"


class ManifestInvalid(SwarmError):
    """The policy manifest contradicts itself, its name or its predecessor."""

    code, http_status, fault = "manifest_invalid", 422, "coordinator"


class PatchInvalid(SwarmError):
    """A patch or weight file is damaged, or the patch does not fit its base."""

    code, http_status, fault = "patch_invalid", 422, "coordinator"


class UntrustedRoot(SwarmError):
    """The coordinator's root key does not match the join string."""

    code, http_status, fault = "untrusted_root", 401, "coordinator"


class UntrustedMetadata(SwarmError):
    """The signed metadata has a wrong signature, hash or format."""

    code, http_status, fault = "untrusted_metadata", 401, "coordinator"


class RolledBack(SwarmError):
    """The coordinator served older signed metadata than this node has already seen."""

    code, http_status, fault = "rolled_back", 409, "coordinator"


class MetadataExpired(SwarmError):
    """The signed metadata has expired: updates are withheld, or a clock is wrong."""

    code, http_status, fault = "metadata_expired", 409, "coordinator"


class LedgerForked(SwarmError):
    """The ledger's key signed two contradicting checkpoints. The saved file proves it."""

    code, http_status, fault = "ledger_forked", 409, "coordinator"


class CheckpointInvalid(SwarmError):
    """The checkpoint of the ledger is malformed, or signed by another key."""

    code, http_status, fault = "checkpoint_invalid", 422, "coordinator"


class ProofInvalid(SwarmError):
    """A receipt, a proof, a ledger tile or a reported lease does not prove what it should."""

    code, http_status, fault = "proof_invalid", 422, "coordinator"


class NotWitnessed(SwarmError):
    """Too few witnesses signed the checkpoint of the ledger."""

    code, http_status, fault = "not_witnessed", 422, "coordinator"


class DiskFull(SwarmError):
    """The disk does not have enough free space."""

    code, http_status, fault = "disk_full", 507, "node"


class EngineFailed(SwarmError):
    """The sampling engine crashed, hung, or could not load the policy."""

    code, http_status, fault = "engine_failed", 500, "node"


class EngineNotStarted(EngineFailed):
    """The engine's program is missing or does not start. The policy is not the cause."""

    code = "engine_not_started"


class AuditFailed(SwarmError):
    """The audit ended without a verdict: evidence or a policy is missing, damaged or of an unknown kind."""

    code, http_status, fault = "audit_failed", 500, "coordinator"


class VerifierFailed(SwarmError):
    """A task process hung, crashed, or returned no valid reward for a completion of the group.

    Nodes and public pages see `message`. `detail`, for the log, also has what the operator's code said: maybe answers.
    """

    code, http_status, fault = "verifier_error", 500, "coordinator"

    def __init__(self, message: str, *, detail: str = "", hint: str = "", breach: Breach = UNSAID) -> None:
        super().__init__(message, hint=hint, breach=breach)
        self.detail = detail or message


class VerifierDown(SwarmError):
    """The task processes do not start, or the judge's budget is used up; groups wait until that is mended."""

    code, http_status, fault = "verifier_down", 500, "operator"


class Unreachable(SwarmError):
    """The coordinator did not respond in time."""

    code, http_status = "unreachable", 503
    fault: ClassVar[Fault] = "network"


class Overloaded(Unreachable):
    """The coordinator is overloaded; `Retry-After` gives the seconds to wait."""

    code, http_status, fault = "overloaded", 503, "coordinator"

    def __init__(self, message: str, *, hint: str = "", breach: Breach = UNSAID, retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint, breach=breach)
        self.retry_after_s = retry_after_s


class WrongAddress(Unreachable):
    """No coordinator is at this address: the host does not exist, or another server answers."""

    code, http_status, fault = "wrong_address", 503, "node"


class AnswerChanged(SwarmError):
    """A node was lost after a caller had read a part of its answer, and the whole answer begins otherwise."""

    code, http_status, fault = "answer_changed", 503, "network"


class ConfigInvalid(SwarmError):
    """A setting or an argument is unknown or out of range."""

    code, http_status, fault = "config_invalid", 422, "operator"


def named(error: BaseException) -> str:
    """Return the error's text for a terminal, followed by its code if it has one."""
    code = f" [{error.code}]" if isinstance(error, SwarmError) else ""
    return (one_line(str(error)) or type(error).__name__) + code


def _table(base: type[SwarmError]) -> dict[str, type[SwarmError]]:
    return {base.code: base} | {code: error for child in base.__subclasses__() for code, error in _table(child).items()}


ERRORS: dict[str, type[SwarmError]] = _table(SwarmError)  # by their wire codes
