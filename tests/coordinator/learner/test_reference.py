"""The reference of the divergence: the policy with which the round starts, whatever came before and after."""

from functools import partial
from pathlib import Path

import pytest

from coordinator.config import Config
from coordinator.learner.crew import Crew
from coordinator.learner.ranks import Ranks
from coordinator.learner.warmstart import warm_start
from tests.coordinator.learner.groups import UNEQUAL


def test_the_embedded_policy_starts_where_its_warm_start_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staying near the random weights before the warm start would unlearn it. A resume keeps the reference."""
    monkeypatch.setattr("coordinator.learner.crew.warm_start", partial(warm_start, steps_max=3))
    config = Config.model_validate(
        {"round": {"directory": tmp_path}, "learner": {"algorithm": "echo2"}, "objective": {"beta": 0.1}}
    )
    crew = Crew(config, Ranks())
    crew.warm_start(lambda *_: None)
    crew.save(version=0)
    found = crew.train(UNEQUAL)
    assert found.metrics["kl/ref"] == pytest.approx(0.0, abs=1e-9)
    resumed = Crew(config, Ranks())
    assert resumed.resumed
    assert resumed.train(UNEQUAL) == found
