"""`kill -9` for one of two processes on one PostgreSQL, in the middle of an acceptance: nothing is left half done.

It dies while it waits for a lock of ours, between storing a rollout and drawing whether it is audited. Its nodes go on
at the other's door, with the same rollouts; afterwards the whole store is compared with what everybody was told.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from bench.control.books import CHECKS, Heard, examine
from coordinator.rules.lifecycle import WAITING
from coordinator.store.state import Database, engine
from coordinator.store.tables import rollouts
from tests.ledger import postgres
from tests.processes.light_node import Labourer, at_work
from tests.processes.programs import Swarm, free_address, script, until
from tests.processes.rounds import Coordinator, Settings, operator_of

pytestmark = pytest.mark.processes

GROUPS = 30
"""Verdicts before the kill, and again after it."""
BATCH = 4
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 100, "publish_every": 1},
    "learner": {"groups_per_update": BATCH},
    "leases": {"groups_per_request": 2, "over_issue": 0},
}
STUCK = sa.text(
    "SELECT application_name FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'relation'"
)
UNTRAINED = sa.select(sa.func.count()).where(rollouts.c.state.in_(WAITING))


@contextmanager
def stuck(url: str, name: str) -> Iterator[None]:
    """A process waits in the middle of an acceptance as long as the body takes."""
    made = engine(url)
    with made.connect() as holder, made.connect() as watcher:

        def catch() -> bool:
            holder.execute(sa.text("BEGIN"))
            holder.execute(sa.text("LOCK TABLE audits IN SHARE MODE"))
            caught = until("a process to wait for us", lambda: watcher.execute(STUCK).scalar())
            if caught != name:
                holder.execute(sa.text("ROLLBACK"))
            return bool(caught == name)

        until(f"{name} to be in the middle of an acceptance", catch)
        yield
        holder.execute(sa.text("ROLLBACK"))
    made.dispose()


@pytest.mark.parametrize("victim", [pytest.param("beside", marks=pytest.mark.slow), "leader"])
def test_a_process_that_is_killed_in_an_acceptance_leaves_nothing_half_done(
    victim: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := postgres.missing():
        pytest.skip(reason)  # several processes share a store on PostgreSQL alone
    with postgres.cluster(durable=False) as url, closing(Swarm(tmp_path / "swarm")) as swarm:
        monkeypatch.setenv("PGAPPNAME", "leader")
        leader = Coordinator(swarm, {**SETTINGS, "store": {"url": url}}).start()
        learner = operator_of(swarm, leader, policy)
        learner.publish()
        monkeypatch.setenv("PGAPPNAME", "beside")
        address = free_address()
        beside = swarm.start("api", script("swarm-coordinator"), "api", str(leader.folder), "--listen", address)
        beside.said("Serving nodes")
        doors = (leader.join_string, leader.join_string.replace(leader.address, address))
        with at_work(*doors * 2, others=doors) as crowd:
            until(f"{GROUPS} verdicts", lambda: answered(crowd) >= GROUPS)
            first = learner.client.batch(1)
            with stuck(url, victim):
                {"leader": leader.program, "beside": beside}[victim].kill()
            before = answered(crowd)
            until(f"{GROUPS} more of who is left", lambda: answered(crowd) >= before + GROUPS)
        if victim == "leader":
            monkeypatch.setenv("PGAPPNAME", "leader")
            leader.start()
        assert learner.client.batch(1) == first
        with closing(Database(url)) as database:
            waiting = database.run_now(lambda connection: int(connection.execute(UNTRAINED).scalar_one()))
            batches = [first, *(learner.client.batch(2 + number) for number in range(waiting // BATCH))]
            trained = [group.claim_id for batch in batches for group in batch.groups]
            assert database.run_now(examine, heard(crowd, trained)) == {name: [] for name in CHECKS}


def answered(crowd: list[Labourer]) -> int:
    return sum(len(node.acknowledged) for node in crowd)


def heard(crowd: list[Labourer], trained: list[str]) -> Heard:
    """All that nodes and the learner were told."""
    return Heard(
        leases=[(labourer.node.key.node_id, lease) for labourer in crowd for lease in labourer.leased],
        verdicts=[verdict for labourer in crowd for _, verdict in labourer.acknowledged.values()],
        trained=trained,
        groups_per_update=BATCH,
    )
