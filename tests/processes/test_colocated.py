"""Central training: `launch` alone samples and trains on one machine, in turns, and nobody else gets in."""

from pathlib import Path

import pytest

from protocol.errors import NotInvited
from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, alive, until, words_of
from tests.processes.rounds import Coordinator, Settings

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_launch_samples_for_itself_and_its_node_dies_with_it(swarm: Swarm, policy: Path) -> None:
    settings: Settings = {
        "round": {"mode": "colocated", "max_updates": 100_000},
        "model": {"path": str(policy)},
        "sampling": {"samples_per_group": 4},
        "learner": {"groups_per_update": 2},
    }
    coordinator = Coordinator(swarm, settings).start(learner=True)
    coordinator.reaches("update", 3)
    status = coordinator.status()
    assert (status["max_staleness"], status["nodes"], status["publish_every"]) == (0, 1, 1)
    assert status["version_update"] >= 2, "a version after each update"
    (row,) = coordinator.leaderboard().values()
    assert row["name"] == "local-node-1"
    stranger = LightNode(coordinator.join_string)
    swarm.at_end(stranger.close)
    with pytest.raises(NotInvited):
        stranger.register()
    below = [child for child in coordinator.program.descendants() if "join" in words_of(child)]
    assert below, "the node is a child of the launch"
    coordinator.program.kill()
    until("its node to leave after the launch was killed", lambda: not any(map(alive, below)))
