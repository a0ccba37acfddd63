"""The time of vLLM's steps: what came from the prefix cache is no work, and the division waits until that is known."""

from dataclasses import dataclass

import pytest

from swarm_node.engine.vllm.step_times import StepTimes


@dataclass(eq=False)
class Group:
    """A group of a known number of computed tokens."""

    computed_tokens: int
    complete: bool = False


def test_a_step_is_divided_by_computed_tokens_once_they_are_known() -> None:
    """A turn of 490 tokens, of which 480 were cached, in a step with 30 decoded tokens: a quarter of its time."""
    times, turn = StepTimes(), Group(490)
    times.record(2.0, decoded=30, begun=[turn])
    times.settle()
    assert times.take() == (0.0, 0.0), "how much was cached is not known yet"
    times.record(1.0, decoded=31, begun=[])
    turn.computed_tokens, turn.complete = 10, True
    times.settle()
    assert times.take() == pytest.approx((0.5, 2.5))
    assert times.take() == (0.0, 0.0)


def test_a_step_without_decoding_belongs_to_its_prompts() -> None:
    times = StepTimes()
    times.record(2.0, decoded=0, begun=[Group(1, complete=True), Group(90, complete=True)])
    times.settle()
    assert times.take() == (2.0, 0.0)


def test_a_step_waits_for_all_its_groups_that_are_not_cancelled() -> None:
    times, first, second, gone = StepTimes(), Group(10, complete=True), Group(20), Group(1000)
    times.record(3.0, decoded=30, begun=[first, second, gone])
    times.leave_out([gone])
    times.settle()
    assert times.take() == (0.0, 0.0)
    second.complete = True
    times.settle()
    assert times.take() == pytest.approx((1.5, 1.5))
    times.record(3.0, decoded=30, begun=[gone])
    times.leave_out([gone])
    gone.complete = True
    times.settle()
    assert times.take() == (0.0, 0.0), "nobody is paid for its tokens, so its time counts for no speed"
