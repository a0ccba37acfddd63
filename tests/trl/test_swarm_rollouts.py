"""An unmodified GRPOTrainer that samples with the swarm: its steps become versions, and its samples are of those."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.learner.embedded import EmbeddedShape, make_policy
from echo_swarm import Swarm as Round
from tests.processes.programs import Swarm, said
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "trainers"))

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def has_variety(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward what an untrained policy also does, so that every step changes the weights."""
    return [float(len(set(completion))) for completion in completions]


def test_each_step_of_grpo_trainer_is_sampled_by_its_own_version(tmp_path: Path) -> None:
    import trl_grpo

    swarm, steps = Swarm(tmp_path), 2
    try:
        policy = tmp_path / "policy"
        make_policy(policy, seed=1, shape=EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=32))
        settings: Settings = {
            "model": {"path": str(policy)},
            "learner": {"external": True},
            "sampling": {"max_new_tokens": 4},
        }
        coordinator = Coordinator(swarm, settings).start(learner=True)
        coordinator.reaches("version", 1)
        join(swarm, "node", coordinator.join_string, "--engine", "torch")
        words = (str(coordinator.config_file), "trl", "--budget", "100000000", "--publishes")
        key = said(swarm, "swarm-coordinator", "api-keys", "create", *words).split()[1]
        trl_grpo.main(coordinator.url, key, str(policy), str(tmp_path / "out"), steps, has_variety)
        with Round(coordinator.url, key) as round_:
            versions = round_.versions()
            assert (versions.newest, versions.newest_update) == (steps, steps - 1), "the start needs no new version"
            (rollout,) = round_.sample(["1+2="], version=versions.newest)
            assert rollout.version == versions.newest
        with coordinator.copy_of_store() as connection:
            served = connection.exec_driver_sql("SELECT version, SUM(tokens) FROM rollouts GROUP BY version").all()
        assert [row[0] for row in served] == list(range(1, steps + 1))
        assert_ledger_is_sound(coordinator)
    finally:
        swarm.close()
