"""Fragments: the tokens that a node has sampled of a group so far, sent before the group is complete.

- A node sends fragments of groups that take long. If it goes offline, another node continues where it stopped, and both
  are paid.
- Each fragment has only the tokens that are new since the previous one, which it names. So the last one's hash covers
  all of them; it is the id of the claim that they make if another node finishes the group.
- A complete group is never sent as a fragment: it is submitted as a rollout.
- The checks show only that the policy could have produced the tokens, not that they are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from protocol import limits
from protocol.errors import FragmentMismatch
from protocol.ids import Hex32, Hex64
from protocol.policy import chunks
from protocol.wire.message import Message
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import Completion, PolicyBounds, check_logprobs, check_tokens, unpack_logprobs, unpack_tokens

Finish = Literal["", "stop", "length"]
"""The end of a sample; empty while it is incomplete."""


class FragmentPart(Message):
    """The new tokens of one sample."""

    sample: int = Field(ge=0, lt=limits.SAMPLES_MAX)
    start: int = Field(ge=0, le=limits.TOKENS_MAX)
    """The number of tokens of this sample that the same node has sent before."""
    tokens: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    logprobs: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    finish: Finish


class Fragment(Message):
    """The new tokens of a group, as its node signs them."""

    round_id: Hex64
    lease_id: Hex32
    lease_digest: Hex64
    previous: Hex64 | Literal[""]
    """BLAKE3 of the previous payload; empty for the first."""
    parts: tuple[FragmentPart, ...] = Field(min_length=1, max_length=limits.SAMPLES_MAX)


@dataclass(frozen=True)
class Begun:
    """The tokens of a sample that a node has sent so far."""

    tokens: bytes = b""
    logprobs: bytes = b""
    finish: Finish = ""

    @property
    def count(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True)
class Grown:
    """The number of tokens of a sample that a node has sent so far."""

    count: int = 0
    finish: Finish = ""


def grown(before: Sequence[Grown], fragment: Fragment) -> tuple[Grown, ...]:
    """Return the progress of the samples after one more checked fragment."""
    after = list(before)
    for part in fragment.parts:
        after[part.sample] = Grown(before[part.sample].count + len(part.tokens) // 4, part.finish)
    return tuple(after)


def combine_fragments(lease: Lease, fragments: Sequence[Fragment]) -> tuple[Begun, ...]:
    """Combine the checked fragments of a lease, for each of its samples."""
    samples = [Begun()] * lease.samples
    for fragment in fragments:
        for part in fragment.parts:
            before = samples[part.sample]
            samples[part.sample] = Begun(before.tokens + part.tokens, before.logprobs + part.logprobs, part.finish)
    return tuple(samples)


def check_fragment(
    fragment: Fragment, lease: Lease, round_id: str, bounds: PolicyBounds, *, before: Sequence[Grown], head: str
) -> None:
    """Check that a fragment of this lease continues `before`, whose last fragment has the hash `head`."""
    expected = (round_id, lease.lease_id, lease.digest, head)
    if (fragment.round_id, fragment.lease_id, fragment.lease_digest, fragment.previous) != expected:
        raise FragmentMismatch("The fragment does not match its lease, or does not follow the previous fragment.")
    if lease.turn_tokens_max:
        raise FragmentMismatch("A turn of an episode has no fragments: submit the whole turn.")
    prefixes = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    growing = {
        number
        for number, (progress, prefix) in enumerate(zip(before, prefixes, strict=True))
        if not (progress.finish or prefix.finish)
    }
    limit = lease.completion_max(bounds.max_new_tokens)
    for part in fragment.parts:
        number = part.sample
        if number not in growing or part.start != before[number].count:
            raise FragmentMismatch(f"Sample {number} does not continue at its last token, or is complete.")
        start = len(prefixes[number].tokens) // 4 + part.start
        tokens = check_tokens(number, part.tokens, part.finish, bounds, start=start, limit=limit)
        check_logprobs(number, part.logprobs, len(tokens))
    if len({part.sample for part in fragment.parts}) < len(fragment.parts):
        raise FragmentMismatch("The fragment contains a sample twice.")
    if growing == {part.sample for part in fragment.parts if part.finish}:
        raise FragmentMismatch("This fragment would complete the group.", hint="Submit the group as a rollout.")


def check_fragments(
    payloads: Sequence[bytes], lease: Lease, round_id: str, bounds: PolicyBounds
) -> tuple[Completion, ...]:
    """Check all fragment payloads of a lease in order; return its samples so far, empty if no fragment has them."""
    fragments, before, head = list[Fragment](), (Grown(),) * lease.samples, ""
    for payload in payloads:
        fragment = Fragment.from_bytes(payload)
        check_fragment(fragment, lease, round_id, bounds, before=before, head=head)
        fragments.append(fragment)
        before, head = grown(before, fragment), chunks.digest(payload)
    prefixes = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    return tuple(
        Completion(
            tokens=unpack_tokens(sample.tokens),
            logprobs=unpack_logprobs(sample.logprobs),
            finish=sample.finish or prefix.finish,
            start=len(prefix.tokens) // 4,
        )
        for sample, prefix in zip(combine_fragments(lease, fragments), prefixes, strict=True)
    )


def joined(lease: Lease, parts: Sequence[Begun]) -> tuple[Prefix, ...]:
    """Return the lease's prefixes, extended by the tokens that its own node has added."""
    old = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    return tuple(
        prefix if prefix.finish else Prefix(tokens=prefix.tokens + part.tokens, finish=part.finish)
        for prefix, part in zip(old, parts, strict=True)
    )
