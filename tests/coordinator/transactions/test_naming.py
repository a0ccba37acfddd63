"""Names that imitate: strangers register copies and look-alikes over HTTP, and everybody can still tell who is who."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.pages import tree
from coordinator.reports import moderation, summary
from coordinator.reports.curves import Branch
from coordinator.store.tables import nodes
from coordinator.transactions import naming, owners
from protocol.errors import NotFound
from protocol.ids import NodeId
from protocol.people import names
from protocol.people.names import nickname
from protocol.people.owner import Delegation, seal_statement
from protocol.wire.signing import NodeKey
from protocol.work.messages import HeartbeatReply, Register
from tests.coordinator.counting import counted
from tests.coordinator.served import Served, serve
from tests.coordinator.world import World
from tests.protocol.people.test_names import COPIES_OF_HERON

pytestmark = pytest.mark.asyncio

HONEST, STRANGER, OWNER = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))


def delegation(owner: NodeKey, key: NodeKey) -> bytes:
    return seal_statement(owner, Delegation(node_id=key.node_id, number=sum(key.node_id.encode())))


async def register(served: Served, key: NodeKey, name: str, *, owner: NodeKey | None = None) -> None:
    word = delegation(owner, key) if owner else None
    message = Register(name=name, price_micros_per_mtok=0, addresses=(), agent="", delegation=word)
    await served.call(key, "/v1/nodes", message, HeartbeatReply)


async def shown(served: Served) -> Mapping[str, str]:
    """Node → its name, as the leaderboard has it before it is cached for a moment."""
    return {row["node_id"]: row["name"] for row in await served.round.database.run(summary.leaderboard)}


@pytest.mark.parametrize("copy", COPIES_OF_HERON.values(), ids=COPIES_OF_HERON)
async def test_a_copy_of_anothers_name_is_shown_with_its_own_id(tmp_path: Path, copy: str) -> None:
    async with serve(tmp_path) as served:
        await register(served, HONEST, "Heron")
        await register(served, STRANGER, copy)
        found = await shown(served)
        assert found[HONEST.node_id] == "Heron"
        assert found[STRANGER.node_id] == names.with_id(names.plain_name(copy), STRANGER.node_id)


@pytest.mark.parametrize(
    "name", ["coordinator", "\u043eper\u0430tor", "rig1@admin", "h\u0435ron", nickname(HONEST.node_id)]
)
async def test_whoever_imitates_the_operator_or_a_nickname_is_shown_with_its_id(tmp_path: Path, name: str) -> None:
    async with serve(tmp_path) as served:
        await register(served, STRANGER, name)
        await register(served, HONEST, nickname(HONEST.node_id))
        found = await shown(served)
        assert found[STRANGER.node_id] == names.with_id(name, STRANGER.node_id)
        assert found[HONEST.node_id] == nickname(HONEST.node_id)


async def test_no_name_keeps_anybody_from_joining_and_an_owner_may_use_its_own_again(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as served:
        for number in range(10, 15):
            await register(served, NodeKey(bytes([number]) * 32), "localhost")
        for key in (HONEST, STRANGER):
            await register(served, key, "rig1@heron", owner=OWNER)
        found = await shown(served)
        assert sorted(found.values()) == sorted(
            ["localhost", "rig1@heron", "rig1@heron"]
            + [names.with_id("localhost", NodeKey(bytes([number]) * 32).node_id) for number in range(11, 15)]
        )


@pytest.mark.parametrize("name", ["\u200b", "\u202e\u2066", "\u3164", "\u0301\u0301", "()", "\x07"])
async def test_a_name_that_shows_nothing_is_replaced_by_the_nickname(tmp_path: Path, name: str) -> None:
    async with serve(tmp_path) as served:
        await register(served, STRANGER, name)
        assert await shown(served) == {STRANGER.node_id: nickname(STRANGER.node_id)}


async def test_a_squatter_gives_way_to_whoever_has_earned(tmp_path: Path) -> None:
    """The honest node gets the name when it registers again or is first paid; the squatter never gets it back."""
    async with serve(tmp_path) as served:
        await register(served, STRANGER, "heron")
        await register(served, HONEST, "heron")
        assert (await shown(served))[HONEST.node_id] == names.with_id("heron", HONEST.node_id)
        await served.round.database.run(owners.sequence, [HONEST.node_id], 1)
        for _ in range(2):
            found = await shown(served)
            assert found[HONEST.node_id] == "heron"
            assert found[STRANGER.node_id] == names.with_id("heron", STRANGER.node_id)
            await served.round.database.run(owners.sequence, [STRANGER.node_id], 2)
            await register(served, STRANGER, "heron")
            await register(served, HONEST, "heron")


async def test_a_name_that_looks_like_one_with_an_id_is_not_taken_for_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await register(served, HONEST, "heron")
        copy = names.with_id("heron", HONEST.node_id)
        await register(served, STRANGER, copy)
        assert set(await shown(served)) == {HONEST.node_id, STRANGER.node_id}
        assert (await shown(served))[STRANGER.node_id] == f"heron {HONEST.node_id[-8:]}"


async def test_a_name_that_was_given_up_is_free_and_a_new_one_counts_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        for key, name in ((HONEST, "heron"), (STRANGER, "heron"), (HONEST, "crane"), (STRANGER, "heron")):
            await register(served, key, name)
        assert await shown(served) == {HONEST.node_id: "crane", STRANGER.node_id: "heron"}


async def test_every_place_shows_who_is_who(tmp_path: Path) -> None:
    """Pages, files and the operator's commands."""
    async with serve(tmp_path) as served:
        await register(served, HONEST, "heron")
        await register(served, STRANGER, "\u202eher\u043en")
        copy = names.with_id("her\u043en", STRANGER.node_id)
        board = (await (await served.client.get("/v1/leaderboard")).json())["nodes"]
        assert {row["name"] for row in board} == {"heron", copy}
        page = await (await served.client.get("/leaderboard")).text()
        assert ">heron</bdi>" in page
        assert f">{copy}</bdi>" in page
        rows = csv.DictReader(io.StringIO(await (await served.client.get("/stats/nodes.csv")).text()))
        assert {row["name"] for row in rows} == {"heron", copy}
        assert f"<domain_name>{copy}</domain_name>" in await (await served.client.get("/stats/host.xml")).text()
        assert await served.round.database.run(moderation.find, "heron") == HONEST.node_id
        assert await served.round.database.run(moderation.find, copy) == STRANGER.node_id


