"""The registry: each request counts once, counters add up over restarts, and nothing fills the disk."""

from typing import Any, Literal

import pytest

from coordinator.commands.nodes import _state
from coordinator.config import parse
from coordinator.reports import moderation, summary
from coordinator.reports.ranking import Fold, by_node
from coordinator.store import tables
from coordinator.transactions import registry
from protocol import limits
from protocol.errors import AgentTooOld, KeyRevoked, MalformedMessage, NonceReplayed, PriceTooHigh, UnknownNode
from protocol.ids import NodeId
from protocol.people.owner import Revocation
from protocol.wire import canonical
from protocol.wire.generation import CURRENT
from protocol.wire.signing import NodeKey
from protocol.work.messages import Heartbeat, Register, Transfer
from tests.coordinator.transactions.test_owners import delegate, say
from tests.coordinator.world import PRICE, World

NODE, OTHER = NodeKey(b"1" * 32).node_id, NodeKey(b"2" * 32).node_id
SKEW_MS = limits.CLOCK_SKEW_MAX_S * 1000
NONCE = bytes(limits.NONCE_BYTES)


def beat(world: World, node: NodeId, session: int = 0, moved: int = 0, phase: Literal["idle", "left"] = "idle") -> None:
    message = Heartbeat(
        session=f"{session:016x}",
        version=1,
        phase=phase,
        tokens_per_s=10.0,
        transfer=Transfer(from_peers=moved, from_seeder=2 * moved, from_http=0, to_peers=3 * moved),
        blames=(),
        reached=(),
    )
    world.run(registry.heartbeat, node, message, now_ms=world.now_ms)


def spend(world: World, *, node: NodeId = NODE, nonce: bytes = NONCE, sent_ms: int) -> None:
    world.run(registry.spend_nonce, node, nonce, sent_ms)


def live(world: World) -> dict[NodeId, str]:
    found: dict[NodeId, str] = world.run(registry.live_nodes, silent_after_ms=100, now_ms=world.now_ms)
    return found


def row(world: World, node: NodeId) -> dict[str, Any]:
    """A node's line of the leaderboard."""
    return next(line for line in world.run(summary.leaderboard) if line["node_id"] == node)


def test_a_replayed_request_is_refused(world: World) -> None:
    spend(world, sent_ms=world.now_ms)
    for sent_ms in (world.now_ms, world.now_ms + 1):
        with pytest.raises(NonceReplayed):
            spend(world, sent_ms=sent_ms)


def test_two_nodes_may_draw_the_same_nonce(world: World) -> None:
    spend(world, sent_ms=world.now_ms)
    spend(world, node=OTHER, sent_ms=world.now_ms)


@pytest.mark.parametrize("ahead_ms", [-SKEW_MS, 0, SKEW_MS])
def test_a_nonce_is_remembered_while_the_clock_check_would_let_it_pass(world: World, ahead_ms: int) -> None:
    sent_ms = world.now_ms + ahead_ms
    spend(world, sent_ms=sent_ms)
    world.now_ms = sent_ms + SKEW_MS
    world.run(registry.forget_nonces, world.now_ms)
    with pytest.raises(NonceReplayed):
        spend(world, sent_ms=sent_ms)


def test_old_nonces_are_forgotten(world: World) -> None:
    for number in range(10):
        spend(world, nonce=number.to_bytes(16), sent_ms=world.now_ms)
    world.now_ms += 2 * SKEW_MS + 1
    world.run(registry.forget_nonces, world.now_ms)
    assert world.rows(tables.nonces) == []


def test_a_node_above_the_price_is_told_what_is_paid(world: World) -> None:
    message = Register(name="n", price_micros_per_mtok=11, addresses=(), agent="")
    with pytest.raises(PriceTooHigh, match="--price 10"):
        world.run(registry.register, NODE, message, max_price=10, now_ms=0)
    assert world.rows(tables.nodes) == []


def test_registering_again_changes_price_and_keeps_the_rest(world: World) -> None:
    key = world.join(1)
    first = world.now_ms
    beat(world, key.node_id, moved=1)
    world.now_ms += 50
    world.join(1, price=2 * PRICE)
    (node,) = world.rows(tables.nodes)
    assert (node["price_micros_per_mtok"], node["registered_ms"], node["last_seen_ms"]) == (
        2 * PRICE,
        first,
        first + 50,
    )
    assert row(world, key.node_id)["from_peers"] == 1


def test_a_heartbeat_of_a_stranger_is_refused(world: World) -> None:
    with pytest.raises(UnknownNode):
        beat(world, NODE)


