"""`kill -9` before and after the commit that a query shares with its lease: both are there, or neither is."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.store.state import Database, FollowingEffect
from coordinator.transactions import offers, queries
from protocol.work.messages import LeaseRequest
from tests.coordinator.transactions.test_queries import PATIENCE_MS, new_key, query
from tests.coordinator.world import PRICE, World

CHILD = "from tests.coordinator.transactions.test_killed_commit import ask_and_die; ask_and_die({folder!r}, {after})"


class KilledAfter(Database):
    """A store whose process is killed after its next commit, before anybody is answered."""

    def _commit(self, group: Any) -> None:
        super()._commit(group)
        os.kill(os.getpid(), signal.SIGKILL)


def die_before(_connection: object, _cursor: object, text: str, *_rest: object) -> None:
    """Kill this process before its next commit."""
    if text == "COMMIT":
        os.kill(os.getpid(), signal.SIGKILL)


def ask_and_die(folder: str, after: bool) -> None:
    """Ask a query for which an idle node waits, and be killed directly before or after the commit."""
    world = World(Path(folder))
    world.publish(1, 0)
    node, key = world.join(1), new_key(world)
    world.database.close()
    database = (KilledAfter if after else Database)(world.where)
    if not after:
        sa.event.listen(database._engine, "before_cursor_execute", die_before)
    ask = partial(
        queries.ask,
        key=key,
        asked=[query()],
        terms=world.terms,
        dearest_price=PRICE,
        patience_ms=PATIENCE_MS,
        now_ms=world.now_ms,
    )
    request = LeaseRequest(version=1, groups=1, numerics="")
    offer = partial(
        offers.offer, node=node.node_id, message=request, terms=world.terms, draw=world.draw, now_ms=world.now_ms
    )

    async def run() -> None:
        follower = FollowingEffect(offer, asyncio.get_running_loop().create_future())
        await database.run_followed(ask, [follower])

    asyncio.run(run())


def count(connection: sa.Connection, table: sa.Table) -> int:
    return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


@pytest.mark.parametrize("after", [False, True])
def test_a_query_and_its_lease_survive_a_kill_together_or_not_at_all(tmp_path: Path, after: bool) -> None:
    died = subprocess.run([sys.executable, "-c", CHILD.format(folder=str(tmp_path), after=after)], check=False)
    assert died.returncode == -signal.SIGKILL
    dead = Database(tmp_path / "state.db")
    rows = [dead.run_now(count, table) for table in (tables.queries, tables.leases)]
    assert rows == ([1, 1] if after else [0, 0])
    dead.close()
