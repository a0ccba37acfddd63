"""Rollout claims: a node's signed samples for a lease, and the checks that need nothing else.

- Tokens and log-probabilities are packed little-endian arrays: small, and checked in one operation.
- A claim has the digest of its lease, so the node's signature binds the answer to the whole lease.
- A turn of an episode is an answer like any other: its observations are in the lease, so nobody can alter them.
- The counted tokens are the checked tokens: they are decoded once, here, and all code uses that array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from protocol import limits
from protocol.breach import POSITIONS_MAX, Breach, different
from protocol.errors import LeaseMismatch, LogprobsInvalid, TokensInvalid
from protocol.ids import Hex32, Hex64
from protocol.wire.message import Message
from protocol.work.lease import Lease, Prefix, length_max

Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]

REPEATED = ("round_id", "lease_id", "lease_digest", "samples")
"""The fields of its lease that a claim repeats; of the samples, their number."""


class Sample(Message):
    """A completion: its tokens up to and with the end token, and the log-probability of each when it was drawn.

    For a lease with prefixes it has the tokens after the prefix: none if the prefix was complete.
    """

    tokens: bytes = Field(max_length=4 * limits.TOKENS_MAX)
    logprobs: bytes = Field(max_length=4 * limits.TOKENS_MAX)
    finish: Literal["stop", "length"]


class RolloutClaim(Message):
    """A node's answer to a lease."""

    round_id: Hex64
    lease_id: Hex32
    lease_digest: Hex64
    """The digest of the lease as the node received it: a node is not blamed if the lease was altered on the way."""
    samples: tuple[Sample, ...] = Field(min_length=1, max_length=limits.SAMPLES_MAX)


