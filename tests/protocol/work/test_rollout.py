"""Rollout claims: only tokens and log-probabilities that the policy could have produced pass, for the lease given."""

from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import LeaseMismatch, LogprobsInvalid, MalformedMessage, TokensInvalid
from protocol.wire import canonical
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import (
    PolicyBounds,
    RolloutClaim,
    Sample,
    check_claim,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)

ROUND = "a" * 64
END, OTHER_END, VOCAB, MAX_NEW = 1, 2, 50, 4
BOUNDS = PolicyBounds(vocab_size=VOCAB, end_tokens=frozenset({END, OTHER_END}), max_new_tokens=MAX_NEW)
LEASE = Lease(
    lease_id="1" * 32,
    version=3,
    seed=7,
    samples=2,
    prompt=pack_tokens([5, 6]),
    price_micros_per_mtok=1,
    expires_ms=0,
)

OTHERWISE: dict[str, Any] = {
    "lease_id": "2" * 32,
    "version": 2,  # a stale model under the new name
    "seed": 8,
    "samples": 3,
    "prompt": pack_tokens([5, 7]),
    "price_micros_per_mtok": 2,
    "expires_ms": 1,
    "judged_as": "torch/bf16/cuda",
    "prefixes": (Prefix(tokens=pack_tokens([10]), finish=""),) * 2,
    "turn_tokens_max": 2,
    "context_tokens_paid": 1,
    "temperature": 0.0,  # of somebody who wants likelier answers
    "tokens_max": 2,
    "report_every_ms": 50,
}


def sample(
    tokens: list[int], finish: Literal["stop", "length"] = "stop", logprobs: list[float] | bytes | None = None
) -> Sample:
    chances = [-0.5] * len(tokens) if logprobs is None else logprobs
    packed = chances if isinstance(chances, bytes) else pack_logprobs(chances)
    return Sample(tokens=pack_tokens(tokens), logprobs=packed, finish=finish)


GOOD = sample([10, END])


def check(*samples: Sample, **change: Any) -> None:
    fields: dict[str, Any] = {"round_id": ROUND, "lease_id": LEASE.lease_id, "lease_digest": LEASE.digest} | change
    check_claim(RolloutClaim(samples=samples, **fields), LEASE, ROUND, BOUNDS)


def test_a_claim_that_answers_its_lease_passes() -> None:
    check(GOOD, sample([10, 11, 12, 13], "length"))
    check(sample([END]), sample([10, 11, 12, OTHER_END]))


@pytest.mark.parametrize(
    "change",
    [
        {"round_id": "b" * 64},
        {"lease_id": "2" * 32},
        {"lease_digest": "2" * 64},
    ],
    ids=str,
)
def test_a_claim_for_another_lease_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LeaseMismatch):
        check(GOOD, GOOD, **change)


@pytest.mark.parametrize("name", Lease.model_fields)
def test_every_word_of_a_lease_is_signed_with_the_answer(name: str) -> None:
    """Else whoever sits between could have a node asked something else, and blamed for its answer."""
    asked = LEASE.model_copy(update={name: OTHERWISE[name]})
    with pytest.raises(LeaseMismatch, match="does not match its lease"):
        check(GOOD, GOOD, lease_digest=asked.digest)


@pytest.mark.parametrize("count", [1, 3])
def test_more_or_fewer_samples_than_asked_are_refused(count: int) -> None:
    with pytest.raises(LeaseMismatch):
        check(*[GOOD] * count)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(sample([], logprobs=b""), id="no tokens at all"),
        pytest.param(sample([10] * (MAX_NEW + 1), "length"), id="too long"),
        pytest.param(sample([10] * MAX_NEW + [END]), id="one token too long, the end token"),
        pytest.param(sample([VOCAB, END]), id="out of vocabulary"),
        pytest.param(sample([2**32 - 1, END]), id="far out of vocabulary"),
        pytest.param(sample([END, END]), id="two end tokens"),
        pytest.param(sample([END, 10, OTHER_END]), id="goes on after an end token"),
        pytest.param(sample([OTHER_END, 10, 11, 12], "length"), id="padded after the end"),
        pytest.param(sample([10, 11]), id="no end, but says stop"),
        pytest.param(sample([10, 11, 12, 13]), id="full without an end, but says stop"),
        pytest.param(sample([10, 11], "length"), id="cut short, but says length"),
        pytest.param(sample([10, END], "length"), id="ended, but says length"),
        pytest.param(sample([10, 11, 12, END], "length"), id="ended at the very limit, but says length"),
        pytest.param(Sample(tokens=b"\1\0\0", logprobs=bytes(4), finish="stop"), id="three bytes"),
        pytest.param(Sample(tokens=pack_tokens([END]) + b"\0", logprobs=bytes(4), finish="stop"), id="five bytes"),
    ],
)
def test_tokens_that_no_policy_produced_are_refused(bad: Sample) -> None:
    for pair in ((bad, GOOD), (GOOD, bad)):
        with pytest.raises(TokensInvalid):
            check(*pair)


