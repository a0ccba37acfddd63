"""A turn of an episode: a continuation of at most `turn_tokens_max` tokens, with the tokens of a whole sample."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EngineFailed
from protocol.policy.manifest import Sampler
from protocol.work.fragment import Finish
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.turn_cache import KEPT_S
from tests.swarm_node.engine.asking import END, PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make

OBSERVED = [21, END, 23]
"""The environment's answer; it may contain any token."""


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
    """A turn stops after `turn_tokens_max` tokens, where an ordinary sample goes on; the observation counts for
    neither.
    """
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
    assert SampleRequest.from_lease(lease, sampler, report_every_s=1e-9).report_every_s == 0.0
    ordinary = lease.model_copy(update={"turn_tokens_max": 0})
    assert SampleRequest.from_lease(ordinary, sampler, report_every_s=1e-9).report_every_s
    engine = loaded(make, policy)
    engine.add(SampleRequest.from_lease(lease, sampler, report_every_s=1e-9))
    said = []
    while engine.busy:
        said += engine.step()
    assert [type(one) for one in said] == [GroupDone]


def played(engine: Engine, seed: int = 5, turns: int = 4) -> tuple[list[tuple[Sample, ...]], list[int]]:
    """The turns of an episode with observations between them, and the tokens that were computed before each."""
    request = asked(PROMPTS[3], seed, turn_tokens_max=6, max_new_tokens=64)
    begun = [b""] * request.samples
    drawn, computed = [], []
    engine.measured()
    for _ in range(turns):
        (answers,) = sample(engine, request).values()
        drawn.append(answers)
        computed.append(engine.measured().prompt_tokens)
        begun = [tokens + one.tokens + pack_tokens(OBSERVED) for tokens, one in zip(begun, answers, strict=True)]
        request = request.model_copy(update={"prefixes": tuple(Prefix(tokens=one, finish="") for one in begun)})
    return drawn, computed


@pytest.mark.parametrize("slots", [3, 64])
def test_a_kept_row_changes_no_token_and_leaves_only_what_is_new_to_compute(
    pair: tuple[Make, Path], slots: int
) -> None:
    make, folder = pair
    engine, plain = loaded(make, folder, slots), make(slots=slots, turns_max_bytes=0)
    plain.load(folder, 1)
    (kept, computed), (alone, all_of_it) = played(engine), played(plain)
    for with_rows, without in zip(kept, alone, strict=True):
        assert [(one.tokens, one.finish) for one in with_rows] == [(one.tokens, one.finish) for one in without]
        for one, other in zip(with_rows, without, strict=True):
            found, right = (unpack_logprobs(each.logprobs).tolist() for each in (one, other))
            assert found == pytest.approx(right, abs=1e-5)
    assert computed[0] == all_of_it[0]
    assert all_of_it[1:] == sorted(all_of_it[1:])
    if type(engine._decoder).__name__ == "Generic":
        assert computed == all_of_it, "this decoder resumes no rows"
    else:
        assert computed[1:] == [5 * (1 + len(OBSERVED))] * 3


def test_rows_of_other_groups_are_left_alone_and_a_row_with_other_tokens_is_not_used(make: Make, policy: Path) -> None:
    """A turn whose prefix differs in its last token but one; beside a new group, and with rows of another episode."""
    engine, plain = loaded(make, policy), make(turns_max_bytes=0)
    plain.load(policy, 1)
    request = asked(PROMPTS[3], 5, turn_tokens_max=6, max_new_tokens=64)
    (answers,) = sample(engine, request).values()
    sample(engine, asked(PROMPTS[2], 6, turn_tokens_max=6, max_new_tokens=64))
    other = [unpack_tokens(one.tokens).tolist() for one in answers]
    changed = [tokens if number else [*tokens[:-2], 33, tokens[-1]] for number, tokens in enumerate(other)]
    prefixes = tuple(answered(pack_tokens(tokens)) for tokens in changed)
    second = request.model_copy(update={"prefixes": prefixes})
    engine.measured()
    found = sample(engine, second, asked(PROMPTS[1], 9))
    assert engine.measured().prompt_tokens == len(PROMPTS[3]) + len(changed[0]) + 3 + 4 * 4 + len(PROMPTS[1])
    assert tokens_of(found) == tokens_of(sample(plain, second, asked(PROMPTS[1], 9)))


def test_no_row_outlives_its_version(make: Make, policy: Path, tmp_path: Path) -> None:
    engine = loaded(make, policy)
    first = asked(PROMPTS[3], 5, turn_tokens_max=6, max_new_tokens=64)
    (answers,) = sample(engine, first).values()
    assert len(engine._turns) == 5
    engine.load(policy, 2)
    assert len(engine._turns) == 0
    second = first.model_copy(update={"version": 2, "prefixes": tuple(answered(one.tokens) for one in answers)})
    engine.measured()
    sample(engine, second)
    assert engine.measured().prompt_tokens == sum(20 + len(one.tokens) // 4 + 3 for one in answers)


def test_old_rows_are_dropped_before_a_request_is_refused(make: Make, policy: Path) -> None:
    engine = loaded(make, policy)
    request = asked(PROMPTS[3], 5, turn_tokens_max=6, max_new_tokens=64)
    sample(engine, request)
    assert len(engine._turns) == 5
    engine._turns._now = lambda: time.monotonic() + 2 * KEPT_S
    with pytest.raises(EngineFailed, match="not one for each sample"):
        engine.add(request.model_copy(update={"prefixes": (Prefix(tokens=b"", finish=""),)}))
    assert len(engine._turns) == 0


@pytest.mark.parametrize("where", ["save", "resume"])
def test_without_memory_the_kept_rows_go_first_and_no_slot_is_lost(make: Make, policy: Path, where: str) -> None:
    engine, plain = loaded(make, policy), make(turns_max_bytes=0)
    plain.load(policy, 1)
    decoder: Any = engine._decoder
    whole, failures = getattr(decoder, where), iter([False, False, True])

    def tight(*arguments: Any) -> Any:
        if next(failures, False):
            raise MemoryError
        return whole(*arguments)

    setattr(decoder, where, tight)
    (drawn, _), (expected, _) = played(engine, turns=5), played(plain, turns=5)
    for group, right in zip(drawn, expected, strict=True):
        assert tokens_of({"": group}) == tokens_of({"": right})
    assert next(failures, None) is None, "memory was short once"
    assert engine._slots == 64


def tokens_of(groups: dict[str, tuple[Sample, ...]]) -> dict[str, list[bytes]]:
    return {name: [one.tokens for one in group] for name, group in groups.items()}


def last(one: Sample) -> int:
    return int(unpack_tokens(one.tokens)[-1])
