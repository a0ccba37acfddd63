"""Orders of the operator: over HTTP with their token, with a trace, and with the effect that they say."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import AuditSection
from coordinator.reports import moderation
from coordinator.reports.summary import AFTER_ALL_MS
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.store.state import Database
from coordinator.transactions import orders, standings
from ledger import store
from protocol.errors import NotAuthorised, NotFound, OwnerBanned
from protocol.wire.signing import NodeKey
from protocol.work.messages import LeaseReply, LeaseRequest
from tests.coordinator.served import Served, serve
from tests.coordinator.world import World
from tests.processes.programs import free_address

pytestmark = pytest.mark.asyncio


async def order(served: Served, action: str, node: str, reason: str = "because", status: int = 200) -> dict[str, Any]:
    content = {"action": action, "node": node, "reason": reason, "given_by": "somebody@here"}
    headers = served.operator | {"Accept": "application/json"}
    response = await served.client.post("/v1/operator/orders", json=content, headers=headers)
    assert response.status == status, await response.text()
    found: dict[str, Any] = await response.json()
    return found


def ordered(world: World, action: str, node: NodeKey, reason: str) -> None:
    """An order without the way over HTTP."""
    world.run(moderation.order, action, node.node_id, reason, given_by="me", terms=world.audits, now_ms=5)


async def shown(served: Served, node: str) -> dict[str, Any]:
    response = await served.client.get(f"/v1/operator/nodes/{node}", headers=served.operator)
    assert response.status == 200, await response.text()
    found: dict[str, Any] = await response.json()
    return found


async def test_a_paused_node_gets_no_new_work_but_may_finish_what_it_holds(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        node, other = await served.join(1), await served.join(2)
        (held,) = await served.lease(node)
        assert (await order(served, "pause", node.node_id))["changed"]
        told = await served.call(node, "/v1/leases", LeaseRequest(version=1, groups=1), LeaseReply)
        assert (told.leases, told.reason) == ((), "paused")  # not "standby": no lower price would bring work
        assert len(await served.lease(other)) == 1
        (verdict,) = await served.submit(node, served.answer(node, held))
        assert verdict.outcome == "accepted"
        assert not (await order(served, "pause", node.node_id))["changed"]
        assert (await order(served, "resume", node.node_id))["changed"]
        assert len(await served.lease(node)) == 1
        assert (await shown(served, node.node_id))["alive"]
        given = (await shown(served, node.node_id))["orders"]
        assert [(one["action"], one["reason"], one["given_by"]) for one in given] == [
            ("resume", "because", "somebody@here"),
            ("pause", "because", "somebody@here"),
        ]


async def test_a_banned_owner_hears_why_and_loses_what_no_audit_found_right(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        node = await served.join(1)
        (lease,) = await served.lease(node)
        (verdict,) = await served.submit(node, served.answer(node, lease))
        await served.lease(node)
        assert (await order(served, "ban", "n1", "sold its key"))["changed"]
        with pytest.raises(AssertionError, match="sold its key"):
            await served.lease(node)
        row = await shown(served, node.node_id)
        assert (row["pending_micros"], row["voided_micros"]) == (0, verdict.credit_micros)
        entries = await served.round.database.read(store.entries, 0, 100)
        assert [one.entry.reason_code for one in entries if one.entry.kind == "void"] == [OwnerBanned.code]
        assert await served.round.database.run(store.rebuild) == []
        assert not (await order(served, "ban", "n1"))["changed"]


async def test_an_unbanned_owner_is_audited_in_full_again(world: World) -> None:
    node = world.join(1)
    ordered(world, "ban", node, "no")
    with pytest.raises(OwnerBanned, match="banned this node's owner: no"):
        world.lease(node)
    ordered(world, "unban", node, "yes")
    assert world.run(standings.find_standing, node.node_id) == OwnerStanding(), (
        "audited in full, and no fault was found"
    )
    world.lease(node)
    ordered(world, "ban", node, "again")
    with pytest.raises(OwnerBanned, match="again"):
        world.lease(node)


async def test_an_owner_who_was_banned_without_a_fault_is_banned_by_the_second_one(tmp_path: Path) -> None:
    world = World(tmp_path, staleness=100, rules=AuditSection())
    world.publish(1, 0)
    node = world.join(1)
    for action in ("ban", "unban"):
        ordered(world, action, node, "a mistake")
    for _ in range(2):
        world.earn(node)
    first, second = [row["claim_id"] for row in world.rows(tables.rollouts)]
    world.find(first, "hard")
    world.lease(node)
    world.find(second, "hard")
    with pytest.raises(OwnerBanned, match="2 rollouts"):
        world.lease(node)
    for action in ("unban", "ban", "unban"):
        ordered(world, action, node, "a chance")
    assert world.run(standings.find_standing, node.node_id).hard == 1, "the next fault is one too many"
    world.database.close()


async def test_a_ban_stands_however_much_was_ordered_since(world: World) -> None:
    node = world.join(1)
    ordered(world, "ban", node, "sold its key")
    for _ in range(orders.LISTED):
        for action in ("pause", "resume"):
            ordered(world, action, node, "a habit")
    with pytest.raises(OwnerBanned, match="sold its key"):
        world.lease(node)


async def test_a_ban_that_nobody_can_explain_is_a_ban(world: World) -> None:
    node = world.join(1)
    world.run(standings.ban, node.node_id, 5)
    assert world.run(standings.find_standing, node.node_id) == OwnerStanding()
    with pytest.raises(OwnerBanned):
        world.lease(node)


async def test_no_node_hides_behind_the_name_that_it_chose(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        thief, decoy = await served.join(1), await served.join(2)
        for name in (thief.node_id, thief.node_id[-8:]):
            await served.round.database.run(rename, decoy.node_id, name)
            assert (await order(served, "pause", thief.node_id))["node_id"] == thief.node_id
            await order(served, "resume", thief.node_id)
        response = await order(served, "ban", thief.node_id[-8:], status=404)
        assert "2 nodes" in response["message"]
        assert not (await shown(served, decoy.node_id))["orders"]


def rename(connection: sa.Connection, node: str, name: str) -> None:
    connection.execute(sa.update(tables.nodes).where(tables.nodes.c.node_id == node).values(name=name))


async def test_strangers_give_no_orders_and_see_none(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.join(1)
        for method, path in (("GET", "nodes"), ("GET", "nodes/n1"), ("POST", "orders")):
            response = await served.client.request(method, f"/v1/operator/{path}", json={})
            assert response.status == NotAuthorised.http_status, path


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"action": "shoot"}', "{" * 1000])
async def test_what_is_no_order_is_refused(tmp_path: Path, content: str) -> None:
    async with serve(tmp_path) as served:
        response = await served.client.post("/v1/operator/orders", data=content, headers=served.operator)
        assert response.status == 400


async def test_a_node_is_found_by_a_part_of_its_id_if_only_one_is_meant(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.join(1), world.join(2)
    for text in (first.node_id, first.node_id[-8:], "node 1"):
        assert world.run(moderation.find, text) == first.node_id
    for text in ("nobody", first.node_id[:4], "", first.node_id[-3:]):
        with pytest.raises(NotFound):
            world.run(moderation.find, text)
    assert first.node_id != second.node_id
    world.database.close()


async def test_a_node_is_found_by_its_name_without_its_team_if_nobody_is_called_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second, third = (world.join(number) for number in (1, 2, 3))
    for node, name in ((first, "rig1@heron"), (second, "rig2@heron"), (third, "rig2")):
        renamed = sa.update(tables.nodes).where(tables.nodes.c.node_id == node.node_id).values(name=name)
        world.run(sa.Connection.execute, renamed)
    assert world.run(moderation.find, "rig1") == world.run(moderation.find, "rig1@heron") == first.node_id
    assert world.run(moderation.find, "rig2") == third.node_id
    for text in ("heron", "@heron", "rig"):
        with pytest.raises(NotFound):
            world.run(moderation.find, text)
    world.database.close()


async def test_no_name_and_no_refusal_says_anything_to_the_operators_terminal(tmp_path: Path) -> None:
    listen = f"round.listen={free_address()}"
    forged = "rig\x1b[2J\r\nall audits passed\u202e"
    async with serve(tmp_path, listen) as served:
        node = await served.join(1)
        await served.round.database.run(rename, node.node_id, forged)
        refused = {"node_id": node.node_id, "code": "malformed_message", "count": 1, "last_lease_id": "", "last_ms": 1}
        await served.round.database.run(
            lambda connection: connection.execute(sa.insert(tables.rejections).values(last_message=forged, **refused))
        )
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
    for command, *rest in (["list"], ["show", node.node_id]):
        done = await asyncio.to_thread(CliRunner().invoke, app, ["nodes", command, str(file), *rest])
        assert done.exit_code == 0, done.output
        assert "rig" in done.stdout
        assert not set(done.stdout) & {"\x1b", "\r", "\u202e"}
        assert not [line for line in done.stdout.splitlines() if line.startswith("all audits")]


async def test_a_stopped_round_is_still_readable(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        node = await served.join(1)
        await order(served, "pause", node.node_id)
    database = Database(tmp_path / "round" / "state.db")
    (row,) = await asyncio.to_thread(partial(database.run_now, moderation.listed, alive_since_ms=AFTER_ALL_MS))
    assert (row["name"], row["paused_ms"] is not None, row["alive"]) == ("n1", True, False)
    assert len(database.run_now(orders.about)) == 1
    database.close()
