"""Mirrors as processes: they fetch what is published and pass it on, and they stay out of the market."""

from pathlib import Path

import pytest

from protocol.policy.chunks import digest
from tests.processes.light_node import at_work
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, held, mirror, node_id_of, operator_of, other_weights

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "publish": {"chunk_size_bytes": 1024},
    "leases": {"heartbeat_s": 30.0},
}
"""Beats so rare that news of a version can only come by the request that is held open."""


def digests(folder: Path) -> dict[str, str]:
    return {path.name: digest(path.read_bytes()) for path in folder.iterdir()}


def test_mirrors_fetch_every_version_pass_it_on_and_stay_out_of_the_market(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    first = mirror(swarm, "first", coordinator.join_string)
    assert digests(Path(str(held(first, 1)["folder"]))) == digests(policy)
    second = mirror(swarm, "second", coordinator.join_string)  # a newcomer is fed by whoever has uplink to spare
    said = held(second, 1)
    assert int(said["from_peers"]) + int(said["from_seeder"]) + int(said["from_http"]) == said["bytes"]
    assert int(said["from_peers"]) > 0
    alone = mirror(swarm, "alone", coordinator.join_string, "--no-share")
    assert digests(Path(str(held(alone, 1)["folder"]))) == digests(policy)

    changed = other_weights(policy, swarm.folder / "changed")
    operator.policy = changed
    operator.publish()
    for program in (first, second, alone):
        assert digests(Path(str(held(program, 2)["folder"]))) == digests(changed)

    rows = coordinator.leaderboard()
    assert {rows[node_id_of(program)]["phase"] for program in (first, second, alone)} == {"mirroring"}
    assert all(row["posted_micros"] == row["accepted_rollouts"] == 0 for row in rows.values())
    assert coordinator.leases() == {}
    assert coordinator.status()["nodes"] == 3

    with at_work(coordinator.join_string):
        coordinator.reaches("nodes", 4)
        until("the worker beside the mirrors to be credited", coordinator.accepted_groups)
    operator.client.finish()
    first.interrupt()
    assert first.process.returncode == 0
    assert "Traceback" not in first.log + second.log + alone.log
