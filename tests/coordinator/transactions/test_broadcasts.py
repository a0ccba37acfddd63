"""Broadcast of versions: ages become times on the coordinator's clock, first reports count, totals outlive receipts."""

from typing import Any

import pytest

from coordinator.config import parse
from coordinator.reports import summary
from coordinator.store import tables
from coordinator.store.facts import get_fact
from coordinator.transactions import broadcasts, links, registry
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey
from protocol.work.messages import Fetched, Heartbeat, PeerUpload, Reached, Stage, Transfer, TransferReceipt
from tests.coordinator.world import ROUND, World, manifest

SILENT_MS = 6000
SEEDER = NodeKey(b"s" * 32).node_id
SIZE_BYTES = 1000


def publish(world: World, version: int) -> None:
    """Publish a version as the coordinator does, to the nodes that are alive."""
    file = {"path": "f", "size_bytes": SIZE_BYTES, "digest": "d" * 64, "chunks": ["c" * 64]}
    made = manifest(version, version - 1, files=[file])
    world.run(broadcasts.start_broadcast, made, digest(made.to_bytes()), silent_after_ms=SILENT_MS, now_ms=world.now_ms)
    world.run(links.know_seeder, SEEDER)


def beat(world: World, key: NodeKey, *, version: int = 1, phase: Any = "generating") -> None:
    """A node is alive and holds a version."""
    nothing = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)
    message = Heartbeat(
        session="0" * 16, version=version, phase=phase, tokens_per_s=1.0, transfer=nothing, blames=(), reached=()
    )
    world.run(registry.heartbeat, key.node_id, message, now_ms=world.now_ms)


def say(world: World, key: NodeKey, version: int = 2, *, external: bool = False, **ago_s: float) -> None:
    """A node tells how long ago it reached some stages."""
    stages: dict[str, Stage] = {stage: stage for stage in broadcasts.STAGES}
    reached = [Reached(version=version, stage=stages[name], ago_s=ago) for name, ago in ago_s.items()]
    world.run(broadcasts.record_progress, key.node_id, reached, now_ms=world.now_ms, external=external)