@pytest.mark.parametrize(
    "logprobs",
    [
        pytest.param([-0.5, np.nan], id="NaN"),
        pytest.param([-np.inf, -0.5], id="minus infinity"),
        pytest.param([np.inf, -0.5], id="infinity"),
        pytest.param([-0.5, 0.5], id="positive"),
        pytest.param([-0.5, 1e-6], id="a little positive"),
        pytest.param([-0.5, 1e-45], id="the least positive"),
        pytest.param([-0.5, -3e38], id="absurdly low"),
        pytest.param([-0.5, float(np.nextafter(np.float32(limits.LOGPROB_MIN), np.float32(-np.inf)))], id="too low"),
        pytest.param([-0.5], id="one missing"),
        pytest.param([-0.5] * 3, id="one too many"),
        pytest.param(b"", id="none"),
        pytest.param(bytes(7), id="half a number"),
        pytest.param(bytes(16), id="in double precision"),
        pytest.param(b"\x01\x00\x80\x7f" + bytes(4), id="signalling NaN"),
    ],
)
def test_log_probabilities_that_cannot_be_are_refused(logprobs: list[float] | bytes) -> None:
    with pytest.raises(LogprobsInvalid):
        check(GOOD, sample([10, END], logprobs=logprobs))


def test_a_sure_token_and_the_least_likely_pass() -> None:
    check(GOOD, sample([10, END], logprobs=[0.0, limits.LOGPROB_MIN]))
    check(GOOD, sample([10, END], logprobs=[-0.0, -36.7]))


def test_counted_is_what_was_checked() -> None:
    claim = RolloutClaim(
        round_id=ROUND, lease_id=LEASE.lease_id, lease_digest=LEASE.digest, samples=(GOOD, sample([END]))
    )
    completions = check_claim(claim, LEASE, ROUND, BOUNDS)
    assert [item.tokens.tolist() for item in completions] == [[10, END], [END]]
    assert [item.finish for item in completions] == ["stop", "stop"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed).tolist() == tokens


@given(st.binary(max_size=24), st.binary(max_size=24), st.sampled_from(["stop", "length"]))
def test_random_arrays_pass_only_if_every_rule_holds(
    tokens: bytes, logprobs: bytes, finish: Literal["stop", "length"]
) -> None:
    try:
        check(GOOD, Sample(tokens=tokens, logprobs=logprobs, finish=finish))
    except (TokensInvalid, LogprobsInvalid):
        return
    ids = np.frombuffer(tokens, "<u4").tolist()
    assert 1 <= len(ids) <= MAX_NEW
    assert max(ids) < VOCAB
    assert not {END, OTHER_END} & set(ids[:-1])
    assert (ids[-1] in {END, OTHER_END}) == (finish == "stop")
    assert len(logprobs) == len(tokens)


NEAR = st.tuples(
    st.lists(st.sampled_from([10, END, OTHER_END, VOCAB - 1, VOCAB]), max_size=MAX_NEW + 1),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([-0.5, 0.0, 1e-6, 0.5, -3e38, np.inf, np.nan]),
    st.integers(-1, 1),
)
"""Samples that are right or almost: tokens, how they finish, a log-probability, and how many too many there are."""


@example((([END], "stop", -0.5, -1), ([END], "stop", -0.5, 0)))  # nothing can be taken from one
@given(st.tuples(NEAR, NEAR))
def test_samples_pass_together_if_each_of_them_may(pair: tuple[Any, Any]) -> None:
    samples = [
        sample(tokens, finish, [-0.5] * (len(tokens) + more - 1) + [last]) for tokens, finish, last, more in pair
    ]
    right = [
        1 <= len(tokens) <= MAX_NEW
        and max(tokens) < VOCAB
        and not {END, OTHER_END} & set(tokens[:-1])
        and (tokens[-1] in (END, OTHER_END)) == (finish == "stop")
        and (finish == "stop" or len(tokens) == MAX_NEW)
        and len(made.logprobs) == len(made.tokens)
        and limits.LOGPROB_MIN <= last <= 0
        for (tokens, finish, last, _), made in zip(pair, samples, strict=True)
    ]
    with nullcontext() if all(right) else pytest.raises((TokensInvalid, LogprobsInvalid)):
        check(*samples)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": []},
        {"samples": [GOOD.model_dump()] * (limits.SAMPLES_MAX + 1)},
        {"samples": [GOOD.model_dump() | {"finish": "eos"}]},
        {"samples": [GOOD.model_dump() | {"tokens": bytes(4 * limits.TOKENS_MAX + 4)}]},
        {"samples": [GOOD.model_dump() | {"reward": 1.0}]},  # nobody scores themselves
        {"lease_id": "1" * 31},
        {"lease_id": "'; DROP TABLE leases; --"},
        {"lease_digest": True},
        {"reward": 1.0},
    ],
    ids=lambda change: str(change)[:50],
)
def test_a_claim_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    fields = {"round_id": ROUND, "lease_id": "1" * 32, "lease_digest": "2" * 64, "samples": [GOOD.model_dump()]}
    RolloutClaim.from_bytes(canonical.encode(fields))
    with pytest.raises(MalformedMessage):
        RolloutClaim.from_bytes(canonical.encode(fields | change))
