"""A fragment: what a node has sampled of a group so far, told before the group is whole.

- A node tells of groups that take long. If it is lost, another goes on where it stopped, and both are paid.
- Each fragment has only what is new since the one before, which it names: the last one's hash stands for all of them,
  and is the id of the claim that they make if the group is finished by somebody else.
- A group that is whole is no fragment: it is submitted as a rollout.
- Nothing here says that the tokens are right, only that the policy could have produced them.
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
"""How a sample ended; empty while it has not."""


class FragmentPart(Message):
    """What one sample grew by."""

    sample: int = Field(ge=0, lt=limits.SAMPLES_MAX)
    start: int = Field(ge=0, le=limits.TOKENS_MAX)
    """How many tokens of this sample the same node has told of before."""
    tokens: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    logprobs: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    finish: Finish


class Fragment(Message):
    """What a group grew by, as its node signs it."""

    round_id: Hex64
    lease_id: Hex32
    lease_digest: Hex64
    previous: Hex64 | Literal[""]
    """BLAKE3 of the payload before; empty for the first."""
    parts: tuple[FragmentPart, ...] = Field(min_length=1, max_length=limits.SAMPLES_MAX)


@dataclass(frozen=True)
class Begun:
    """One sample as far as one node has told of it."""

    tokens: bytes = b""
    logprobs: bytes = b""
    finish: Finish = ""

    @property
    def count(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True)
class Grown:
    """How far one node has told of one sample."""

    count: int = 0
    finish: Finish = ""


def grown(before: Sequence[Grown], fragment: Fragment) -> tuple[Grown, ...]:
    """How far the samples are with one more checked fragment."""
    after = list(before)
    for part in fragment.parts:
        after[part.sample] = Grown(before[part.sample].count + len(part.tokens) // 4, part.finish)
    return tuple(after)


def combine_fragments(lease: Lease, fragments: Sequence[Fragment]) -> tuple[Begun, ...]:
    """All that checked fragments of a lease come to, for each of its samples."""
    samples = [Begun()] * lease.samples
    for fragment in fragments:
        for part in fragment.parts:
            before = samples[part.sample]
            samples[part.sample] = Begun(before.tokens + part.tokens, before.logprobs + part.logprobs, part.finish)
    return tuple(samples)


def check_fragment(
    fragment: Fragment, lease: Lease, round_id: str, bounds: PolicyBounds, *, before: Sequence[Grown], head: str
) -> None:
    """Whether a fragment of this lease continues `before`, whose last fragment has the hash `head`."""
    expected = (round_id, lease.lease_id, lease.digest, head)
    if (fragment.round_id, fragment.lease_id, fragment.lease_digest, fragment.previous) != expected:
        raise FragmentMismatch("The fragment does not repeat its lease, or does not follow the one before it.")
    if lease.episode is not None:
        raise FragmentMismatch("An episode is not handed on: its lease is answered whole.")
    prefixes = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    growing = {
        number
        for number, (told, prefix) in enumerate(zip(before, prefixes, strict=True))
        if not (told.finish or prefix.finish)
    }
    for part in fragment.parts:
        number = part.sample
        if number not in growing or part.start != before[number].count:
            raise FragmentMismatch(f"Sample {number} does not grow where it ended.")
        start = len(prefixes[number].tokens) // 4 + part.start
        tokens = check_tokens(number, part.tokens, part.finish, bounds, start=start)
        check_logprobs(number, part.logprobs, len(tokens))
    if len({part.sample for part in fragment.parts}) < len(fragment.parts):
        raise FragmentMismatch("A sample stands in the fragment twice.")
    if growing == {part.sample for part in fragment.parts if part.finish}:
        raise FragmentMismatch("With this fragment the group would be whole.", hint="Submit it as a rollout.")


def check_fragments(
    payloads: Sequence[bytes], lease: Lease, round_id: str, bounds: PolicyBounds
) -> tuple[Completion, ...]:
    """What one node has told of its lease, from all payloads in their order; samples that it left alone are empty."""
    told, before, head = list[Fragment](), (Grown(),) * lease.samples, ""
    for payload in payloads:
        fragment = Fragment.from_bytes(payload)
        check_fragment(fragment, lease, round_id, bounds, before=before, head=head)
        told.append(fragment)
        before, head = grown(before, fragment), chunks.digest(payload)
    prefixes = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    return tuple(
        Completion(
            tokens=unpack_tokens(sample.tokens),
            logprobs=unpack_logprobs(sample.logprobs),
            finish=sample.finish or prefix.finish,
            start=len(prefix.tokens) // 4,
        )
        for sample, prefix in zip(combine_fragments(lease, told), prefixes, strict=True)
    )


def joined(lease: Lease, parts: Sequence[Begun]) -> tuple[Prefix, ...]:
    """The lease's prefixes with what its own node has added."""
    old = lease.prefixes or [Prefix(tokens=b"", finish="")] * lease.samples
    return tuple(
        prefix if prefix.finish else Prefix(tokens=prefix.tokens + part.tokens, finish=part.finish)
        for prefix, part in zip(old, parts, strict=True)
    )
