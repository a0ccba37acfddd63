"""A round with an exact node and the auditor on one machine: every audit passes, and no log-probability is off."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.programs import PATIENCE_S, Swarm, until
from tests.processes.rounds import Coordinator, Settings, join, node_id_of, operator_of

pytestmark = pytest.mark.processes

AUDITED = 4
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 2, "publish_every": 1},
    "learner": {"groups_per_update": AUDITED},
    "audit": {"first_groups": AUDITED, "timeout_s": 30.0, "classes": ["torch/fp32/cpu"], "threads": 2},
}


def test_an_exact_node_passes_every_audit_without_one_bit_off(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start(auditor=True)
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    node = join(swarm, "exact", coordinator.join_string, "--dtype", "exact", "--device", "cpu")
    until("the exact node to earn", lambda: coordinator.accepted_groups() >= AUDITED)
    node_id = node_id_of(node)
    operator.client.finish()
    assert node.process.wait(timeout=PATIENCE_S) == 0
    until(
        "every drawn claim to be judged", lambda: coordinator.status()["audit"]["waiting"] == 0, within_s=3 * PATIENCE_S
    )
    with coordinator.copy_of_store() as connection:
        query = sa.text("SELECT finding, report FROM audits WHERE node_id = :node AND finding IS NOT NULL")
        audits = [(finding, json.loads(report)) for finding, report in connection.execute(query, {"node": node_id})]
    assert len(audits) >= AUDITED
    assert {finding for finding, _ in audits} == {"pass"}
    for _, report in audits:
        assert (report["note"], report["tolerance"]) == ("", "torch/fp32/cpu"), "judged to the bit"
        assert (report["summary"]["error_max"], report["summary"]["dictated_share"]) == (0.0, 1.0)
    assert "An auditor of this class judges its work to the bit" in node.log
