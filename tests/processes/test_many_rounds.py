"""Two nodes in three rounds that share a base: work follows the rounds, and each round has its ledger."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa

from swarm_node.base.clock import now_ms
from swarm_node.coordinator_api.join_string import parse, round_folder
from swarm_node.doctor.forecast import record_speed
from tests.processes.programs import Swarm, said, script, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Operator,
    Settings,
    assert_ledger_is_sound,
    join,
    node_id_of,
    operator_of,
)

pytestmark = pytest.mark.processes

MAKE = """
import sys
from pathlib import Path
from tests.adapted_policy import make_adapted
make_adapted(Path(sys.argv[1]), Path(sys.argv[2]), seed=int(sys.argv[3]))
"""

SAMPLING: Settings = {"sampling": {"samples_per_group": 2, "max_new_tokens": 8}}
SOON_DRY: Settings = {**SAMPLING, "learner": {"groups_per_update": 4}, "staleness": {"max_updates": 1}}
BUSY: Settings = {**SAMPLING, **NOBODY_LEARNS}
NAMES = ("first", "second", "third")
NODES = ("one", "two")


@pytest.fixture(scope="module")
def rounds(swarm: Swarm, policy: Path) -> list[tuple[Coordinator, Operator]]:
    started = []
    for seed, name in enumerate(NAMES):
        folder = swarm.folder / f"policy of {name}"
        subprocess.run([sys.executable, "-c", MAKE, str(policy), str(folder), str(seed)], check=True)
        coordinator = Coordinator(swarm, SOON_DRY if name == "first" else BUSY, name=name).start()
        operator = operator_of(swarm, coordinator, folder)
        operator.publish()
        started.append((coordinator, operator))
    return started


def accepted(coordinator: Coordinator) -> dict[str, int]:
    """Node id → number of rollouts with a claim in this round's ledger, of all nodes that have some."""
    with coordinator.copy_of_store() as connection:
        rows = connection.execute(sa.text("SELECT node_id, count(*) FROM ledger_claims GROUP BY node_id"))
        return dict(map(tuple, rows))


def claims_of(coordinator: Coordinator) -> set[str]:
    with coordinator.copy_of_store() as connection:
        return set(connection.execute(sa.text("SELECT claim_id FROM ledger_claims")).scalars())


def weights_of(home: Path) -> set[int]:
    """Return the numbers of the files that hold the base, in all rounds of a home."""
    return {path.stat().st_ino for path in home.glob("rounds/*/policies/*/model.safetensors")}


@pytest.mark.slow
def test_nodes_follow_the_work_of_three_rounds_and_three_ledgers_stay_apart(
    swarm: Swarm, rounds: list[tuple[Coordinator, Operator]]
) -> None:
    (first, operator), (second, _), (third, _) = rounds
    false = f"{third.url}#{'0' * 64}"
    joins = [*(coordinator.join_string for coordinator, _ in rounds), false]
    nodes = [join(swarm, name, joins[0], *joins[1:]) for name in NODES]
    ids = {node_id_of(node) for node in nodes}
    for node in nodes:
        node.said(f"the round at {third.url} is left out code=untrusted_root")

    until("the second round to have work of both", lambda: accepted(second).keys() == ids)
    dry = sum(accepted(first).values())
    assert dry > 0, "the first round comes first"
    for name in NODES:
        until("the base to be stored once", lambda name=name: len(weights_of(swarm.folder / name)) == 1)  # type: ignore[misc]  # mypy knows no defaults of lambdas

    operator.publish(update=1)
    until("the first round to have more work done", lambda: sum(accepted(first).values()) > dry)

    nodes[0].kill()
    home = swarm.folder / NODES[0]
    before = accepted(second)
    nodes[0] = swarm.start(NODES[0], script("swarm-node"), "join", "--home", str(home), "--threads", "1", "--json")
    one = node_id_of(nodes[0])
    until("the killed node to work again", lambda: accepted(second)[one] > before[one])

    second.program.kill()
    until("the third round to have work of both", lambda: accepted(third).keys() == ids)
    shown = json.loads(said(swarm, "swarm-node", "status", "--home", str(home), "--json"))
    assert [row["coordinator"] for row in shown["rounds"]] == [coordinator.url for coordinator, _ in rounds]
    second.start()

    said(swarm, "swarm-coordinator", "nodes", "ban", str(second.config_file), one, "--reason", "a test", "--yes")
    nodes[0].said(rf"left the round at {second.url} code=\w+")
    before = accepted(third)
    until("the node to go on where it is not banned", lambda: accepted(third)[one] > before[one])

    urls = [coordinator.url for coordinator, _ in rounds]
    for node, is_banned in zip(nodes, (True, False), strict=True):
        node.interrupt()
        totals = [json.loads(line) for line in node.output.splitlines()]
        assert [row["coordinator"] for row in totals] == urls
        assert any(row["error"] for row in totals) == is_banned, "it says why it left"
    for coordinator, _ in rounds:
        assert accepted(coordinator).keys() <= ids
        assert_ledger_is_sound(coordinator)
        said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string, "--home", str(swarm.folder / NODES[0]))
    claims = [claims_of(coordinator) for coordinator, _ in rounds]
    assert all(claims), "each round has recorded claims"
    assert len(set().union(*claims)) == sum(map(len, claims)), "a claim is one round's alone"
    earned = said(swarm, "swarm-node", "earnings", "--home", str(swarm.folder / NODES[0]))
    assert [coordinator.url in earned for coordinator, _ in rounds] == [True] * 3


@pytest.mark.slow
def test_a_node_that_works_for_the_best_paid_of_its_rounds_measures_each_and_shows_what_it_pays(
    swarm: Swarm, rounds: list[tuple[Coordinator, Operator]]
) -> None:
    """Both rounds always have work; by an earlier run, this machine is slow with the model of the later one."""
    (_, _), (second, _), (third, _) = rounds
    home = swarm.folder / "rich"
    folder = round_folder(home, parse(third.join_string))
    folder.mkdir(parents=True)
    record_speed(folder, 0.001, now_ms())
    said(swarm, "swarm-node", "limits", "--home", str(home), "--best-paid-first")
    rich = join(swarm, "rich", second.join_string, third.join_string)
    me = node_id_of(rich)

    def shown() -> list[dict[str, Any]]:
        state = json.loads(said(swarm, "swarm-node", "status", "--home", str(home), "--json"))
        return cast(list[dict[str, Any]], state["rounds"])

    until("both rounds to be measured", lambda: all(row.get("hour_micros") for row in shown()))
    assert [row["coordinator"] for row in shown()] == [second.url, third.url], "the list stays the owner's"
    other = accepted(second).get(me, 0)
    said(swarm, "swarm-node", "limits", "--home", str(home), "--listed-first")
    until("the second round to have work of it", lambda: accepted(second).get(me, 0) > other)
    rich.interrupt()
