"""The times at which a node looks for news of the policy by itself."""

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol import limits
from protocol.errors import (
    NotFound,
    RequestExpired,
    SwarmError,
    UnknownChunk,
    UnknownNode,
    Unreachable,
    UntrustedMetadata,
)
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id, digest
from protocol.policy.manifest import FileEntry, PolicyManifest
from protocol.wire.signing import NodeKey
from protocol.work.messages import FetchPlan, Peer, PlanRequest, TransferReceipt
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import Host
from swarm_node.p2p.punch import ReachResults
from swarm_node.p2p.serve import ChunkServer
from swarm_node.versions.broadcast_plans import BroadcastPlans
from swarm_node.versions.fetcher import VersionFetcher, VersionTooLarge
from swarm_node.versions.follower import REFRESH_S, RETRY_S, PolicyFollower, refresh_in_s
from tests.swarm_node.p2p_world import (
    CHUNK_SIZE,
    PATIENT_SECONDS,
    Version,
    as_peer,
    holds_exactly,
    make_version,
    manifest_of,
    node,
    plan_of,
    store,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("lifetime_s", [4.0, 8.0, 30.0])
def test_short_proof_is_renewed_while_half_of_it_is_left(lifetime_s: float) -> None:
    """A coordinator renews its word four times in a lifetime, so each look finds one that ends later."""
    assert refresh_in_s(NOW + timedelta(seconds=lifetime_s), NOW) == lifetime_s / 2


def test_long_proof_is_looked_at_in_time_to_see_withheld_versions() -> None:
    assert refresh_in_s(NOW + timedelta(hours=1), NOW) == REFRESH_S
    assert refresh_in_s(None, NOW) == REFRESH_S


def test_proof_that_is_ending_is_not_asked_for_without_pause() -> None:
    assert refresh_in_s(NOW + timedelta(seconds=0.1), NOW) == RETRY_S
    assert refresh_in_s(NOW - timedelta(seconds=5), NOW) == RETRY_S


class Round:
    """Coordinator, origins, updater and host of a node at once; it records whom the node is told to call."""

    def __init__(self, version: Version, child: Peer) -> None:
        self._version = version
        self.called: list[list[Peer]] = []
        self.plans = 0
        self.trouble: SwarmError | None = None
        """The error with which the next question for a plan is answered; of a stubborn one, all."""
        self.stubborn = False
        self.doubts: SwarmError | None = None
        """The error that the next look at the newest version comes to."""
        self.planned = plan_of().model_copy(update={"calls": (child,)})
        self.proved_until = None
        self.own_network = True
        self.dials = SimpleNamespace(start=lambda peer: None, take_report=lambda: ([], []))
        self.punches = SimpleNamespace(follow=lambda punches, observers: None, results=ReachResults())

    async def learn(self) -> None: ...
    async def fetched(self, receipt: TransferReceipt) -> None: ...

    async def at_home(self) -> bool:
        return True

    def fetcher_for(self, manifest: PolicyManifest) -> Callable[[ChunkId], Awaitable[bytes]]:
        async def origin(chunk: ChunkId) -> bytes:
            await trio.lowlevel.checkpoint()
            return self._version.chunks[chunk]

        return origin

    async def refresh(self) -> PolicyManifest:
        if self.doubts:
            error, self.doubts = self.doubts, None
            raise error
        return self._version.manifest

    async def plan(self, request: PlanRequest) -> FetchPlan:
        self.plans += 1
        if self.trouble:
            error, self.trouble = self.trouble, self.trouble if self.stubborn else None
            raise error
        return self.planned

    def connected(self) -> set[str]:
        return set()

    def call(self, peers: Iterable[Peer]) -> None:
        self.called.append(list(peers))

    def publish(self, version: Version) -> None:
        self._version = version

    def follower(self, folder: Path, *, held: Version | None = None, host: Host | None = None) -> PolicyFollower:
        """A node's follower as a start of the agent makes it; this version's chunks are stored already."""
        everything: Any = self
        blobs = store(folder / "blobs", (held or self._version).chunks)
        plans = BroadcastPlans(everything, everything, host or everything)
        fetcher = VersionFetcher(
            folder=folder / "policies",
            blobs=blobs,
            arrivals=Arrivals(),
            origins=everything,
            plans=plans,
            host=host or everything,
            rng=Random(1),
        )
        return PolicyFollower(origins=everything, updater=everything, plans=plans, fetcher=fetcher)


@pytest.mark.trio
async def test_a_shy_node_that_restarts_with_the_newest_version_calls_those_whom_it_feeds(tmp_path: Path) -> None:
    child = Peer(peer_id=NodeKey(b"c" * 32).node_id, address="127.0.0.1:1", kind="peer")
    here = Round(make_version(2), child)
    await here.follower(tmp_path)._follow()
    assert here.called == [[child]]
    follower = here.follower(tmp_path)  # the version is on the disk now
    here.trouble = Unreachable("the coordinator starts, too")
    await follower._follow()
    assert follower.ready is not None, "it works all the same"
    await follower._follow()
    assert here.called == [[child], [child]]
    await follower._follow()
    assert (len(here.called), here.plans) == (2, 3), "and asks no more once it knows"


CHILD = Peer(peer_id=NodeKey(b"c" * 32).node_id, address="127.0.0.1:1", kind="peer")


async def follows(follower: PolicyFollower, version: Version) -> set[str]:
    """Follow until this version is ready; what was said against the versions on offer until then."""
    doubts = set[str]()

    async def watch() -> None:
        while True:
            if follower.distrust is not None:
                doubts.add(follower.distrust.code)
            await follower._changed.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        nursery.start_soon(follower.run)
        with trio.fail_after(PATIENT_SECONDS):
            while follower.ready is None or follower.ready.manifest != version.manifest:
                await follower._changed.wait()
        nursery.cancel_scope.cancel()
    return doubts


@pytest.mark.trio
@pytest.mark.parametrize("refusal", [Unreachable, NotFound, UnknownNode, RequestExpired])
async def test_a_version_comes_from_an_origin_when_the_coordinator_gives_no_plan(
    tmp_path: Path, refusal: type[SwarmError]
) -> None:
    version = make_version(2)
    here = Round(version, CHILD)
    follower = here.follower(tmp_path, held=make_version(1, seed=9))
    here.trouble, here.stubborn = refusal("no plan"), True
    assert await follows(follower, version) == set()
    assert follower.fetcher.traffic.from_http == sum(map(len, version.chunks.values()))
    here.trouble = None
    await follower._follow()
    assert here.called == [[CHILD]], "it asks again whom to feed"


@pytest.mark.trio
async def test_without_a_plan_the_peers_of_the_last_one_are_asked(tmp_path: Path) -> None:
    first, second = make_version(2), make_version(24, seed=2)
    news = Arrivals()
    server = ChunkServer(store(tmp_path / "peer", first.chunks | second.chunks), news)
    async with node(1, server.handle) as peer, node(2) as me:
        here = Round(first, CHILD)
        here.planned = plan_of(as_peer(peer))
        follower = here.follower(tmp_path, host=me)
        await follower._follow()
        here.publish(second)
        here.trouble = Unreachable("no plan")
        with news.expecting((), second.chunks):
            await follower._follow()
    assert follower.ready is not None
    assert follower.fetcher.traffic.from_peers == sum(map(len, second.chunks.values()))


@pytest.mark.trio
async def test_a_chunk_that_went_bad_on_this_disk_is_fetched_again_and_speaks_against_no_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = make_version(2)
    follower = Round(version, CHILD).follower(tmp_path)
    bad = follower.fetcher._blobs.path(next(iter(version.chunks)))
    bad.write_bytes(b"?" * bad.stat().st_size)
    assert await follows(follower, version) == set()
    assert "was damaged on the disk" in caplog.text


@pytest.mark.trio
@pytest.mark.parametrize("harm", [lambda size: b"", lambda size: bytes(size)], ids=["empty", "zeros"])
async def test_all_chunks_that_a_power_cut_damaged_are_found_in_one_try(
    tmp_path: Path, harm: Callable[[int], bytes]
) -> None:
    """Each try copies and hashes the whole version."""
    version = make_version(24)
    here = Round(version, CHILD)
    follower = here.follower(tmp_path)
    for chunk in list(version.chunks)[:12]:
        path = follower.fetcher._blobs.path(chunk)
        path.write_bytes(harm(path.stat().st_size))
    with pytest.raises(UnknownChunk, match="was damaged on the disk"):
        await follower._follow()
    await follower._follow()
    assert follower.ready is not None


@pytest.mark.trio
async def test_while_a_version_does_not_fit_no_file_is_hashed_again_and_then_each_is(tiny_disk: Path) -> None:
    first, more = make_version(2), make_version(12, seed=2)
    other = more.manifest.files[0].model_copy(update={"path": "more.safetensors"})
    both = manifest_of(*first.manifest.files, other, version=2, chunk_size=CHUNK_SIZE)
    here = Round(first, CHILD)
    follower = here.follower(tiny_disk)
    await follower._follow()
    here.publish(Version(both, first.chunks | more.chunks))
    with pytest.raises(VersionTooLarge):
        await follower._follow()
    digests = dict(follower.fetcher._digests)
    assert follower.ready is not None
    damaged = follower.ready.folder / "model.safetensors"
    times = damaged.stat()
    damaged.write_bytes(bytes(times.st_size))
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(VersionTooLarge):
        await follower._follow()
    assert follower.fetcher._digests == digests
    await trio.run_process(["mount", "-o", "remount,size=1m", tiny_disk])
    await follower._follow()
    assert follower.ready.manifest == both
    assert digest((follower.ready.folder / "model.safetensors").read_bytes()) == first.manifest.files[0].digest


@pytest.mark.trio
async def test_what_judges_the_version_on_offer_stops_work_until_it_is_gone(tmp_path: Path) -> None:
    version = make_version(2)
    here = Round(version, CHILD)
    here.doubts = UntrustedMetadata("a forged snapshot")
    assert await follows(here.follower(tmp_path), version) == {"untrusted_metadata"}


@pytest.mark.trio
async def test_a_disk_that_fails_ends_nothing_and_the_version_comes_once_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = make_version(2)
    follower = Round(version, CHILD).follower(tmp_path, held=make_version(1, seed=9))
    places = [follower.fetcher._blobs.path(chunk).parent for chunk in version.chunks]
    for place in places:
        place.write_text("no folder")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        with trio.fail_after(PATIENT_SECONDS):
            while "cannot store the new version code=disk_failed" not in caplog.text:
                await wait_all_tasks_blocked(0.01)
            assert (follower.ready, follower.distrust) == (None, None)
            for place in places:
                place.unlink()
            follower.hint(follower.newest + 1)
            while follower.ready is None:
                await follower._changed.wait()
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_what_a_version_that_never_came_left_behind_takes_no_room_from_the_next(tiny_disk: Path) -> None:
    """Chunks of an unfinished download stayed until another one was whole, which on a full disk was never."""
    given_up, version = make_version(8), make_version(5, seed=2)
    left_behind = replace(given_up, chunks=dict(list(given_up.chunks.items())[:-1]))
    here = Round(version, CHILD)
    await here.follower(tiny_disk, held=left_behind)._follow()
    assert holds_exactly(BlobStore(tiny_disk / "blobs"), version.chunks)


@pytest.mark.trio
async def test_what_others_may_still_ask_for_is_kept_while_the_next_version_comes(tmp_path: Path) -> None:
    first, second = make_version(2), make_version(2, seed=2)
    here = Round(first, CHILD)
    follower = here.follower(tmp_path)
    await follower._follow()
    here.publish(second)
    held_meanwhile: list[bool] = []
    origin = here.fetcher_for(second.manifest)

    async def looking(chunk: ChunkId) -> bytes:
        held_meanwhile.extend(map(follower.fetcher._blobs.has, first.chunks))
        return await origin(chunk)

    here.fetcher_for = lambda manifest: looking  # type: ignore[method-assign]  # of this round only
    await follower._follow()
    assert held_meanwhile
    assert all(held_meanwhile)


def hostile(path: str, count: int, *, version: int = 2) -> Version:
    """A version whose one file is the same chunk again and again."""
    piece = bytes(limits.CHUNK_MAX_BYTES)
    size_bytes = count * len(piece)
    entry = FileEntry(path=path, size_bytes=size_bytes, digest="d" * 64, chunks=(chunk_id(piece),) * count)
    return Version(manifest_of(entry, chunk_size=len(piece), version=version), {chunk_id(piece): piece})


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "count", "why"),
    [
        ("filler.bin", 256, "has a file filler.bin, which no engine reads"),
        ("filler.json", 256, "has a file filler.json, which no engine reads"),
        ("tokenizer.json", 256, "has a tokenizer.json of 1073741824 bytes"),
        ("filler.safetensors", 256, "has 1073741824 bytes of files but only 4194304 bytes of distinct chunks"),
    ],
)
async def test_a_gigabyte_of_one_repeated_chunk_is_refused_by_name_before_a_byte_is_fetched(
    tmp_path: Path, path: str, count: int, why: str
) -> None:
    """The file was fetched as one chunk, written 256 times, and only then was its name looked at, by an engine."""
    bad, good = hostile(path, count), make_version(3)
    here = Round(bad, CHILD)
    follower = here.follower(tmp_path, held=make_version(1, seed=9))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        with trio.fail_after(PATIENT_SECONDS):
            while follower.distrust is None:
                await follower._changed.wait()
            assert follower.distrust.code == "manifest_invalid"
            assert why in str(follower.distrust)
            assert follower.fetcher.traffic.from_http == here.plans == 0
            assert not (tmp_path / "policies").exists()
            here.publish(good)
            follower.hint(3)
            while follower.ready is None or follower.distrust is not None:
                await follower._changed.wait()
        nursery.cancel_scope.cancel()
