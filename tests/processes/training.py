"""A round whose learner is killed and goes on: where it goes on, and whether all is whole afterwards."""

import re
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from tests.processes.programs import until, words_of
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound

KAPPA = 3
GROUPS_PER_UPDATE = 2


MOVING = {"entropy_bonus": 0.01}
"""The objective of a round in which nobody is right about anything: the bonus makes every version another one."""


def training(policy: Path, **learner: Any) -> Settings:
    """A round that does not end by itself."""
    return {
        "round": {"max_updates": 100_000},
        "model": {"path": str(policy)},
        "sampling": {"samples_per_group": 4},
        "staleness": {"max_updates": KAPPA + 1, "publish_every": KAPPA},
        "learner": {"groups_per_update": GROUPS_PER_UPDATE, **learner},
    }


def learner_log(coordinator: Coordinator) -> str:
    return (coordinator.folder / "logs" / "learner.log").read_text()


def child(coordinator: Coordinator, command: str) -> psutil.Process:
    """The coordinator's child that runs this command."""
    leader = coordinator.program.process.pid
    (only,) = (process for process in psutil.Process(leader).children() if command in words_of(process))
    return only


def resumed_at(coordinator: Coordinator, log_before: str) -> int:
    """The update from which a learner that was started since then goes on."""
    match = until(
        "the learner to resume",
        lambda: re.search(r"resumed update=(\d+)", learner_log(coordinator)[len(log_before) :]),
    )
    assert match
    return int(match[1])


def last_checkpoints(coordinator: Coordinator) -> set[int]:
    """Return the possible last checkpoints: the last multiple of kappa, or the one before until that is synced."""
    with coordinator.copy_of_store() as connection:
        reported = connection.execute(sa.text("SELECT MAX(batch) FROM batches WHERE reported_ms IS NOT NULL")).scalar()
    assert reported
    newest = reported // KAPPA * KAPPA
    return {newest, newest - KAPPA}


def assert_versions_and_batches_are_whole(coordinator: Coordinator) -> None:
    """Versions follow each other, every batch but the newest is reported, and each of its groups is settled once."""
    with coordinator.copy_of_store() as connection:
        versions = connection.execute(sa.text("SELECT version, policy_update FROM versions ORDER BY version")).all()
        batches = connection.execute(sa.text("SELECT batch, reported_ms FROM batches ORDER BY batch")).all()
        sizes = dict(
            map(
                tuple,
                connection.execute(sa.text("SELECT batch, COUNT(*) FROM rollouts WHERE batch > 0 GROUP BY batch")),
            )
        )
        unsettled = connection.execute(
            sa.text(
                "SELECT r.claim_id FROM rollouts r JOIN batches b ON r.batch = b.batch "
                "JOIN ledger_claims c ON c.claim_id = r.claim_id "
                "WHERE b.reported_ms IS NOT NULL AND c.state != 'posted'"
            )
        ).all()
    assert [tuple(row) for row in versions] == [(number + 1, KAPPA * number) for number in range(len(versions))]
    assert [number for number, _ in batches] == list(range(1, len(batches) + 1))
    assert all(reported_ms for _, reported_ms in batches[:-1])
    assert set(sizes.values()) == {GROUPS_PER_UPDATE}
    assert unsettled == []
    assert_ledger_is_sound(coordinator)