def test_a_heartbeat_under_a_revoked_key_is_refused_and_keeps_no_place_in_the_plan(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    say(world, Revocation(node_id=key.node_id, number=2))
    world.now_ms += 101
    with pytest.raises(KeyRevoked):
        beat(world, key.node_id)
    assert live(world) == {}


def test_counters_that_begin_again_at_zero_add_up(world: World) -> None:
    key = world.join(1)
    for session, moved in ((1, 5), (1, 7), (2, 0), (2, 3), (2, 3)):
        beat(world, key.node_id, session, moved)
    line = row(world, key.node_id)
    assert (line["from_peers"], line["from_seeder"], line["from_http"], line["to_peers"]) == (10, 20, 0, 30)


def test_absurd_counters_do_not_break_the_leaderboard(world: World) -> None:
    """A single liar must not break the public page for everybody."""
    key = world.join(1)
    for session in range(4):
        beat(world, key.node_id, session, limits.TRANSFER_MAX_BYTES // 3)
    assert row(world, key.node_id)["from_peers"] == 4 * (limits.TRANSFER_MAX_BYTES // 3)
    assert world.run(summary.status, config=parse({}), alive_since_ms=0)["nodes"] == 1


def test_only_nodes_that_were_heard_of_lately_are_alive(world: World) -> None:
    silent, lives = world.join(1), world.join(2)
    world.now_ms += 101
    beat(world, lives.node_id)
    assert live(world) == {lives.node_id: "127.0.0.1:1"}
    beat(world, silent.node_id)
    assert live(world).keys() == {lives.node_id, silent.node_id}


def test_a_node_that_said_that_it_leaves_has_left_until_it_registers_again(world: World) -> None:
    """Such a node was shown as silent, like one that crashed, and its peers dialled it for three more heartbeats."""
    key, other = world.join(1), world.join(2)
    beat(world, key.node_id)
    beat(world, other.node_id)

    def states() -> set[str]:
        lines = world.run(by_node, Fold(), {}, silent_after_ms=100, now_ms=world.now_ms)
        rows = world.run(moderation.listed, alive_since_ms=world.now_ms - 100)
        shown = {(line.node_id, line.state) for line in lines} & {(row["node_id"], _state(row)) for row in rows}
        return {state for node, state in shown if node == key.node_id}

    assert states() == {"idle"}
    beat(world, key.node_id, phase="left")
    assert live(world).keys() == {other.node_id}
    assert states() == {"left"}
    world.now_ms += 101
    assert states() == {"left"}
    world.join(1)
    assert live(world).keys() == {key.node_id}
    assert states() == {"offline"}
    world.now_ms += 101
    assert states() == {"silent"}


def test_a_node_without_an_address_is_alive_and_nowhere(world: World) -> None:
    message = Register(name="hidden", price_micros_per_mtok=0, addresses=(), agent="")
    world.run(registry.register, NODE, message, max_price=0, now_ms=world.now_ms)
    assert live(world) == {NODE: ""}


def rows_of(world: World, table: Any) -> int:
    count: int = world.run(lambda connection: len(connection.execute(table.select()).all()))
    return count


def test_ever_new_sessions_fill_no_disk(world: World) -> None:
    world.run(registry.register, NODE, Register(name="n", price_micros_per_mtok=PRICE, addresses=(), agent="t"),
              max_price=PRICE, now_ms=world.now_ms)  # fmt: skip
    for session in range(registry.SESSIONS_MAX + 5):
        beat(world, NODE, session, moved=1)
    assert rows_of(world, tables.transfers) == registry.SESSIONS_MAX


def test_a_node_of_a_retired_generation_is_told_since_when_its_work_does_not_count() -> None:
    value = Register(name="n", price_micros_per_mtok=1, addresses=(), agent="echo-swarm/0.0.1").model_dump()
    del value["generation"]  # as agents did before there were numbers
    olds = (value, value | {"generation": 0}, {"nothing": "that is known here"})
    for old, since in [*((old, "2026-11-22") for old in olds), (value | {"generation": 7}, "2026-12-01")]:
        with pytest.raises(AgentTooOld, match=since) as caught:
            Register.from_bytes(canonical.encode(old))
        assert "install.sh" in caught.value.hint
    current = Register.from_bytes(canonical.encode(value | {"generation": CURRENT}))
    assert current.generation == CURRENT
    with pytest.raises(MalformedMessage):
        Register.from_bytes(canonical.encode(value | {"generation": "new"}))