async def test_a_look_alike_of_a_team_counts_for_the_team_and_no_team_has_the_operators_name(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        for key, name in ((HONEST, "a@Heron"), (STRANGER, "b@h\u0435r\u043en\u200b"), (OWNER, "a@heron")):
            await register(served, key, name)
        await register(served, NodeKey(b"4" * 32), "c@operator")
        rows = list(csv.DictReader(io.StringIO(await (await served.client.get("/stats/teams.csv")).text())))
        assert [(row["team"], row["nodes"]) for row in rows] == [("Heron", "3")]


@pytest.mark.parametrize("name", ["heron", "a name of forty characters, all of them us"])
async def test_all_nodes_of_a_squatter_give_way_at_once_and_its_other_names_stay(world: World, name: str) -> None:
    squatters, honest = [world.join(number) for number in range(1, 6)], world.join(6)
    for key in squatters:
        world.run(owners.delegate, key.node_id, delegation(OWNER, key), now_ms=world.now_ms)
        world.run(naming.record_name, key.node_id, name)
    world.run(naming.record_name, squatters[0].node_id, "crane")
    world.run(owners.sequence, [honest.node_id], world.now_ms)
    world.run(naming.record_name, honest.node_id, name)
    found = {row["node_id"]: row["name"] for row in world.run(summary.leaderboard)}
    expected = {key.node_id: names.with_id(names.plain_name(name), key.node_id) for key in squatters[1:]}
    assert found == expected | {squatters[0].node_id: "crane", honest.node_id: names.plain_name(name)}


async def test_an_order_about_a_name_that_has_copies_is_refused(world: World) -> None:
    """Otherwise a squatter that loses its name would make the operator ban the node that has the name now."""
    squatter, honest = world.join(1), world.join(2)
    world.run(naming.record_name, squatter.node_id, "heron")
    assert world.run(moderation.find, "heron") == squatter.node_id
    world.run(naming.record_name, honest.node_id, "heron")
    for _ in range(2):
        with pytest.raises(NotFound, match="2 nodes are called heron"):
            world.run(moderation.find, "heron")
        world.run(owners.sequence, [honest.node_id], world.now_ms)
        world.run(naming.record_name, squatter.node_id, "heron")
    assert world.run(moderation.find, names.with_id("heron", squatter.node_id)) == squatter.node_id


async def test_a_picture_shows_the_id_of_a_copy_with_a_long_name() -> None:
    name = "a-name-of-thirty-characters-ab"
    copy = names.with_id(name, STRANGER.node_id)
    drawn = tree.picture(1, [Branch(HONEST.node_id, name, "", 1), Branch(STRANGER.node_id, copy, "", 1)])
    assert f">{name[: tree.LABEL_MAX]}</text>" in drawn
    assert f" ({STRANGER.node_id[-8:]})</text>" in drawn


async def test_an_owner_is_shown_with_its_id_since_keys_with_any_nickname_can_be_made(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await register(served, HONEST, "heron", owner=OWNER)
        shown_as = names.with_id(nickname(OWNER.node_id), OWNER.node_id)
        assert f">{shown_as}</bdi>" in await (await served.client.get("/leaderboard?view=owners")).text()
        assert f">{shown_as}</dd>" in await (await served.client.get(f"/nodes/{HONEST.node_id}")).text()
        assert f"<name>{shown_as}</name>" in await (await served.client.get("/stats/user.xml")).text()


async def test_a_crowd_of_nodes_of_one_owner_makes_nobodys_registration_dearer(tmp_path: Path) -> None:
    world = World(tmp_path)
    member, stranger = world.join(1), world.join(2)

    def crowd(connection: sa.Connection, first: int, last: int) -> None:
        like = dict(connection.execute(sa.select(nodes).limit(1)).mappings().one())
        theirs = {"owner": "crowd", "name": "heron", "skeleton": names.skeleton("heron")}
        connection.execute(sa.insert(nodes), [like | theirs | {"node_id": f"{n}"} for n in range(first, last)])
        connection.execute(sa.update(nodes).where(nodes.c.node_id == member.node_id).values(owner="crowd"))

    def steps(connection: sa.Connection, node: NodeId) -> int:
        """Return SQLite's steps to record a name, in units of ten instructions."""
        done: list[int] = []
        line: Any = connection.connection.dbapi_connection
        line.set_progress_handler(lambda: done.append(1), 10)
        naming.record_name(connection, node, "heron")
        line.set_progress_handler(None, 10)
        return len(done)

    costs = []
    for first, last in ((0, 10), (10, 2000)):
        world.run(crowd, first, last)
        costs.append([world.run(steps, key.node_id) for key in (member, stranger)])
    assert all(later <= 2 * few for few, later in zip(*costs, strict=True)), costs
    world.database.close()


@pytest.mark.parametrize("name", ["heron", "h\u0435ron", "heron (x)"])
async def test_however_many_share_a_name_a_registration_costs_the_same(tmp_path: Path, name: str) -> None:
    with counted() as work:
        world = World(tmp_path)
        costs = []
        for number in range(1, 40):
            key = world.join(number)
            work.clear()
            world.run(naming.record_name, key.node_id, name)
            costs.append(work.all["statements"])
        assert max(costs) <= costs[1]
        world.database.close()
