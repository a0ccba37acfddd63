"""A version's way through real processes: from publication to each node's first token, as everybody is shown it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.processes.programs import Program, Swarm, script, until
from tests.processes.rounds import WHOLE_VERSIONS, Coordinator, join, node_id_of, operator_of, other_weights

pytestmark = pytest.mark.processes


def broadcast(coordinator: Coordinator) -> dict[str, Any]:
    return coordinator.fresh("/v1/broadcast")


def witnessed(coordinator: Coordinator) -> dict[str, int]:
    """Node id → what receivers' receipts say that it sent, of those that are still kept."""
    with coordinator.copy_of_store() as connection:
        rows = connection.execute(sa.text("SELECT sender, SUM(size_bytes) FROM uploads GROUP BY sender"))
        return {sender: int(size_bytes) for sender, size_bytes in rows}


def receipts(coordinator: Coordinator) -> int:
    with coordinator.copy_of_store() as connection:
        return int(connection.execute(sa.text("SELECT COUNT(*) FROM receipts")).scalar_one())


def totals(coordinator: Coordinator) -> dict[str, int]:
    return {node_id: row["uploaded_bytes"] for node_id, row in coordinator.leaderboard().items()}


def mirror(swarm: Swarm, name: str, coordinator: Coordinator) -> Program:
    command = [script("swarm-node"), "mirror", coordinator.join_string, "--name", name, "--json"]
    return swarm.start(name, *command, "--home", str(swarm.folder / name))


def test_a_version_is_followed_to_every_nodes_first_token_and_uploads_are_what_receivers_witnessed(
    swarm: Swarm, policy: Path
) -> None:
    coordinator = Coordinator(swarm, WHOLE_VERSIONS).start()
    operator = operator_of(swarm, coordinator, policy)
    node = join(swarm, "node", coordinator.join_string)
    mirrors = [mirror(swarm, name, coordinator) for name in ("first", "second")]
    until("all to be alive", lambda: coordinator.status()["nodes_alive"] == 3)
    reported = broadcast(coordinator)
    assert (reported["broadcast"], reported["nodes"]) == (None, [])

    operator.publish()
    until("version 1 to reach all", lambda: (coordinator.status()["broadcast"] or {}).get("reached") == 3)
    operator.policy = other_weights(policy, swarm.folder / "changed")
    operator.publish(update=1)
    until("version 2 to be shown", lambda: coordinator.status()["broadcast"]["version"] == 2)
    until("version 2 to reach all", lambda: coordinator.status()["broadcast"]["reached"] == 3)
    later = broadcast(coordinator)

    rows = {row["node_id"]: row for row in later["nodes"]}
    assert {row["name"] for row in rows.values()} == {"node", "first", "second"}
    sampler = rows[node_id_of(node)]
    assert 0 < sampler["heard_s"] <= sampler["fetched_s"] <= sampler["loaded_s"] < sampler["first_token_s"]
    ends_s = [sampler["first_token_s"]]
    for program in mirrors:
        row = rows[node_id_of(program)]
        assert (row["loaded_s"], row["first_token_s"]) == (None, None)
        assert 0 < row["heard_s"] < row["fetched_s"]
        ends_s.append(row["fetched_s"])
    last = later["broadcast"]
    assert (last["nodes"], last["median_s"], last["max_s"]) == (3, sorted(ends_s)[1], max(ends_s))
    status = coordinator.status()
    assert (status["nodes_alive"], status["nodes_up_to_date"], status["broadcast"]) == (3, 3, last)
    said = subprocess.run(
        [script("swarm-coordinator"), "status", str(coordinator.config_file)], check=True, capture_output=True
    ).stdout.decode()
    assert f"max {last['max_s']:.2f} s, on 3 of 3 nodes" in said

    until("every receipt to be here", lambda: receipts(coordinator) == 2 * len(rows))
    assert totals(coordinator) == {node_id: witnessed(coordinator).get(node_id, 0) for node_id in rows}
    passed_on = [row["passed_on_bytes"] for row in broadcast(coordinator)["nodes"]]
    assert sum(totals(coordinator).values()) >= sum(passed_on) > 0

    newcomer = mirror(swarm, "newcomer", coordinator)
    until("the newcomer to be up to date", lambda: coordinator.status()["nodes_up_to_date"] == 4)
    assert node_id_of(newcomer) not in {row["node_id"] for row in broadcast(coordinator)["nodes"]}
    assert broadcast(coordinator)["broadcast"] == last, "who came later is no part of it"
