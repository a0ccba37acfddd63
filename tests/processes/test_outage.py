"""A coordinator that was away for longer than a lease lasts: nobody is blamed for what it missed."""

import time
from pathlib import Path

import pytest

from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

SHORT = {"timeout_s": 2.0, "heartbeat_s": 0.5, "newcomer_leases": 2}


def test_an_outage_longer_than_a_lease_costs_nobody_anything(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, {"leases": SHORT}).start()
    version = operator_of(swarm, coordinator, policy).publish()
    node = LightNode(coordinator.join_string)
    swarm.at_end(node.close)
    node.register()
    first, second = node.lease(version, 2)
    coordinator.program.kill()
    until("the leases' time to be over", lambda: time.time_ns() // 1_000_000 > second.expires_ms)
    coordinator.start()
    assert [verdict.outcome for verdict in node.submit(node.answer(first))] == ["accepted"]
    assert coordinator.leases_of(node.key.node_id) == {first.lease_id: "accepted", second.lease_id: "offered"}
    with coordinator.copy_of_store() as connection:
        allowed = connection.exec_driver_sql("SELECT lease_allowance FROM nodes").scalar()
    assert allowed == 4, "one lease was answered, and none was not"
    assert_ledger_is_sound(coordinator)
