"""kill -9 the coordinator at any moment under load: what it acknowledged is there, once, and work goes on."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from protocol import limits
from protocol.errors import SwarmError, Unreachable
from protocol.policy import chunks
from protocol.wire.signing import open_envelope
from protocol.work.learning import TrainingBatch, UpdateReport
from tests.processes.light_node import Labourer, at_work
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

KILLS = 3
LABOURERS = 4
GROUPS_PER_UPDATE = 6
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 4},
    "staleness": {"max_updates": 4, "publish_every": 2},
    "learner": {"groups_per_update": GROUPS_PER_UPDATE},
    "leases": {"timeout_s": 5.0},
    "publish": {"chunk_size_bytes": 4096},
}


class Trainer(threading.Thread):
    """Plays the learner: takes each batch, reports it, publishes every second update; stubborn, as labourers are."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(name="trainer")
        self._operator = operator
        self._enough = threading.Event()
        self.batches: dict[int, TrainingBatch] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                try:
                    self._update(len(self.batches) + 1)
                except Unreachable:
                    self._enough.wait(0.05)
        except BaseException as failure:  # told to whoever joins
            self.failure = failure

    def finish(self) -> None:
        self._enough.set()
        self.join(timeout=60)
        if self.failure is not None:
            raise self.failure
        assert not self.is_alive(), "the trainer waits for a batch that never comes"

    def _update(self, number: int) -> None:
        client = self._operator.client
        batch = client.batch(number)
        assert client.batch(number) == batch  # asking again, after whatever happened, gives the same groups
        client.report(UpdateReport(number=number, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
        if number % 2 == 0:
            client.publish(1 + number // 2, number, self._operator.policy)
        self.batches[number] = batch


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm) -> Coordinator:
    return Coordinator(swarm, SETTINGS).start()


@pytest.fixture
def trainer(swarm: Swarm, coordinator: Coordinator, policy: Path) -> Iterator[Trainer]:
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    trainer = Trainer(operator)
    trainer.start()
    yield trainer
    trainer.finish()


@pytest.fixture
def labourers(coordinator: Coordinator) -> Iterator[list[Labourer]]:
    with at_work(*[coordinator.join_string] * LABOURERS) as crowd:
        yield crowd


def test_coordinator_killed_at_any_moment_loses_and_doubles_no_acknowledged_rollout_or_credit(
    coordinator: Coordinator, trainer: Trainer, labourers: list[Labourer]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def verdicts() -> int:
        return sum(len(labourer.acknowledged) for labourer in labourers)

    for kill in range(KILLS):
        wanted = verdicts() + chance.randint(1, 40)
        until(f"{wanted} verdicts before kill {kill}", lambda: verdicts() >= wanted)  # noqa: B023  # used at once
        coordinator.program.kill()
        coordinator.start()
    wanted = verdicts() + 40
    until(f"{wanted} verdicts after the last restart", lambda: verdicts() >= wanted)
    for labourer in labourers:
        labourer.finish()
    trainer.finish()

    assert_everything_acknowledged_is_there_once(coordinator, labourers)
    assert_every_batch_is_numbered_and_settled_once(coordinator, trainer)
    before = coordinator.leaderboard()
    for labourer in labourers:
        assert_sending_again_changes_nothing(coordinator, labourer)
    assert_ledger_is_sound(coordinator)
    after = coordinator.leaderboard()
    earned = ("posted_micros", "pending_micros", "voided_micros", "accepted_rollouts")
    assert [[row[name] for name in earned] for row in after.values()] == [
        [row[name] for name in earned] for row in before.values()
    ]


def assert_everything_acknowledged_is_there_once(coordinator: Coordinator, labourers: list[Labourer]) -> None:
    """Every labourer repeated itself until it had a verdict, so the store holds what they heard and nothing else."""
    acknowledged = [
        (chunks.digest(open_envelope("rollout", envelope).payload), lease_id, verdict.tokens, verdict.credit_micros)
        for labourer in labourers
        for lease_id, (envelope, verdict) in labourer.acknowledged.items()
        if verdict.outcome != "rejected"
    ]
    with coordinator.copy_of_store() as connection:
        stored = connection.execute(sa.text("SELECT claim_id, lease_id, tokens, credit_micros FROM rollouts"))
        assert sorted(map(tuple, stored)) == sorted(acknowledged)
    assert_ledger_is_sound(coordinator)
    # Honest nodes are refused for one reason only: the coordinator was away until their lease had ended.
    refused = {v.code for labourer in labourers for _, v in labourer.acknowledged.values() if v.outcome == "rejected"}
    assert refused <= {"lease_closed"}


def assert_every_batch_is_numbered_and_settled_once(coordinator: Coordinator, trainer: Trainer) -> None:
    with coordinator.copy_of_store() as connection:
        numbers = connection.execute(sa.text("SELECT batch FROM batches ORDER BY batch")).scalars().all()
        assert numbers == list(range(1, len(numbers) + 1))
        for number, batch in trainer.batches.items():
            members = sa.text("SELECT claim_id FROM rollouts WHERE batch = :number ORDER BY group_no")
            stored = connection.execute(members, {"number": number}).scalars().all()
            assert stored == [group.claim_id for group in batch.groups]
            assert len(stored) == GROUPS_PER_UPDATE
        settled = connection.execute(sa.text("SELECT claim_id, state FROM ledger_claims")).all()
        versions = connection.execute(sa.text("SELECT version, policy_update FROM versions ORDER BY version")).all()
    reported = {group.claim_id for batch in trainer.batches.values() for group in batch.groups}
    assert reported <= {claim for claim, state in settled if state == "posted"}
    assert [tuple(row) for row in versions] == [(number + 1, 2 * number) for number in range(len(versions))]


def assert_sending_again_changes_nothing(coordinator: Coordinator, labourer: Labourer) -> None:
    """Every acknowledged rollout once more: recognised, with the credit it had the first time."""
    again = Labourer(coordinator.join_string).node
    again.key = labourer.node.key
    try:
        taken = [pair for pair in labourer.acknowledged.values() if pair[1].outcome != "rejected"]
        for start in range(0, len(taken), limits.LEASES_PER_REQUEST_MAX):
            some = taken[start : start + limits.LEASES_PER_REQUEST_MAX]
            repeated = again.submit(*(envelope for envelope, _ in some))
            assert repeated == tuple(v.model_copy(update={"outcome": "already_accepted"}) for _, v in some)
    finally:
        again.close()


def test_a_request_that_the_crash_left_without_an_answer_may_be_repeated(coordinator: Coordinator) -> None:
    """Registering, beating and giving back twice are harmless, so a node need not know whether it was heard."""
    labourer = Labourer(coordinator.join_string)
    labourer.node.register()
    coordinator.program.kill()
    with pytest.raises(Unreachable):
        labourer.node.beat()
    coordinator.start()
    labourer.node.register()
    try:
        assert labourer.node.beat().newest_version == coordinator.status()["version"]
    except SwarmError as error:
        pytest.fail(f"the node was forgotten: {error}")
    finally:
        labourer.node.close()
