"""Samples of evaluations as people read them: which, how long, and that a retracted one disappears."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.config import AuditSection, Config, EvalSection
from coordinator.config.round import RoundSection
from coordinator.reports import evaluation_samples
from coordinator.reports.evaluation_samples import CUT, SHOWN_MAX, SampleArchive, shortened
from coordinator.transactions import evaluations
from protocol import limits
from protocol.errors import NotFound
from protocol.wire.signing import NodeKey
from protocol.work.learning import EvaluationSamples
from protocol.work.lease import Lease
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, World, answer, honest_sample

CONFIG = Config(eval=EvalSection(every=1, problems=3, samples=2, patience_s=60.0), round=RoundSection(max_updates=100))
WRONG = Sample(tokens=pack_tokens([7, END]), logprobs=pack_logprobs([-0.5, -0.1]), finish="stop")


class Decoder:
    """A decoder that counts its work."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.count += 1
        return " ".join(map(str, tokens))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, staleness=2, size=2)


def evaluate(world: World, key: NodeKey, version: int, first: Sample | None = None) -> None:
    """Publish a version, and answer all problems of its evaluation; the first sample of each group is `first`."""
    world.publish(version, version - 1)
    world.run(evaluations.start_due_evaluations, version, {"held_out": 10}, CONFIG, world.now_ms)
    while True:
        leases = world.offer(key, version=version, groups=8).leases
        given = [lease for lease in leases if is_held_out(lease)]
        for lease in given:
            samples = (first or honest_sample(lease), WRONG)
            assert world.submit(key, answer(key, lease, samples=samples)).outcome == "accepted"
        world.give_back(key, *(lease for lease in leases if lease not in given))
        if not given:
            return


def is_held_out(lease: Lease) -> bool:
    return int(unpack_tokens(lease.prompt)[0]) >= 5_000


def read(world: World, archive: SampleArchive, decode: Decoder) -> list[EvaluationSamples]:
    found: list[EvaluationSamples] = world.run(archive.read, decode)
    return found


def test_the_first_sample_of_the_first_problems_is_read_newest_evaluation_first(world: World) -> None:
    key, decode = world.join(1), Decoder()
    evaluate(world, key, 1, WRONG)
    evaluate(world, key, 2)
    new, old = read(world, SampleArchive(2), decode)
    assert [(one.version, one.update, one.split) for one in (new, old)] == [(2, 1, "held_out"), (1, 0, "held_out")]
    assert [sample.problem for sample in new.samples] == [sample.problem for sample in old.samples]
    assert len(new.samples) == 2
    assert {(sample.completion, sample.reward) for sample in old.samples} == {("7 1", 0.0)}
    for sample in new.samples:
        assert int(sample.prompt) >= 5_000
        assert (sample.completion, sample.reward) == (f"{sample.prompt} 1", 1.0), "the right answer is the prompt"


def test_an_evaluation_that_runs_is_not_shown(world: World) -> None:
    world.publish(1, 0)
    world.run(evaluations.start_due_evaluations, 1, {"held_out": 10}, CONFIG, world.now_ms)
    assert read(world, SampleArchive(2), Decoder()) == []


def test_nothing_is_decoded_twice(world: World) -> None:
    key, decode, archive = world.join(1), Decoder(), SampleArchive(3)
    evaluate(world, key, 1)
    first = read(world, archive, decode)
    assert decode.count == 6
    assert read(world, archive, decode) == first
    assert decode.count == 6
    evaluate(world, key, 2)
    read(world, archive, decode)
    assert decode.count == 12


def test_a_sample_that_an_audit_retracts_disappears(tmp_path: Path) -> None:
    world, archive = World(tmp_path, rules=AuditSection()), SampleArchive(3)
    evaluate(world, world.join(1), 1)
    (before,) = read(world, archive, Decoder())
    last, *others = world.take_cases()
    assert all(world.find(other) for other in others)
    assert world.find(last, "hard")
    (after,) = read(world, archive, Decoder())
    assert (len(before.samples), len(after.samples)) == (3, 2)
    assert set(after.samples) < set(before.samples)


def test_the_first_and_the_newest_evaluations_are_shown(world: World) -> None:
    key = world.join(1)
    for version in range(1, SHOWN_MAX + 3):
        evaluate(world, key, version)
    shown = read(world, SampleArchive(1), Decoder())
    assert [one.version for one in shown] == [*range(SHOWN_MAX + 2, 3, -1), 1]


def test_one_evaluation_is_read_by_its_number(world: World) -> None:
    evaluate(world, world.join(1), 1)
    found: EvaluationSamples = world.run(evaluation_samples.of_evaluation, 1, 2, Decoder())
    assert (found.number, len(found.samples)) == (1, 2)
    assert EvaluationSamples.from_bytes(found.to_bytes()) == found
    with pytest.raises(NotFound, match="no evaluation 9"):
        world.run(evaluation_samples.of_evaluation, 9, 2, Decoder())


@pytest.mark.parametrize("length", [0, 1, 1999, 2000, 2001, 100_000])
def test_a_long_text_keeps_its_beginning_and_its_end(length: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(length))
    shown = shortened(text)
    assert len(shown) == min(length, limits.EVALUATION_TEXT_MAX_CHARS)
    assert (CUT in shown) == (length > limits.EVALUATION_TEXT_MAX_CHARS)
    assert shown[:900] == text[:900]
    assert shown[-900:] == text[-900:]


def test_half_a_character_does_not_break_the_message() -> None:
    assert shortened("a\ud800b") == "a?b"
