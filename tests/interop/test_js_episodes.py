"""A client that was written from docs/protocol.md plays episodes turn by turn, and is paid for each turn."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests import npm
from tests.interop.test_js_client import Said, client
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

EPISODES, TURNS = 2, 3
ENVIRONMENT = """
import time


def problems(split, seed):
    first = {"train": 0, "validation": 200, "held_out": 400}[split]
    for number in range(first, first + 100):
        yield {"prompt": f"{number}+"}


class Environment:
    turns = 0

    def __init__(self, problem):
        self.problem = problem

    def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            time.sleep(0.6)  # longer than a submission waits: the next turn has to be asked for
        return f"={len(turn)}+" if self.turns < 3 else None

    def reward(self):
        return 0.5
"""


@pytest.fixture(scope="session", autouse=True)
def _node() -> None:
    """Choose the widest scope, so that nothing is made for tests that are then skipped."""
    npm.require_node()


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    file = swarm.folder / "counting.py"
    file.write_text(ENVIRONMENT)
    settings: Settings = {
        "task": {"name": str(file)},
        "episode": {"turn_tokens_max": 4},
        "sampling": {"samples_per_group": 2, "max_new_tokens": 64},
        "reward": {"timeout_s": 600.0, "processes": 1},
        "staleness": {"max_updates": 100},
        "audit": {"first_groups": 64, "tolerance": "torch/fp32/cpu"},
    }
    made = Coordinator(swarm, settings).start(auditor=True)
    operator_of(swarm, made, policy).publish()
    return made


@pytest.mark.slow
def test_it_plays_episodes_to_their_ends_and_each_turn_is_audited_and_credited(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    _, introduced, *said = client("play", coordinator.join_string, tmp_path, str(EPISODES))
    turns, leases = said[: EPISODES * TURNS], said[EPISODES * TURNS :]
    claims = [claim for turn in turns for claim in turn["turns"]]
    verdicts = [verdict for turn in turns for verdict in turn["verdicts"]]
    assert [turn["begun"] for turn in turns] == [[False], [True], [True]] * EPISODES
    assert [verdict["outcome"] for verdict in verdicts] == ["accepted"] * EPISODES * TURNS
    assert all(verdict["tokens"] > 0 and verdict["credit_micros"] > 0 for verdict in verdicts)
    assert {lease["claim"] for lease in leases} == set(claims)

    def judged() -> bool:
        with coordinator.copy_of_store() as connection:
            rows = sa.text("SELECT state FROM rollouts ORDER BY group_no, accepted_ms")
            states = connection.execute(rows).scalars().all()
        return states == ["part", "part", "buffered"] * EPISODES

    until("the last turns to be judged", judged)

    def logged() -> dict[str, Said]:
        (now,) = client("ledger", coordinator.join_string, tmp_path)
        of_claims = {claim: [one for one in now["entries"] if one.get("claim_id") == claim] for claim in claims}
        return of_claims if all(len(entries) > 1 for entries in of_claims.values()) else {}

    of_claims = until("the verdict on each turn in the log", logged)
    for claim, verdict in zip(claims, verdicts, strict=True):
        pending, finding = of_claims[claim][:2]
        assert (pending["kind"], pending["node_id"]) == ("pending", introduced["node"])
        assert pending["amount_micros"] == verdict["credit_micros"]
        assert (finding["kind"], finding["outcome"]) == ("verdict", "pass")
    assert_ledger_is_sound(coordinator)
