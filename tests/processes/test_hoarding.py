"""Free keys that lease from a real coordinator and never answer: who works goes on, batch after batch."""

from contextlib import closing
from pathlib import Path

import pytest

from protocol.work.learning import UpdateReport
from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm
from tests.processes.rounds import Coordinator, Operator, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

BATCH = 4
KEYS = 12


def train(node: LightNode, operator: Operator, number: int) -> None:
    """Fill a batch by one node's work alone, and train on it."""
    leases = node.lease(number, BATCH)
    assert len(leases) == BATCH, "all the room of a batch is this node's"
    assert {verdict.outcome for verdict in node.submit(*map(node.answer, leases))} == {"accepted"}
    assert operator.client.batch(number).number == number
    operator.client.report(UpdateReport(number=number, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
    operator.publish(number)


@pytest.mark.slow
def test_lease_hoarding_by_ever_new_keys_holds_up_no_batch(swarm: Swarm, policy: Path) -> None:
    """Leases last for an hour here: who waited for one of these would wait for longer than any test."""
    coordinator = Coordinator(
        swarm,
        {
            "round": {"max_updates": 100},
            "sampling": {"samples_per_group": 2},
            "staleness": {"max_updates": 0, "publish_every": 1},
            "learner": {"groups_per_update": BATCH},
            "leases": {"timeout_s": 3600.0},
        },
    ).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    with closing(LightNode(coordinator.join_string)) as node:
        node.register()
        train(node, operator, 1)
        node.give_back(node.lease(2))  # it is proven, and has asked: from now on others are newcomers
        held = 0
        for number in range(2, 5):
            for _ in range(KEYS):
                with closing(LightNode(coordinator.join_string)) as hoarder:
                    hoarder.register()
                    held += len(hoarder.lease(number))
            train(node, operator, number)
    assert held
    assert_ledger_is_sound(coordinator)
