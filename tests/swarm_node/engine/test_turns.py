"""A turn of an episode: a continuation of at most `turn_tokens_max` tokens, with the tokens of a whole sample."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.policy.manifest import Sampler
from protocol.work.fragment import Finish
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest
from tests.swarm_node.engine.asking import END, PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make

OBSERVED = [21, END, 23]
"""What an environment answers; it may contain any token."""


def loaded(make: Make, folder: Path, slots: int = 64) -> Engine:
    engine = make(slots=slots)
    engine.load(folder, 1)
    return engine


def answered(tokens: bytes, observed: Sequence[int] = OBSERVED, finish: Finish = "") -> Prefix:
    return Prefix(tokens=tokens + pack_tokens(list(observed)), finish=finish)


@pytest.mark.parametrize("slots", [3, 64])
@pytest.mark.parametrize("turn_tokens_max", [1, 4, 11, 12, 40])
def test_turns_without_an_answer_between_them_make_the_undisturbed_sample(
    pair: tuple[Make, Path], slots: int, turn_tokens_max: int
) -> None:
    """Turns of one token, several turns, all but one token, exactly one turn, and a turn longer than the sample."""
    make, folder = pair
    engine = loaded(make, folder, slots)
    wanted = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    whole = sample(loaded(make, folder), *wanted)
    for request in wanted:
        tokens = [b""] * request.samples
        logprobs = [b""] * request.samples
        finishes: list[Finish] = [""] * request.samples
        turn = request.model_copy(update={"turn_tokens_max": turn_tokens_max})
        while True:
            (drawn,) = sample(engine, turn).values()
            for number, one in enumerate(drawn):
                assert len(one.tokens) <= 4 * turn_tokens_max
                tokens[number] += one.tokens
                logprobs[number] += one.logprobs
                is_over = one.finish == "stop" or len(tokens[number]) == 4 * request.max_new_tokens
                finishes[number] = one.finish if is_over else ""
            if all(finishes):
                break
            made = zip(tokens, finishes, strict=True)
            prefixes = tuple(Prefix(tokens=drawn, finish=finish) for drawn, finish in made)
            turn = turn.model_copy(update={"prefixes": prefixes})
        expected = whole[request.request_id]
        assert tokens == [one.tokens for one in expected]
        assert finishes == [one.finish for one in expected]
        for number, one in enumerate(expected):
            found, right = (unpack_logprobs(values).tolist() for values in (logprobs[number], one.logprobs))
            assert found == pytest.approx(right, abs=1e-5)


def test_a_turn_after_an_observation_equals_a_continuation_of_the_same_prefix(pair: tuple[Make, Path]) -> None:
    """It stops after `turn_tokens_max` tokens, where an ordinary sample goes on; the observation counts for neither."""
    make, folder = pair
    first = asked(PROMPTS[2], 5, turn_tokens_max=3, max_new_tokens=16)
    engine = loaded(make, folder)
    (drawn,) = sample(engine, first).values()
    assert {one.finish for one in drawn if len(one.tokens) == 12 and last(one) != END} <= {"length"}
    prefixes = tuple(answered(one.tokens) for one in drawn)
    (second,) = sample(engine, first.model_copy(update={"prefixes": prefixes})).values()
    (ordinary,) = sample(
        loaded(make, folder), first.model_copy(update={"prefixes": prefixes, "turn_tokens_max": 0})
    ).values()
    for one, longer, prefix in zip(second, ordinary, prefixes, strict=True):
        assert longer.tokens.startswith(one.tokens)
        assert len(one.tokens) <= min(12, 64 - len(prefix.tokens))
        assert one.finish == ("stop" if last(one) == END else "length")


@pytest.mark.parametrize(("max_new_tokens", "count"), [(13, 1), (14, 2), (16, 4), (17, 4)])
def test_a_turn_ends_at_the_end_of_the_sample(make: Make, policy: Path, max_new_tokens: int, count: int) -> None:
    """A prefix of 12 tokens leaves room for one token, for a part of a turn, for exactly one turn, and for more."""
    engine = loaded(make, policy)
    prefix = Prefix(tokens=pack_tokens([19] * 12), finish="")
    request = asked(PROMPTS[1], samples=8, max_new_tokens=max_new_tokens, turn_tokens_max=4, prefixes=(prefix,) * 8)
    (drawn,) = sample(engine, request).values()
    assert {len(one.tokens) // 4 for one in drawn if one.finish == "length"} <= {count}
    assert all(len(one.tokens) <= 4 * count for one in drawn)


def test_a_sample_whose_episode_is_over_is_not_continued(make: Make, policy: Path) -> None:
    engine = loaded(make, policy)
    over = Prefix(tokens=pack_tokens([19, END]), finish="stop")
    request = asked(PROMPTS[1], samples=2, turn_tokens_max=4, prefixes=(over, answered(pack_tokens([19]))))
    ((ended, drawn),) = sample(engine, request).values()
    assert ended == Sample(tokens=b"", logprobs=pack_logprobs([]), finish="stop")
    assert unpack_tokens(drawn.tokens).size


def test_a_turn_reports_no_fragments(make: Make, policy: Path) -> None:
    sampler = Sampler(temperature=1.0, max_new_tokens=12)
    lease = Lease(
        lease_id="0" * 32,
        version=1,
        seed=1,
        samples=4,
        prompt=pack_tokens([19]),
        price_micros_per_mtok=1,
        expires_ms=0,
        turn_tokens_max=5,
    )
    assert SampleRequest.from_lease(lease, sampler, tell_every_s=1e-9).tell_every_s == 0.0
    ordinary = lease.model_copy(update={"turn_tokens_max": 0})
    assert SampleRequest.from_lease(ordinary, sampler, tell_every_s=1e-9).tell_every_s
    engine = loaded(make, policy)
    engine.add(SampleRequest.from_lease(lease, sampler, tell_every_s=1e-9))
    said = []
    while engine.busy:
        said += engine.step()
    assert [type(one) for one in said] == [GroupDone]


def last(one: Sample) -> int:
    return int(unpack_tokens(one.tokens)[-1])
