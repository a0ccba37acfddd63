"""The fleet of a running round, on a real store: who stands by, why, and that a restart changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Config, parse
from coordinator.reports import summary
from coordinator.rules.fleet_choice import Change
from coordinator.store import tables
from coordinator.transactions import broadcasts, registry
from coordinator.transactions import fleet as activation
from protocol import limits
from protocol.wire.signing import NodeKey
from protocol.work.messages import Heartbeat, Transfer
from tests.coordinator.world import HONEST_TOKENS, PRICE, World, answer

SILENT_MS = 60_000
GROUP_MS = 1000


def config(**fleet: Any) -> Config:
    wanted = {"gamma": 1.0, "window_s": 0.0, "dwell_s": 0.0} | fleet
    return parse({"fleet": wanted, "staleness": {"max_updates": 2}, "learner": {"groups_per_update": 2}})


def beat(world: World, key: NodeKey, tokens_per_s: float = 4.0) -> None:
    moved = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)
    message = Heartbeat(
        session="0" * 16, version=1, phase="idle", tokens_per_s=tokens_per_s, transfer=moved, blames=(), reached=()
    )
    world.run(registry.heartbeat, key.node_id, message, now_ms=world.now_ms)


def sample(world: World, key: NodeKey) -> None:
    """Sample a group in a second."""
    lease = world.lease(key, version=world.run(newest))
    world.now_ms += GROUP_MS - 1
    assert world.submit(key, answer(key, lease)).outcome == "accepted"


def newest(connection: Any) -> int:
    return int(connection.execute(tables.versions.select().order_by(tables.versions.c.version.desc())).first()[0])


def steer(world: World, settings: Config, up_since_ms: int = 0) -> list[Change]:
    changes: list[Change] = world.run(
        activation.steer, settings, silent_after_ms=SILENT_MS, up_since_ms=up_since_ms, now_ms=world.now_ms
    )
    return changes


@pytest.fixture
def three(tmp_path: Path) -> Any:
    """A cheap, a middling and a dear node, each half a group a second by its claim; updates of three seconds."""
    world = World(tmp_path)
    world.publish(1, 0)
    keys = [world.join(number, price=number * PRICE) for number in (1, 2, 3)]
    for number in (1, 2):
        for key in keys[:2]:
            beat(world, key)
            sample(world, key)
        world.train(number)
        world.publish(number + 1, number)
    for key in keys:
        beat(world, key)
    yield world, keys
    world.database.close()


def test_an_outage_within_the_last_broadcasts_is_no_part_of_the_load(three: Any) -> None:
    """Else the status would advise to raise `staleness.max_updates` to whatever a restart took."""
    world, keys = three
    published = {row["version"]: row["published_ms"] for row in world.rows(tables.versions)}
    world.run(broadcasts.record_start, world.now_ms + 90_000)
    ended_ms = {1: published[1] + 2000, 2: world.now_ms + 100_000, 3: world.now_ms + 100_000}
    rows = [
        {"version": version, "node_id": keys[0].node_id, "first_token_ms": first_token_ms}
        for version, first_token_ms in ended_ms.items()
    ]
    world.run(lambda connection: connection.execute(tables.broadcasts.insert(), rows) and None)
    load = world.run(activation.load, config(), alive_since_ms=world.now_ms + 1)
    assert load.broadcast_s == 2.0


def at_work(world: World) -> dict[str, bool]:
    return {row["node_id"]: row["works"] for row in world.rows(tables.fleet)}


def test_everybody_works_unless_the_operator_wants_less(three: tuple[World, list[NodeKey]]) -> None:
    world, keys = three
    assert steer(world, config(gamma=0.0)) == []
    assert at_work(world) == {}
    assert all(world.offer(key, version=3).reason != "standby" for key in keys)


def test_what_is_not_needed_stands_by_the_dearest_first_and_is_told_so(three: tuple[World, list[NodeKey]]) -> None:
    world, (cheap, _, dear) = three
    changes = steer(world, config())
    assert [(change.name, change.works) for change in changes] == [(dear.node_id, False)]
    assert "dearest" in changes[0].reason
    assert world.offer(dear, version=3).reason == "standby"
    assert world.offer(dear, version=3).retry_s > 0
    assert world.offer(cheap, version=3).leases
    shown = world.run(summary.status, config=config(), alive_since_ms=0)["fleet"]
    assert [one["reason"] for one in shown if not one["works"]] == [changes[0].reason]


def test_a_node_that_stands_by_may_still_answer_what_it_holds(three: tuple[World, list[NodeKey]]) -> None:
    world, (_, _, dear) = three
    lease = world.lease(dear, version=3)
    steer(world, config())
    assert world.submit(dear, answer(dear, lease)).outcome == "accepted"


def test_a_death_calls_the_next_cheapest_at_once(three: tuple[World, list[NodeKey]]) -> None:
    world, (cheap, middling, dear) = three
    calm = config(window_s=600.0, dwell_s=600.0)
    steer(world, config())
    world.now_ms += SILENT_MS + 1
    beat(world, middling)
    beat(world, dear)
    changes = steer(world, calm)
    assert [(change.name, change.works) for change in changes] == [(cheap.node_id, False), (dear.node_id, True)]
    assert world.offer(dear, version=3).leases


def test_who_lowers_its_price_is_taken_in_place_of_the_dearer(three: tuple[World, list[NodeKey]]) -> None:
    world, (_, middling, dear) = three
    steer(world, config())
    world.join(3, price=PRICE // 2)
    beat(world, dear)
    world.now_ms += 1000
    steer(world, config())
    assert at_work(world)[dear.node_id]
    assert not at_work(world)[middling.node_id]


def test_a_restart_changes_nothing(three: tuple[World, list[NodeKey]]) -> None:
    world, _ = three
    steer(world, config())
    before = world.dump()
    world.reopen()
    assert steer(world, config()) == []
    assert world.dump() == before


def test_a_coordinator_that_was_away_for_an_hour_finds_its_fleet_as_it_was(three: tuple[World, list[NodeKey]]) -> None:
    """The coordinator received no reports meanwhile, and no batch could be formed."""
    world, keys = three
    steer(world, config())
    before = at_work(world)
    world.now_ms += 3_600_000
    up_since_ms = world.now_ms
    world.reopen()
    assert steer(world, config(window_s=600.0), up_since_ms) == []
    for key in keys:
        beat(world, key)
    world.now_ms += SILENT_MS
    assert steer(world, config(window_s=600.0), up_since_ms) == []
    assert at_work(world) == before


def test_rejected_work_lowers_a_rate(three: tuple[World, list[NodeKey]]) -> None:
    world, (cheap, *_) = three
    rates = {one["node_id"]: one["groups_per_s"] for one in _rated(world)}
    for _ in range(3):
        lease = world.lease(cheap, version=3)
        world.now_ms += 20 * GROUP_MS
        world.expire()
        assert lease.lease_id
    assert {one["node_id"]: one["groups_per_s"] for one in _rated(world)}[cheap.node_id] < 0.9 * rates[cheap.node_id]


@pytest.mark.parametrize("boast", [1e6, limits.TOKENS_PER_S_MAX])
def test_who_boasts_of_its_speed_takes_the_place_of_one_node_and_not_of_all(
    three: tuple[World, list[NodeKey]], boast: float
) -> None:
    world, (cheap, middling, dear) = three
    liar = world.join(9, price=0)
    beat(world, liar, tokens_per_s=boast)
    steer(world, config())
    world.now_ms += 1000
    steer(world, config())
    assert [at_work(world)[key.node_id] for key in (cheap, middling, dear)] == [True, False, False]
    rates = {one["node_id"]: one["groups_per_s"] for one in world.rows(tables.fleet)}
    assert rates[liar.node_id] <= max(rates[cheap.node_id], rates[middling.node_id])
    json.dumps(world.run(summary.status, config=config(), alive_since_ms=0), allow_nan=False)


def test_a_learner_that_waits_far_too_long_has_everybody_at_work(three: tuple[World, list[NodeKey]]) -> None:
    """The node that was counted on gives nothing: it asks for no work, returns what it gets, or lets it expire."""
    world, (cheap, middling, dear) = three
    steer(world, config())
    assert not at_work(world)[dear.node_id]
    world.now_ms += 59_000
    assert steer(world, config(window_s=60.0)) == []
    called = []
    for _ in range(3):
        world.now_ms += 30_000
        for key in (cheap, middling, dear):
            beat(world, key)
        called.append([change.name for change in steer(world, config(window_s=60.0)) if change.works])
    assert called == [[dear.node_id], [], []]
    for key in (cheap, middling, dear):
        sample(world, key)
    world.train(3)
    for key in (cheap, middling, dear):
        beat(world, key)
    steer(world, config())
    assert not at_work(world)[dear.node_id]


def _rated(world: World) -> list[dict[str, Any]]:
    steer(world, config())
    return world.rows(tables.fleet)


def test_the_budget_of_an_hour_is_never_overspent_and_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path, budget_micros_per_hour=20)
    world.publish(1, 0)
    key = world.join(1)
    spent = 0
    while reply := world.offer(key).leases:
        spent += world.submit(key, answer(key, reply[0])).credit_micros
    assert world.offer(key).reason == "budget"
    assert spent == 4 * HONEST_TOKENS == 16  # a fifth answer might have cost 8
    world.now_ms += 3_600_000
    assert world.offer(key).leases
    world.database.close()
