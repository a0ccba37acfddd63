"""Blames: an invented accusation is not recorded, and free keys cannot fill the public incident list."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.reports import history, summary
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.transactions import blames, standings
from coordinator.transactions.blames import BlameEvidence
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey
from protocol.work.messages import Blame
from tests.coordinator.world import World

CURRENT = frozenset(f"{number:064x}" for number in range(200))
OLD_CHUNK = "f" * 64
PLANNED = BlameEvidence(CURRENT, lambda _node, _upstream: True)
UNPLANNED = BlameEvidence(CURRENT, lambda _node, _upstream: False)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def blame_of(accused: NodeKey, chunk: int = 0) -> Blame:
    return Blame(peer_id=accused.node_id, chunk=f"{chunk:064x}", got="d" * 64)


def record(world: World, accuser: NodeKey, *reported: Blame, evidence: BlameEvidence = PLANNED) -> None:
    world.run(blames.record, accuser.node_id, reported, evidence, now_ms=world.now_ms)
    world.now_ms += 1


def prove(world: World, *keys: NodeKey) -> None:
    """Give each owner a validated group."""
    for key in keys:
        world.run(standings.count, key.node_id, 1)
        world.run(standings.put, key.node_id, OwnerStanding(claims=1, groups=1))


def rows(world: World) -> int:
    return int(world.run(lambda c: c.execute(sa.select(sa.func.count()).select_from(tables.blames)).scalar_one()))


def board_row(world: World, node: NodeId) -> dict[str, Any]:
    return next(line for line in world.run(summary.leaderboard) if line["node_id"] == node)


def incidents(world: World) -> list[history.Incident]:
    found: list[history.Incident] = world.run(history.incidents)
    return found


def test_invented_chunk_is_not_recorded(world: World) -> None:
    slanderer, honest = world.join(1), world.join(2)
    record(world, slanderer, Blame(peer_id=honest.node_id, chunk=OLD_CHUNK, got="d" * 64))
    assert rows(world) == 0
    record(world, slanderer, blame_of(honest))
    assert rows(world) == 1


def test_bytes_that_match_their_chunk_are_no_blame(world: World) -> None:
    slanderer, honest = world.join(1), world.join(2)
    record(world, slanderer, Blame(peer_id=honest.node_id, chunk="0" * 64, got="0" * 64))
    assert rows(world) == 0


def test_blame_over_an_invented_connection_is_not_recorded(world: World) -> None:
    slanderer, honest = world.join(1), world.join(2)
    record(world, slanderer, blame_of(honest), evidence=UNPLANNED)
    assert rows(world) == 0


def test_blame_over_a_connection_that_both_receipts_name_is_recorded(world: World) -> None:
    accuser, accused = world.join(1), world.join(2)
    upload = {"version": 1, "size_bytes": 10, "busy_s": 1.0, "hindered": False}
    world.run(insert, tables.uploads, receiver=accuser.node_id, sender=accused.node_id, **upload)
    record(world, accuser, blame_of(accused), evidence=UNPLANNED)
    assert rows(world) == 0, "the accuser's own receipt is no second witness"
    world.run(insert, tables.dials, receiver=accused.node_id, node=accuser.node_id, version=1, answered=True)
    record(world, accuser, blame_of(accused), evidence=UNPLANNED)
    assert rows(world) == 1


def insert(connection: sa.Connection, table: sa.Table, **row: Any) -> None:
    connection.execute(sa.insert(table).values(**row))


def test_a_repeated_blame_counts_once(world: World) -> None:
    accuser, second, accused = world.join(1), world.join(2), world.join(3)
    prove(world, accuser, second)
    record(world, accuser, blame_of(accused), blame_of(accused))
    record(world, accuser, blame_of(accused), blame_of(accused, chunk=1))
    assert board_row(world, accused.node_id)["blamed"] == 2
    assert board_row(world, accuser.node_id)["blamed"] == 0
    record(world, second, blame_of(accused))
    assert board_row(world, accused.node_id)["blamed"] == 3


def test_slander_by_free_keys_does_not_fill_the_incidents(world: World) -> None:
    """31 keys blamed honest nodes for invented chunks and held all 20 rows of the public list."""
    honest = [world.join(number) for number in range(1, 5)]
    prove(world, honest[0])
    record(world, honest[0], blame_of(honest[1]), blame_of(honest[1], chunk=1))
    for number in range(100, 131):
        slanderer = world.join(number)
        record(world, slanderer, *(blame_of(key, chunk=number) for key in honest))
    about = incidents(world)
    assert [(one.node_id, one.count) for one in about] == [("", 31 * 4), (honest[1].node_id, 2)]
    assert about[0].detail == "31 nodes without validated work blamed 4 nodes. Such reports do not count."
    assert about[1].detail == "Wrong bytes for 2 chunks, reported by node 1."
    assert [board_row(world, key.node_id)["blamed"] for key in honest] == [0, 2, 0, 0]


def test_an_accused_node_has_one_row_that_names_its_accusers(world: World) -> None:
    accused, *accusers = (world.join(number) for number in range(1, 7))
    prove(world, *accusers)
    for accuser in accusers:
        record(world, accuser, blame_of(accused, chunk=7))
    (incident,) = incidents(world)
    assert incident.count == 1
    assert incident.detail == "Wrong bytes for 1 chunk, reported by node 2, node 3, node 4 and 2 more."


def test_blames_count_once_their_accuser_is_validated(world: World) -> None:
    accuser, accused = world.join(1), world.join(2)
    record(world, accuser, blame_of(accused))
    assert board_row(world, accused.node_id)["blamed"] == 0
    prove(world, accuser)
    assert board_row(world, accused.node_id)["blamed"] == 1


def test_one_accuser_has_a_bounded_number_of_rows(world: World) -> None:
    accuser, accused = world.join(1), world.join(2)
    for start in range(0, 160, 16):
        record(world, accuser, *(blame_of(accused, chunk) for chunk in range(start, start + 16)))
    assert rows(world) == blames.PER_ACCUSER_MAX


def test_free_keys_share_a_bounded_number_of_rows(world: World) -> None:
    accused, proven = world.join(1), world.join(2)
    prove(world, proven)
    fill = [
        {"accuser": world.join(1000).node_id, "accused": "x", "chunk": f"{n:064x}", "got": "d" * 64, "recorded_ms": n}
        for n in range(blames.UNPROVEN_MAX - 1)
    ]
    world.run(lambda connection: connection.execute(sa.insert(tables.blames), fill))
    for number in range(3, 6):
        record(world, world.join(number), blame_of(accused))
    assert rows(world) == blames.UNPROVEN_MAX
    record(world, proven, blame_of(accused))
    assert rows(world) == blames.UNPROVEN_MAX + 1


def test_rejected_work_of_free_keys_does_not_push_out_that_of_known_owners(world: World) -> None:
    known = world.join(1)
    prove(world, known)
    strangers = [world.join(number) for number in range(100, 140)]
    said = {"code": "bad_signature", "count": 1, "last_lease_id": "", "last_message": "m"}
    world.run(insert, tables.rejections, node_id=known.node_id, last_ms=1, **said)
    for place, key in enumerate(strangers):
        world.run(insert, tables.rejections, node_id=key.node_id, last_ms=2 + place, **said)
    about = [one.node_id for one in incidents(world)]
    assert known.node_id in about
    assert len(about) == 1 + history.UNPROVEN_SHOWN
