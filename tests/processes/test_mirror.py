"""Mirrors as processes: they fetch what is published and pass it on, and they stay out of the market."""

import json
from pathlib import Path

import pytest

from protocol.chunks import digest
from tests.processes.programs import Program, Swarm, script, until
from tests.processes.rounds import Coordinator, Settings, join, node_id_of, operator_of, other_weights

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "publish": {"chunk_size_bytes": 1024},
    "leases": {"heartbeat_s": 30.0},
}
"""Beats so rare that news of a version can only come by the request that is held open."""


def mirror(swarm: Swarm, name: str, coordinator: Coordinator, *options: str) -> Program:
    home = str(swarm.folder / name)
    command = [script("swarm-node"), "mirror", coordinator.join_string, "--home", home, "--name", name, "--json"]
    return swarm.start(name, *command, *options)


def held(program: Program, version: int) -> dict[str, int | float | str]:
    """What a mirror says of a version, once it holds it."""

    def look() -> dict[str, int | float | str] | None:
        said = [json.loads(line) for line in program.output.splitlines()]
        return next((line for line in said if line["version"] == version), None)

    found = until(f"{program.name} to hold version {version}", look)
    assert found
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: digest(path.read_bytes()) for path in folder.iterdir()}


def test_mirrors_fetch_every_version_pass_it_on_and_stay_out_of_the_market(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    first = mirror(swarm, "first", coordinator)
    assert digests(Path(str(held(first, 1)["folder"]))) == digests(policy)
    second = mirror(swarm, "second", coordinator)  # a newcomer is fed by whoever has uplink to spare
    said = held(second, 1)
    assert int(said["from_peers"]) + int(said["from_seeder"]) + int(said["from_http"]) == said["bytes"]
    assert int(said["from_peers"]) > 0
    alone = mirror(swarm, "alone", coordinator, "--no-share")
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

    worker = join(swarm, "worker", coordinator.join_string)
    coordinator.reaches("nodes", 4)
    until("the worker beside the mirrors to be credited", coordinator.accepted_groups)
    worker.interrupt()
    operator.client.finish()
    first.interrupt()
    assert first.process.returncode == 0
    assert "Traceback" not in first.log + second.log + alone.log