def shown(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.run(summary.broadcast, alive_since_ms=world.now_ms - SILENT_MS)
    return found


def parts(world: World, version: int = 2) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = world.run(broadcasts.by_node, version)
    return {row["node_id"]: row for row in rows}


def give_receipt(world: World, key: NodeKey, version: int, uploads: dict[str, int], from_origins: int = 0) -> None:
    lines = tuple(PeerUpload(peer_id=peer, size_bytes=size, busy_s=1.0) for peer, size in uploads.items())
    receipt = TransferReceipt(round_id=ROUND, version=version, seconds=1.0, uploads=lines, from_origins=from_origins)
    message = Fetched(receipt=key.seal("receipt", receipt.to_bytes()))
    world.run(links.take_receipt, key.node_id, message, round_id=ROUND, now_ms=world.now_ms)


def uploaded(world: World, key: NodeKey) -> int:
    """A node's total on the leaderboard."""
    totals = {row["node_id"]: row["uploaded_bytes"] for row in world.run(summary.leaderboard)}
    return int(totals[key.node_id])


@pytest.fixture
def pair(world: World) -> tuple[NodeKey, NodeKey]:
    """Two nodes that were alive when version 2 was published."""
    two = world.join(1), world.join(2)
    publish(world, 2)
    return two


def test_an_age_is_taken_from_the_moment_the_word_arrives(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    one, other = pair
    world.now_ms += 5000
    say(world, one, heard=4.5, fetched=3.0, loaded=2.0, first_token=1.25)
    row = parts(world)[one.node_id]
    assert [row[f"{stage}_s"] for stage in broadcasts.STAGES] == [0.5, 2.0, 3.0, 3.75]
    assert parts(world)[other.node_id]["heard_s"] is None


def test_a_node_that_waits_for_requests_of_a_trainer_has_a_version_once_it_is_loaded(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, _ = pair
    world.now_ms += 5000
    say(world, one, external=True, loaded=2.0)
    world.now_ms += 60_000
    say(world, one, external=True, first_token=0.0)
    row = parts(world)[one.node_id]
    assert (row["loaded_s"], row["first_token_s"]) == (3.0, 3.0)
    assert shown(world)["broadcast"]["median_s"] == 3.0


def test_an_age_from_before_publication_counts_from_publication(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    one, _ = pair
    world.now_ms += 1000
    say(world, one, first_token=86_400.0)
    assert parts(world)[one.node_id]["first_token_s"] == 0.0


def test_a_nodes_first_word_on_a_stage_counts_whether_repeated_or_revised(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, _ = pair
    world.now_ms += 2000
    say(world, one, heard=1.0)
    world.now_ms += 1000
    say(world, one, heard=2.0)
    say(world, one, heard=2.9)
    say(world, one, heard=0.0, fetched=0.5)
    row = parts(world)[one.node_id]
    assert (row["heard_s"], row["fetched_s"]) == (1.0, 2.5)


def test_a_version_to_come_one_forgotten_and_a_latecomer_are_no_part_of_any_broadcast(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, _ = pair
    late = world.join(3)
    before = world.rows(tables.broadcasts)
    say(world, one, version=1, heard=0.0)
    say(world, one, version=3, heard=0.0)
    say(world, late, first_token=0.0)
    assert world.rows(tables.broadcasts) == before


def test_who_had_fallen_silent_at_publication_is_no_part_of_the_broadcast(world: World) -> None:
    silent, lives = world.join(1), world.join(2)
    world.now_ms += SILENT_MS + 1
    beat(world, lives)
    publish(world, 2)
    assert parts(world).keys() == {lives.node_id}
    assert silent.node_id not in parts(world)


def test_publishing_again_begins_no_second_broadcast(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    one, _ = pair
    say(world, one, heard=0.0)
    world.join(3)
    before = world.rows(tables.broadcasts)
    publish(world, 2)
    assert world.rows(tables.broadcasts) == before


def test_only_the_last_versions_are_remembered(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    for version in range(3, 9):
        publish(world, version)
    versions = {row["version"] for row in world.rows(tables.broadcasts)}
    assert versions == set(range(9 - links.VERSIONS_KEPT, 9))


def test_median_p90_and_max_are_of_the_nodes_that_were_reached(world: World) -> None:
    keys = [world.join(number) for number in range(1, 12)]
    publish(world, 2)
    world.now_ms += 20_000
    for number, key in enumerate(keys[:10], start=1):
        say(world, key, first_token=20.0 - number)
    for key in keys:
        beat(world, key, version=2)
    assert shown(world)["broadcast"] == {
        "version": 2, "nodes": 11, "reached": 10, "median_s": 5.5, "p90_s": 9.0, "max_s": 10.0
    }  # fmt: skip
    assert [row["first_token_s"] for row in shown(world)["nodes"]] == [*map(float, range(1, 11)), None]


def test_a_mirror_is_reached_when_it_has_fetched_and_a_node_that_samples_is_not(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    mirror, node = pair
    world.now_ms += 3000
    for key in pair:
        say(world, key, heard=2.5, fetched=1.0)
    beat(world, mirror, version=2, phase="mirroring")
    beat(world, node, version=2)
    found = shown(world)["broadcast"]
    assert (found["nodes"], found["reached"], found["max_s"]) == (2, 1, 2.0)


def test_the_version_before_is_shown_until_every_node_alive_has_the_newest(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    def version_shown() -> int | None:
        found = shown(world)["broadcast"]
        return found["version"] if found else None

    one, other = pair
    assert shown(world) == {"broadcast": None, "nodes": []}
    for key in pair:
        say(world, key, first_token=0.0)
        beat(world, key, version=2)
    assert version_shown() == 2
    publish(world, 3)
    say(world, one, version=3, first_token=0.0)
    beat(world, one, version=3)
    beat(world, other, version=2)
    assert version_shown() == 2
    beat(world, other, version=3)
    assert version_shown() == 3, "every node has it, even if one found no work for it"


def spread_over(world: World, keys: tuple[NodeKey, ...], *times_s: float) -> float:
    """Publish a version that reaches each node after such a time; return the usual T_bcast then."""
    version = 1 + max(row["version"] for row in world.rows(tables.broadcasts))
    for key in keys:
        beat(world, key, version=version - 1)
    publish(world, version)
    published_ms = world.now_ms
    for key, took_s in zip(keys, times_s, strict=True):
        world.now_ms = published_ms + round(1000 * took_s)
        say(world, key, version, first_token=0.0)
        beat(world, key, version=version)
    return usual_s(world)


def usual_s(world: World) -> float:
    usual: float = world.run(broadcasts.usual_s, alive_since_ms=world.now_ms - SILENT_MS)
    return usual


def test_the_usual_time_is_that_of_several_broadcasts(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    assert usual_s(world) == 0.0
    for key in pair:
        say(world, key, first_token=0.0)
    assert spread_over(world, pair, 100.0, 104.0) == 0.0, "of two versions the quicker one counts"
    assert spread_over(world, pair, 2.0, 4.0) == 3.0
    assert spread_over(world, pair, 5.0, 5.0) == 3.0
    assert shown(world)["broadcast"]["median_s"] == 5.0, "the last broadcast alone"


def test_a_time_that_contains_an_outage_of_the_coordinator_does_not_count(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    world.run(broadcasts.record_start, world.now_ms)  # at the moment of publication
    world.now_ms += 3000
    for key in pair:
        say(world, key, first_token=0.0)
        beat(world, key, version=2)
    assert usual_s(world) == 3.0
    publish(world, 3)
    published_ms = world.now_ms
    world.now_ms += 1000
    say(world, pair[0], version=3, first_token=0.0)
    world.now_ms += 101_000
    world.run(broadcasts.record_start, world.now_ms)
    for key in pair:
        say(world, key, version=3, first_token=0.0)
        beat(world, key, version=3)
    assert usual_s(world) == 1.0, "of the node that had begun before the outage"
    assert shown(world)["broadcast"]["max_s"] == (world.now_ms - published_ms) / 1000 == 102.0
    world.now_ms += 1
    assert spread_over(world, pair, 7.0, 7.0) == 3.0, "the median of 1, 3 and 7"


def test_only_the_last_starts_are_kept(world: World) -> None:
    for _ in range(broadcasts.STARTS_KEPT + 1):
        world.now_ms += 1
        world.run(broadcasts.record_start, world.now_ms)
    starts = world.run(get_fact, broadcasts.STARTS)
    assert starts == list(range(world.now_ms - broadcasts.STARTS_KEPT + 1, world.now_ms + 1))


def test_a_node_that_vanished_holds_nobody_up(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    one, _ = pair
    say(world, one, first_token=0.0)
    beat(world, one, version=2)
    assert shown(world)["broadcast"] is None
    world.now_ms += SILENT_MS + 1
    beat(world, one, version=2)
    assert shown(world)["broadcast"]["version"] == 2


def test_the_status_counts_who_is_alive_and_who_has_the_newest_version(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    beat(world, pair[0], version=2)
    status = world.run(summary.status, config=parse({}), alive_since_ms=world.now_ms)
    assert (status["nodes_alive"], status["nodes_up_to_date"], status["broadcast"]) == (2, 1, None)


def test_bytes_are_told_apart_by_who_sent_them_and_unknown_without_a_receipt(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, other = pair
    give_receipt(world, one, 2, {SEEDER: 600, other.node_id: 300}, from_origins=100)
    kinds = ("from_peers", "from_seeder", "from_origins", "passed_on_bytes")
    assert [parts(world)[one.node_id][kind] for kind in kinds] == [300, 600, 100, 0]
    assert [parts(world)[other.node_id][kind] for kind in kinds] == [None, None, None, 300]


def test_made_up_senders_are_not_counted_as_the_seeder(world: World, pair: tuple[NodeKey, NodeKey]) -> None:
    one, _ = pair
    give_receipt(world, one, 2, {SEEDER: 600, NodeKey(b"x" * 32).node_id: 1000})
    assert parts(world)[one.node_id]["from_seeder"] == 600


def test_what_receivers_witnessed_adds_up_and_outlives_their_receipts(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, other = pair
    give_receipt(world, one, 2, {other.node_id: 300, SEEDER: 1000})
    give_receipt(world, one, 2, {other.node_id: 999})  # a second word
    for version in range(3, 10):
        publish(world, version)
        give_receipt(world, one, version, {other.node_id: 10})
    assert {row["version"] for row in world.rows(tables.uploads)} == set(range(10 - links.VERSIONS_KEPT, 10))
    assert uploaded(world, other) == 300 + 7 * 10
    assert uploaded(world, one) == 0


def test_nobodys_total_grows_by_its_own_word_or_by_more_than_a_version_can_be(
    world: World, pair: tuple[NodeKey, NodeKey]
) -> None:
    one, other = pair
    give_receipt(world, one, 2, {one.node_id: 500, other.node_id: 2**50})
    assert uploaded(world, one) == 0
    assert uploaded(world, other) == links.UPLOAD_MAX_VERSIONS * SIZE_BYTES