def end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end a completion: those of generation_config.json if it has any, else of config.json."""
    named = generation.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    tokens = named if isinstance(named, list) else [named]
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise TokensInvalid(f"The policy's files name no valid end token, but {str(named)[:60]}.")
    return frozenset(tokens)


@dataclass(frozen=True)
class PolicyBounds:
    """The limits of a policy's tokens, from its own files."""

    vocab_size: int
    end_tokens: frozenset[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """A sample that passed every check; without its prefix."""

    tokens: Tokens
    logprobs: Logprobs
    finish: Literal["", "stop", "length"]
    """Empty if another node continued it."""
    start: int = 0
    """The position of its first token: the length of the prefix."""


def pack_tokens(tokens: list[int] | Tokens) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def pack_logprobs(logprobs: list[float] | Logprobs) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_tokens(data: bytes) -> Tokens:
    if len(data) % 4:
        seen = different("samples.tokens", "a multiple of 4 bytes", f"{len(data)} bytes")
        raise TokensInvalid(f"{len(data)} bytes are not an array of 32-bit tokens.", breach=seen)
    return np.frombuffer(data, dtype="<u4")


def unpack_logprobs(data: bytes) -> Logprobs:
    return np.frombuffer(data, dtype="<f4")


def check_claim(claim: RolloutClaim, lease: Lease, round_id: str, bounds: PolicyBounds) -> tuple[Completion, ...]:
    """Check that a claim answers this lease with tokens that the policy could have produced; return its completions."""
    leased = (round_id, lease.lease_id, lease.digest, lease.samples)
    claimed = (claim.round_id, claim.lease_id, claim.lease_digest, len(claim.samples))
    for name, wanted, said in zip(REPEATED, leased, claimed, strict=True):
        if said != wanted:
            raise LeaseMismatch(
                "The claim does not match its lease: the round id, the lease digest or the number of samples differs.",
                breach=different(name, wanted, said),
            )
    if not lease.prefixes and _are_sound(claim.samples, lease, bounds):
        return tuple(
            Completion(unpack_tokens(sample.tokens), unpack_logprobs(sample.logprobs), sample.finish)
            for sample in claim.samples
        )
    prefixes = lease.prefixes or [None] * lease.samples
    return tuple(
        _check_sample(number, sample, prefix, lease, bounds)
        for number, (sample, prefix) in enumerate(zip(claim.samples, prefixes, strict=True))
    )


def _are_sound(samples: Sequence[Sample], lease: Lease, bounds: PolicyBounds) -> bool:
    """Return True if all samples pass `_check_sample`, in one operation; else `_check_sample` finds the error.

    Operations on arrays of a few tokens cost as much as on thousands.
    """
    position, last = 0, []
    limit = length_max(0, lease.turn_tokens_max, lease.completion_max(bounds.max_new_tokens))
    for sample in samples:
        count = len(sample.tokens) // 4
        position += count
        if not len(sample.tokens) == len(sample.logprobs) == 4 * count or not 0 < count <= limit:
            return False
        if sample.finish == "stop":
            last.append(position - 1)
        elif count != limit:
            return False
    tokens = unpack_tokens(b"".join(sample.tokens for sample in samples))
    ends = np.logical_or.reduce([tokens == end for end in bounds.end_tokens])
    logprobs = unpack_logprobs(b"".join(sample.logprobs for sample in samples))
    return (
        int(tokens.max()) < bounds.vocab_size
        and np.flatnonzero(ends).tolist() == last
        and bool(np.isfinite(logprobs).all())
        and float(logprobs.max()) <= 0
        and float(logprobs.min()) >= limits.LOGPROB_MIN
    )


def _check_sample(number: int, sample: Sample, prefix: Prefix | None, lease: Lease, bounds: PolicyBounds) -> Completion:
    if prefix is not None and prefix.finish:
        if (sample.tokens, sample.logprobs, sample.finish) != (b"", b"", prefix.finish):
            seen = different(f"samples.{number}", "nothing more", f"{len(sample.tokens) // 4} tokens, {sample.finish}")
            raise TokensInvalid(f"Sample {number} continues although its prefix is complete.", breach=seen)
        return Completion(unpack_tokens(b""), np.zeros(0, "<f4"), sample.finish, len(prefix.tokens) // 4)
    start = len(prefix.tokens) // 4 if prefix is not None else 0
    limit = length_max(start, lease.turn_tokens_max, lease.completion_max(bounds.max_new_tokens))
    tokens = check_tokens(number, sample.tokens, sample.finish, bounds, start=start, limit=limit)
    return Completion(tokens, check_logprobs(number, sample.logprobs, len(tokens)), sample.finish, start)


def whole_tokens(lease: Lease, completions: Sequence[Completion]) -> list[Tokens]:
    """Return the tokens of each sample, with its prefix."""
    if not lease.prefixes:
        return [completion.tokens for completion in completions]
    return [
        np.concatenate([unpack_tokens(prefix.tokens), completion.tokens])
        for prefix, completion in zip(lease.prefixes, completions, strict=True)
    ]


def check_tokens(
    number: int, data: bytes, finish: str, bounds: PolicyBounds, *, start: int = 0, limit: int = 0
) -> Tokens:
    """Check and return a sample's tokens from position `start` on; a sample without a `finish` must be incomplete.

    `limit` is the length at which it must stop; 0: the longest completion.
    """
    tokens = unpack_tokens(data)
    end, limit = start + len(tokens), limit or bounds.max_new_tokens
    _check_count(number, tokens, start, limit, bounds)
    ends = np.logical_or.reduce([tokens == end for end in bounds.end_tokens])
    last, said = len(tokens) - 1, finish or "nothing"
    if ends[:-1].any():
        seen = _places(number, "tokens", "an end token at the end only", tokens[:-1], ends[:-1])
        raise TokensInvalid(f"Sample {number} continues after its end token.", breach=seen)
    if ends[-1] != (finish == "stop"):
        fits, observed = "stop" if ends[-1] else "no stop", f"{said} after token {int(tokens[-1])}"
        raise TokensInvalid(
            f"Sample {number} reports the finish {said}, but its last token does not fit that.",
            breach=Breach(f"samples.{number}.finish", fits, observed, ((number, last),)),
        )
    if (finish == "length") != (end == limit and finish != "stop"):
        fits, observed = f"length at {limit} tokens, and only there", f"{said} at {end} tokens"
        raise TokensInvalid(
            f"Sample {number} has {end} tokens and the finish {said}, which do not fit the limit of {limit} tokens.",
            breach=Breach(f"samples.{number}.finish", fits, observed, ((number, last),)),
        )
    return tokens


def _check_count(number: int, tokens: Tokens, start: int, limit: int, bounds: PolicyBounds) -> None:
    end = start + len(tokens)
    if len(tokens) < 1 or end > limit:
        said = f"{end} tokens, {len(tokens)} new"
        raise TokensInvalid(
            f"Sample {number} has {said}; 1 to {limit} are allowed.",
            breach=different(f"samples.{number}.tokens", f"1 to {limit} tokens", said),
        )
    if int(tokens.max()) >= bounds.vocab_size:
        raise TokensInvalid(
            f"Sample {number} has token {int(tokens.max())}; the vocabulary has {bounds.vocab_size} tokens.",
            breach=_places(number, "tokens", f"below {bounds.vocab_size}", tokens, tokens >= bounds.vocab_size),
        )


def check_logprobs(number: int, data: bytes, count: int) -> Logprobs:
    if len(data) != 4 * count:
        raise LogprobsInvalid(
            f"Sample {number} has {count} tokens, but {len(data)} bytes of log-probabilities.",
            breach=different(f"samples.{number}.logprobs", f"{4 * count} bytes", f"{len(data)} bytes"),
        )
    logprobs = unpack_logprobs(data)
    if not np.isfinite(logprobs).all():
        raise LogprobsInvalid(
            f"Sample {number} has a log-probability that is not a finite number.",
            breach=_places(number, "logprobs", "finite numbers", logprobs, ~np.isfinite(logprobs)),
        )
    wrong = (logprobs > 0) | (logprobs < limits.LOGPROB_MIN)
    if wrong.any():
        first = float(logprobs[wrong][0])
        where = "above 0" if first > 0 else f"below {limits.LOGPROB_MIN:g}"
        raise LogprobsInvalid(
            f"Sample {number} has the log-probability {first:.4g}, {where}.",
            breach=_places(number, "logprobs", f"{limits.LOGPROB_MIN:g} to 0", logprobs, wrong),
        )
    return logprobs


def _places(number: int, name: str, expected: str, values: Tokens | Logprobs, wrong: npt.NDArray[np.bool_]) -> Breach:
    """Return a breach with the first wrong values of a sample and their places in the claim."""
    at = np.flatnonzero(wrong)[:POSITIONS_MAX].tolist()
    observed = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[at].tolist())
    return Breach(f"samples.{number}.{name}", expected, observed, tuple((number, place) for place in at))
