"""Groups that somebody else began: gone on with, they come out as if one engine had sampled them alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import EngineFailed
from protocol.work.fragment import Begun, Finish
from protocol.work.lease import Prefix
from protocol.work.rollout import Sample, pack_tokens, unpack_tokens
from swarm_node.engine.engine import Answered
from swarm_node.engine.messages import GroupDone, GroupGrown, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.swarm_node.engine.asking import END, PROMPTS, asked, sample

REPORT_AT_ONCE = 1e-9


def engine_for(policy: Path, slots: int = 64) -> TorchEngine:
    engine = TorchEngine(slots=slots)
    engine.load(policy, 1)
    return engine


def prefixes(samples: tuple[Sample, ...], cut: Callable[[int, int], int]) -> tuple[Prefix, ...]:
    """The beginnings of finished samples: of sample n with T tokens, the first cut(n, T)."""
    found = []
    for number, one in enumerate(samples):
        count = len(one.tokens) // 4
        kept = min(cut(number, count), count)
        finish: Finish = one.finish if kept == count else ""
        found.append(Prefix(tokens=one.tokens[: 4 * kept], finish=finish))
    return tuple(found)


@pytest.mark.parametrize(("kind", "slots"), [("policy", 3), ("policy", 64), ("foreign", 3)])
@pytest.mark.parametrize(
    "cut", [lambda n, count: count - 1, lambda n, count: 3 * n], ids=["all but one token", "some whole, some not begun"]
)
def test_what_is_gone_on_with_equals_what_is_sampled_in_one_go(
    kind: str, slots: int, cut: Callable[[int, int], int], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    wanted = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    alone = sample(engine_for(folder), *wanted)
    begun = {one.request_id: prefixes(alone[one.request_id], cut) for one in wanted}
    heirs = [one.model_copy(update={"prefixes": begun[one.request_id]}) for one in wanted]
    for name, group in sample(engine_for(folder, slots), *heirs).items():
        for prefix, rest, whole in zip(begun[name], group, alone[name], strict=True):
            assert prefix.tokens + rest.tokens == whole.tokens
            assert rest.finish == whole.finish
            assert len(rest.logprobs) == len(rest.tokens)


def test_what_is_told_and_what_comes_after_it_make_the_whole(policy: Path) -> None:
    """A node is lost after each step in turn: another goes on from what the last word said."""
    wanted = asked(PROMPTS[2], 3, report_every_s=REPORT_AT_ONCE)
    (alone,) = sample(engine_for(policy), asked(PROMPTS[2], 3)).values()
    losing = engine_for(policy)
    losing.add(wanted)
    begun = [Begun()] * wanted.samples
    while losing.busy:
        for said in losing.step():
            if isinstance(said, GroupDone):
                break
            assert isinstance(said, GroupGrown)
            for part in said.parts:
                before = begun[part.sample]
                assert part.start == before.count
                begun[part.sample] = Begun(before.tokens + part.tokens, before.logprobs + part.logprobs, part.finish)
            heir = wanted.model_copy(
                update={"prefixes": tuple(Prefix(tokens=one.tokens, finish=one.finish) for one in begun)}
            )
            if not all(one.finish for one in begun):
                (rest,) = sample(engine_for(policy), heir).values()
                assert [one.tokens + new.tokens for one, new in zip(begun, rest, strict=True)] == [
                    one.tokens for one in alone
                ]
    assert max(one.count for one in begun) > 5


def test_the_first_tokens_that_a_caller_reads_are_reported_before_the_next_are_drawn(policy: Path) -> None:
    engine, later = engine_for(policy), 60.0
    engine.add(asked(PROMPTS[2], 3, samples=2, report_every_s=later, is_read=True))
    engine.add(asked(PROMPTS[1], 4, samples=2, report_every_s=later))
    (grown,) = engine.step()
    assert isinstance(grown, GroupGrown)
    assert [(part.sample, part.start, len(part.tokens) // 4) for part in grown.parts] == [(0, 0, 1), (1, 0, 1)]
    said = []
    while engine.busy:
        said += engine.step()
    assert [type(one) for one in said] == [GroupDone, GroupDone], "the interval is not over"


def test_groups_of_one_token_that_follow_each_other_do_not_stop_those_that_run(policy: Path) -> None:
    engine = engine_for(policy)
    running = asked(PROMPTS[2], 3, samples=2)
    engine.add(running)
    said: list[Answered] = []
    for number in range(4 * running.max_new_tokens):
        engine.add(asked(PROMPTS[1], 100 + number, max_new_tokens=1))
        said += engine.step()
    assert running.request_id in {one.request_id for one in said if isinstance(one, GroupDone)}


def test_a_request_that_does_not_ask_is_told_nothing_of(policy: Path) -> None:
    engine = engine_for(policy)
    engine.add(asked(PROMPTS[1]))
    said = []
    while engine.busy:
        said += engine.step()
    assert [type(one) for one in said] == [GroupDone]


@pytest.mark.parametrize(
    "bad",
    [
        (Prefix(tokens=b"", finish=""),),  # one for two samples
        (Prefix(tokens=pack_tokens([END]), finish="stop"),) * 2,  # nothing left
        (Prefix(tokens=pack_tokens([999]), finish=""),) * 2,  # beyond the vocabulary
        (Prefix(tokens=pack_tokens([19] * 12), finish=""),) * 2,  # as long as it may be, and not complete
    ],
)
def test_prefixes_that_cannot_be_are_refused_by_name(policy: Path, bad: tuple[Prefix, ...]) -> None:
    engine = engine_for(policy)
    with pytest.raises(EngineFailed, match="prefix"):
        engine.add(asked(PROMPTS[0], samples=2, prefixes=bad))
    assert sample(engine, asked(PROMPTS[0]))


def test_the_end_token_is_part_of_what_is_told(policy: Path) -> None:
    engine = engine_for(policy)
    request: SampleRequest = asked(PROMPTS[1], samples=32, max_new_tokens=60, report_every_s=REPORT_AT_ONCE)
    engine.add(request)
    parts = []
    while engine.busy:
        parts += [part for said in engine.step() if isinstance(said, GroupGrown) for part in said.parts]
    stopped = [part for part in parts if part.finish == "stop"]
    assert stopped
    assert all(unpack_tokens(part.tokens)[-1] == END for part in stopped)
