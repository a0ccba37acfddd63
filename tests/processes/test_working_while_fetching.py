"""A new version comes while the node goes on sampling the one it has: it stops for nothing but the swap."""

import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.programs import Swarm, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    WHOLE_VERSIONS,
    Coordinator,
    Settings,
    join,
    node_id_of,
    operator_of,
    other_weights,
)

pytestmark = pytest.mark.processes

GROUPS = 5
"""Accepted of a version before a node is said to work with it."""

SETTINGS: Settings = {**WHOLE_VERSIONS, **NOBODY_LEARNS}


def accepted(coordinator: Coordinator, version: int) -> int:
    with coordinator.copy_of_store() as connection:
        counted = sa.text("SELECT COUNT(*) FROM rollouts WHERE version = :version")
        return int(connection.execute(counted, {"version": version}).scalar_one())


def reached_ms(coordinator: Coordinator, node_id: str, stage: str) -> int | None:
    """Return when version 2 reached a stage on a node; the pages show a version once a node samples from it."""
    with coordinator.copy_of_store() as connection:
        query = sa.text(f"SELECT {stage}_ms FROM broadcasts WHERE version = 2 AND node_id = :node")
        at_ms: int | None = connection.execute(query, {"node": node_id}).scalar_one()
        return at_ms


def test_groups_of_the_old_version_are_accepted_while_a_chunk_of_the_new_one_is_kept_back(
    swarm: Swarm, policy: Path
) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    node = join(swarm, "node", coordinator.join_string)
    node_id = node_id_of(node)
    until("work under version 1", lambda: accepted(coordinator, 1) >= GROUPS)

    chunks = set(coordinator.folder.glob("blobs/??/*"))
    for process in (node.process, *node.descendants()):  # so that it has not fetched anything before one is kept back
        process.send_signal(signal.SIGSTOP)
    operator.policy = other_weights(policy, swarm.folder / "changed")
    operator.publish(update=1)
    kept_back = max(set(coordinator.folder.glob("blobs/??/*")) - chunks)
    aside = kept_back.rename(swarm.folder / "kept back")
    for process in (node.process, *node.descendants()):
        process.send_signal(signal.SIGCONT)

    until("the node to hear of version 2", lambda: reached_ms(coordinator, node_id, "heard"))
    before = accepted(coordinator, 1)
    until("more work under version 1", lambda: accepted(coordinator, 1) >= before + GROUPS)
    assert reached_ms(coordinator, node_id, "fetched") is None
    assert accepted(coordinator, 2) == 0

    aside.rename(kept_back)
    until("work under version 2", lambda: accepted(coordinator, 2) >= GROUPS)
    assert node.running
