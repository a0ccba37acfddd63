"""A node that ends in mid-generation, by force or by Ctrl-C: its prompts go to others, and nothing stays behind."""

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from protocol.work.lease import OPEN
from tests.processes.light_node import LightNode
from tests.processes.programs import ENDS_WITHIN_S, Program, Swarm, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    join,
    node_id_of,
    operator_of,
)

pytestmark = pytest.mark.processes

MAX_NEW_TOKENS = 400
GROUPS = 16
LEASE_TIMEOUT_S = 8.0
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 32, "max_new_tokens": MAX_NEW_TOKENS},
    **NOBODY_LEARNS,
    "leases": {"timeout_s": LEASE_TIMEOUT_S, "groups_per_request": GROUPS, "newcomer_leases": GROUPS},
}


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    return coordinator


def in_mid_generation(swarm: Swarm, coordinator: Coordinator, name: str) -> tuple[Program, str]:
    """A real node that has just been given leases, and its id."""
    node = join(swarm, name, coordinator.join_string, "--groups", str(GROUPS))
    node_id = node_id_of(node)
    node.said("measured the throughput of")
    until("the node to have leases", lambda: coordinator.open_leases() == GROUPS)
    return node, node_id


def test_leases_of_a_node_killed_in_mid_generation_are_answered_by_another(
    swarm: Swarm, coordinator: Coordinator
) -> None:
    node, victim = in_mid_generation(swarm, coordinator, "victim")
    children = node.descendants()
    node.kill()
    assert children, "the engine runs in a child"
    until("the engine to leave with its node", lambda: not any(child.is_running() for child in children))
    abandoned = [lease for lease, state in coordinator.leases_of(victim).items() if state in OPEN]
    assert abandoned
    until("its leases to expire", lambda: not set(OPEN) & set(coordinator.leases_of(victim).values()))
    assert {coordinator.leases_of(victim)[lease] for lease in abandoned} == {"expired"}

    with closing(LightNode(coordinator.join_string, max_new_tokens=MAX_NEW_TOKENS)) as heir:
        heir.register()
        leases = heir.lease(1, len(abandoned))
        assert {verdict.outcome for verdict in heir.submit(*map(heir.answer, leases))} == {"accepted"}
        with coordinator.copy_of_store() as connection:
            groups = dict(map(tuple, connection.execute(sa.text("SELECT lease_id, group_no FROM leases"))))
            answered = connection.execute(sa.text("SELECT group_no, node_id FROM rollouts")).all()
        assert {groups[lease.lease_id] for lease in leases} == {groups[lease_id] for lease_id in abandoned}
        by_whom = dict(map(tuple, answered))
        assert {by_whom[groups[lease_id]] for lease_id in abandoned} == {heir.key.node_id}
    assert max(Counter(group for group, _ in answered).values()) == 1
    assert_ledger_is_sound(coordinator)


def test_ctrl_c_in_mid_generation_gives_the_leases_back_and_leaves_no_process(
    swarm: Swarm, coordinator: Coordinator
) -> None:
    node, node_id = in_mid_generation(swarm, coordinator, "leaver")
    seconds = node.interrupt()
    assert seconds < ENDS_WITHIN_S, f"Ctrl-C took {seconds:.1f} s"
    print(f"Ctrl-C took {seconds:.1f} s")
    assert node.process.returncode == 0
    states = Counter(coordinator.leases_of(node_id).values())
    assert states["skipped"] > 0
    assert set(states) <= {"skipped", "accepted"}
    earnings = json.loads(node.output)
    assert earnings["rejected"] == {}
    assert (earnings["accepted"], earnings["unsent"]) == (states["accepted"], 0), "what is finished was sent"
    assert not list((swarm.folder / "leaver").rglob("*.rollout"))
    assert "Traceback" not in node.log
    assert_ledger_is_sound(coordinator)
