"""Messages between learner and coordinator: bounded, typed, and safe to use as file names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import MalformedMessage, NonFiniteNumber, SwarmError
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.learning import (
    LearnerProgress,
    Publication,
    TrainingBatch,
    TrainingGroup,
    TrainingSample,
    UpdateReport,
)

UPLOAD = {"path": "model.safetensors", "digest": "d" * 64}
GOOD: dict[type[Message], dict[str, Any]] = {
    UpdateReport: {"number": 1, "mismatched": ["c" * 64], "metrics": {"loss": 0.5}, "idle_s": 0.0, "busy_s": 1.5},
    Publication: {"version": 1, "update": 0, "files": [UPLOAD]},
    LearnerProgress: {"phase": "p", "fraction": 0.5, "detail": "", "accuracy_before": None, "accuracy_after": 0.5},
}


@pytest.mark.parametrize("kind", GOOD)
def test_the_good_examples_are_good(kind: type[Message]) -> None:
    kind.from_bytes(canonical.encode(GOOD[kind]))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (UpdateReport, {"number": 0}),
        (UpdateReport, {"mismatched": ["c" * 63]}),
        (UpdateReport, {"metrics": {"loss": "low"}}),
        (UpdateReport, {"idle_s": -0.1}),
        (Publication, {"version": 0}),
        (Publication, {"version": limits.VERSION_MAX + 1}),
        (Publication, {"files": []}),
        (Publication, {"files": [UPLOAD | {"path": "../state.db"}]}),
        (Publication, {"files": [UPLOAD | {"digest": "D" * 64}]}),
        (LearnerProgress, {"fraction": 1.5}),
        (LearnerProgress, {"phase": "p" * 41}),
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused(kind: type[Message], change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        kind.from_bytes(canonical.encode(GOOD[kind] | change))


def test_a_metric_that_is_no_number_is_never_sent() -> None:
    with pytest.raises((NonFiniteNumber, ValueError)):
        UpdateReport(number=1, mismatched=(), metrics={"loss": float("nan")}, idle_s=0.0, busy_s=0.0).to_bytes()


samples = st.builds(
    TrainingSample,
    tokens=st.binary(max_size=8),
    logprobs=st.binary(max_size=8),
    reward=st.floats(allow_nan=False, allow_infinity=False),
)
groups = st.builds(
    TrainingGroup,
    claim_id=st.just("c" * 64),
    prompt=st.binary(max_size=8),
    policy_update=st.integers(0, limits.VERSION_MAX),
    samples=st.lists(samples, max_size=3).map(tuple),
)


@given(st.builds(TrainingBatch, number=st.integers(1, 1000), groups=st.lists(groups, max_size=3).map(tuple)))
def test_every_batch_survives_the_round_trip(batch: TrainingBatch) -> None:
    assert TrainingBatch.from_bytes(batch.to_bytes()) == batch


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SwarmError):
        TrainingBatch.from_bytes(data)
