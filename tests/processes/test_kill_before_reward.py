"""kill -9 the coordinator when it has accepted a rollout and its reward is not known: it is judged after the start."""

from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

REWARD = """
import time
from pathlib import Path

HERE = Path({folder!r})

def patient(problem, completion):
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        time.sleep(0.02)
    return 0.5
"""


def states(coordinator: Coordinator) -> list[tuple[str, str]]:
    """Every accepted rollout and where it stands."""
    with coordinator.copy_of_store() as connection:
        return list(map(tuple, connection.execute(sa.text("SELECT claim_id, state FROM rollouts ORDER BY claim_id"))))


def test_a_rollout_accepted_before_the_kill_is_judged_after_the_start(swarm: Swarm, policy: Path) -> None:
    functions = swarm.folder / "patient.py"
    signs = swarm.folder / "signs"
    signs.mkdir()
    functions.write_text(REWARD.format(folder=str(signs)))
    problems = swarm.folder / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    settings: Settings = {
        "task": {"name": "data"},
        "data": {"train": str(problems)},
        "sampling": {"samples_per_group": 2},
        "reward": {"functions": [f"{functions}:patient"], "timeout_s": 600.0, "writable": [str(signs)]},
        "learner": {"groups_per_update": 2},
    }
    coordinator = Coordinator(swarm, settings).start()
    operator = operator_of(swarm, coordinator, policy)
    version = operator.publish()
    with closing(LightNode(coordinator.join_string)) as node:
        node.register()
        leases = node.lease(version, 2)
        answers = [node.answer(lease) for lease in leases]
        verdicts = node.submit(*answers)
        assert {verdict.outcome for verdict in verdicts} == {"accepted"}
        until("a reward to be begun", (signs / "begun").exists)
        coordinator.program.kill()
        accepted = states(coordinator)
        assert [state for _, state in accepted] == ["unscored", "unscored"]

        (signs / "go").touch()
        coordinator.start()
        until("both to be judged", lambda: {state for _, state in states(coordinator)} == {"buffered"})
        assert [claim for claim, _ in states(coordinator)] == [claim for claim, _ in accepted]
        again = node.submit(*answers)
        assert {verdict.credit_micros for verdict in again} == {verdict.credit_micros for verdict in verdicts}
    batch = operator.client.batch(1)
    assert {sample.reward for group in batch.groups for sample in group.samples} == {0.5}
    assert_ledger_is_sound(coordinator)
