"""A hundred identities earn what one earns for the same work, honest or not."""

from itertools import cycle
from pathlib import Path

import pytest

from coordinator.audit.trust import Finding, Rules
from coordinator.store import tables
from coordinator.store.state import set_fact
from tests.coordinator.world import HONEST_TOKENS, World

GROUPS = 100


def payoff(folder: Path, identities: int, finding: Finding) -> int:
    """What so many identities are owed when the round is over, of whose claims audits find this."""
    world = World(folder, staleness=1000, rules=Rules())
    world.publish(1, 0)
    keys = [world.join(number + 1) for number in range(identities)]
    for key in [key for key, _ in zip(cycle(keys), range(GROUPS), strict=False)]:
        if not is_banned(world, key.node_id):
            world.earn(key)
        for claim in world.take_cases():
            world.find(claim, finding)
    world.run(set_fact, "finished", True)
    world.release_leftovers()
    assert world.take_cases() == []
    assert world.audit() == []
    owed = sum(world.owed(key.node_id)[1] for key in keys)
    world.database.close()
    return owed


def is_banned(world: World, owner: str) -> bool:
    return any(row["owner"] == owner and row["banned_ms"] for row in world.rows(tables.trust))


@pytest.mark.parametrize("identities", [1, 100])
def test_honest_work_pays_the_same_by_however_many_identities(tmp_path: Path, identities: int) -> None:
    assert payoff(tmp_path, identities, "pass") == GROUPS * HONEST_TOKENS


@pytest.mark.parametrize("identities", [1, 100])
def test_forgeries_pay_nothing_by_however_many_identities(tmp_path: Path, identities: int) -> None:
    assert payoff(tmp_path, identities, "hard") == 0
