"""A mirror whose advertised address answers nobody, beside two that can be dialled: it feeds them all the same."""

import signal
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.programs import Swarm, free_address, until
from tests.processes.rounds import Coordinator, Settings, held, mirror, node_id_of, operator_of, random_weights
from tests.processes.test_mirror import digests

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "publish": {"chunk_size_bytes": 1024, "patches": False},
    "leases": {"heartbeat_s": 20.0},  # plans go on naming one that is stopped
}
"""No patches: a version has enough chunks for everybody to feed somebody."""

VERSIONS_MAX = 20
"""Versions until the seeder has served a node: until then that node, which may have all from others, feeds nobody."""


def uploaded(coordinator: Coordinator, sender: str) -> int:
    """Bytes of the last versions' verified chunks that others say, signed, a node has sent them."""
    with coordinator.copy_of_store() as connection:
        asked = "SELECT COALESCE(SUM(size_bytes), 0) FROM uploads WHERE sender = :sender"
        return int(connection.execute(sa.text(asked), {"sender": sender}).scalar_one())


def receipts_of_all(coordinator: Coordinator, version: int) -> bool:
    """Return True if all three nodes have said where a version came from."""
    with coordinator.copy_of_store() as connection:
        asked = sa.text("SELECT COUNT(*) FROM receipts WHERE version = :version")
        return int(connection.execute(asked, {"version": version}).scalar_one()) == 3


def words_on(coordinator: Coordinator, node: str) -> list[bool]:
    """Return the reports of the nodes that tried to dial a node."""
    with coordinator.copy_of_store() as connection:
        asked = sa.text("SELECT answered FROM dials WHERE node = :node")
        return list(map(bool, connection.execute(asked, {"node": node}).scalars()))


def test_a_mirror_that_nobody_can_dial_uploads_over_the_connections_that_it_opens(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    first, other = mirror(swarm, "one", coordinator.join_string), mirror(swarm, "other", coordinator.join_string)
    shy = mirror(swarm, "shy", coordinator.join_string, "--advertise", free_address())  # nobody listens there
    coordinator.reaches("nodes", 3)

    shy.process.send_signal(signal.SIGSTOP)  # else it may connect to the others before they try to dial it
    version = operator.publish()
    for program in (first, other):
        held(program, version)
    until(
        "both others to say that they could not dial it", lambda: words_on(coordinator, node_id_of(shy)) == [False] * 2
    )
    shy.process.send_signal(signal.SIGCONT)
    held(shy, version)

    for seed in range(VERSIONS_MAX):
        operator.policy = random_weights(swarm.folder / f"weights-{seed}", seed=seed, size_bytes=64 * 1024)
        version = operator.publish()
        for program in (first, other, shy):
            assert digests(Path(str(held(program, version)["folder"]))) == digests(operator.policy)
        until("all receipts", partial(receipts_of_all, coordinator, version))
        if uploaded(coordinator, node_id_of(shy)):
            break
    assert uploaded(coordinator, node_id_of(shy))
    for program in (first, other):
        assert set(words_on(coordinator, node_id_of(program))) == {True}
    assert "Traceback" not in first.log + other.log + shy.log
