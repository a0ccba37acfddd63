"""The operator bans a node by mistake: it appeals with real programs, and is let in again with what it had earned."""

from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import OwnerBanned
from protocol.text.money import CREDITS
from swarm_node.keys import identity
from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, said
from tests.processes.rounds import Coordinator, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_node_that_was_banned_by_mistake_appeals_and_is_paid(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, {"sampling": {"samples_per_group": 2}}).start()
    operator = operator_of(swarm, coordinator, policy)
    version = operator.publish()
    home, file = swarm.folder / "node", str(coordinator.config_file)
    me = identity.load_or_create(home / identity.FILE)
    with closing(LightNode(coordinator.join_string, seed=me.seed)) as node:
        node.register()
        (lease,) = node.lease(version)
        (verdict,) = node.submit(node.answer(lease))
        said(swarm, "swarm-coordinator", "nodes", "ban", file, me.key.node_id, "--reason", "a mistake", "--yes")
        with pytest.raises(OwnerBanned):
            node.lease(version)
        place = (coordinator.join_string, lease.lease_id, "--home", str(home))
        assert "swarm-node appeal" in said(swarm, "swarm-node", "why", *place)
        assert "recorded: appeal 1" in said(swarm, "swarm-node", "appeal", *place, "--reason", "Why me?")
        assert "already_recorded: appeal 1" in said(swarm, "swarm-node", "appeal", *place)
        assert "1 wait for a ruling" in said(swarm, "swarm-coordinator", "appeals", "list", file)
        shown = said(swarm, "swarm-coordinator", "appeals", "show", file, "1")
        assert "| Why me?" in shown
        assert f"granting it pays 1 claim, {CREDITS.exact(verdict.credit_micros)} of" in shown
        words = ("appeals", "rule", file, "1", "grant", "--code", "our_mistake", "--reason", "Sorry.")
        assert f"{CREDITS.exact(verdict.credit_micros)} reinstated" in said(swarm, "swarm-coordinator", *words)
        assert "nothing changed" in said(swarm, "swarm-coordinator", *words)
        assert "appeal granted: our_mistake: Sorry." in said(swarm, "swarm-node", "why", *place)
        assert node.lease(version)
    assert coordinator.leaderboard()[me.key.node_id]["posted_micros"] == verdict.credit_micros
    assert_ledger_is_sound(coordinator)
    said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string)
