"""Audits with real processes: a liar is caught, an honest node is not, and a killed auditor loses nothing."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from protocol.errors import OwnerBanned
from protocol.work.auditing import Explanations, Why
from tests.processes.light_node import LightNode
from tests.processes.programs import PATIENCE_S, Program, Swarm, said, script, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join, node_id_of, operator_of

pytestmark = pytest.mark.processes

LIES = 3
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 2, "publish_every": 1},
    "learner": {"groups_per_update": 4},
    "audit": {"first_groups": 4, "timeout_s": 5.0, "tolerance": "torch/fp32/cpu"},
}


def auditor(swarm: Swarm, coordinator: Coordinator, name: str, *options: str) -> Program:
    """Start an auditor by hand."""
    return swarm.start(name, script("swarm-coordinator"), "auditor", str(coordinator.config_file), *options)


def taken(coordinator: Coordinator) -> int:
    with coordinator.copy_of_store() as connection:
        return int(connection.execute(sa.text("SELECT COUNT(*) FROM audits WHERE taken_by != ''")).scalar_one())


def findings(coordinator: Coordinator, node_id: str) -> list[str | None]:
    """Return the findings about a node's claims, in order."""
    with coordinator.copy_of_store() as connection:
        query = sa.text("SELECT finding FROM audits WHERE node_id = :node ORDER BY place")
        return list(connection.execute(query, {"node": node_id}).scalars())


def test_a_node_that_swaps_tokens_is_banned_and_an_honest_one_is_paid(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    liar = LightNode(coordinator.join_string)
    swarm.at_end(liar.close)
    liar.register()
    given = liar.lease(1, LIES)
    liar.submit(*map(liar.answer, given))

    # Killed while it judges, before it could say anything.
    first = auditor(swarm, coordinator, "auditor-1")
    until("the first auditor to take cases", lambda: taken(coordinator) == LIES)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert findings(coordinator, liar.key.node_id) == [None] * LIES

    # Started as where the coordinator is another machine, and only its folder is here.
    token = shutil.copy(coordinator.folder / "operator.token", swarm.folder / "token")
    elsewhere = ("--set", "round.listen=127.0.0.1:1", "--coordinator", coordinator.url, "--token", str(token))
    second = auditor(swarm, coordinator, "auditor-2", *elsewhere)
    liars = liar.key.node_id
    until("the liar to be judged", lambda: None not in findings(coordinator, liars)[:2], within_s=3 * PATIENCE_S)
    with pytest.raises(OwnerBanned):
        liar.lease(1)
    (explanation,) = liar.call("/v1/verdicts", Why(about=given[0].lease_id), Explanations).explanations
    assert (explanation.state, explanation.code, explanation.finding) == ("voided", "replay_mismatch", "hard")
    assert json.loads(explanation.report)["findings"][0]["positions"]
    line = coordinator.leaderboard()[liar.key.node_id]
    assert (line["posted_micros"], line["pending_micros"], line["voided_micros"] > 0) == (0, 0, True)
    assert coordinator.status()["rollouts"].get("buffered", 0) == 0

    honest = join(swarm, "honest", coordinator.join_string)
    until("the honest node to earn", lambda: coordinator.accepted_groups() >= LIES + 8)
    node_id = node_id_of(honest)
    operator.client.finish()
    assert honest.process.wait(timeout=PATIENCE_S) == 0
    assert second.process.wait(timeout=PATIENCE_S) == 0, "an auditor leaves when nothing will ever wait again"
    audit = coordinator.status()["audit"]
    assert (audit["waiting"], audit["unsettled"]) == (0, 0)
    results = findings(coordinator, node_id)
    assert results[:4] == ["pass"] * 4
    assert set(results) <= {"pass", "soft", None}
    line = coordinator.leaderboard()[node_id]
    assert line["posted_micros"] > 0 == line["pending_micros"] == line["voided_micros"]
    assert_ledger_is_sound(coordinator)
    proved = json.loads(said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string, "--json"))
    assert proved["audits"]["claims"] == coordinator.accepted_groups()
    assert proved["audits"]["drawn"] >= LIES + 4

    (lease, *_) = coordinator.leases_of(node_id)
    again = [script("swarm-node"), "why", coordinator.join_string, lease, "--home", str(swarm.folder / "honest")]
    asked = swarm.start("why", *again)  # test_why replays an honest lease, too
    assert asked.process.wait(timeout=PATIENCE_S) == 0
    assert f"lease {lease}: posted" in asked.output
