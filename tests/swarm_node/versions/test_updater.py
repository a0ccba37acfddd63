"""The node's updater against a coordinator and origins that lie, stall, repeat themselves or flood it.

- The documents are those of the coordinator's own repository code; both sides speak real HTTP.
- An attack that fails leaves the saved state as it was.
"""

import gzip
import shutil
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
import trio
from tuf.api.metadata import Snapshot, Targets, Timestamp

from coordinator.config.round import RoundSection
from coordinator.publishing.signed_metadata import SignedMetadata
from protocol import limits
from protocol.errors import MessageTooLarge, MetadataExpired, SwarmError, Unreachable, UntrustedMetadata
from protocol.policy.manifest import target_path
from protocol.policy.origin import OriginList
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origin import Patience
from swarm_node.coordinator_api.origins import Origins
from swarm_node.versions.updater import Updater
from tests.protocol.tuf_repository import manifest_bytes
from tests.swarm_node import web as manners
from tests.swarm_node.web import Handler, Manner, Web, web

pytestmark = pytest.mark.trio

HASTY = Patience(silence_s=0.3, grace_s=0.6)
MB = 1_000_000


class Scene:
    """A repository, the coordinator's address, one origin, and a node."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.real = folder / "metadata"
        self.metadata = SignedMetadata.create(folder / "keys", self.real, 3600.0, datetime.now(UTC))
        self.origin = stack.enter_context(web(self.honest("/metadata/")))
        self.home = stack.enter_context(web(self._home))
        self.home_manner: Manner = self.honest("/v1/metadata/")
        self.state = folder / "node" / "trust.msgpack"
        self.coordinator = Coordinator(self.home.url, self.metadata.round_id, NodeKey(b"1" * 32))
        self.origins = Origins(self.coordinator, Random(1), HASTY)
        self.updater = Updater(self.origins, self.metadata.round_id, self.state)

    def honest(self, prefix: str, folder: Path | None = None) -> Manner:
        """Serve a metadata folder below a path."""

        def manner(request: Handler) -> None:
            path = (folder or self.real) / request.path.removeprefix(prefix)
            request.answer(200, path.read_bytes()) if path.is_file() else request.answer(404, b"")

        return manner

    def _home(self, request: Handler) -> None:
        if request.path == "/v1/origins":
            request.answer(200, OriginList(urls=(self.origin.url,)).to_bytes())
        else:
            self.home_manner(request)

    def publish(self, version: int) -> None:
        data = manifest_bytes(self.metadata.round_id, version)
        self.metadata.add_manifest(version, data, 4, datetime.now(UTC))

    async def sees(self) -> int:
        with trio.fail_after(120):
            await self.origins.learn()
            manifest = await self.updater.refresh()
        return manifest.version if manifest else 0

    async def refuses(self, error: type[SwarmError]) -> None:
        before = self.state.read_bytes() if self.state.exists() else None
        with pytest.raises(SwarmError) as caught:
            await self.sees()
        assert type(caught.value) is error, caught.value
        assert (self.state.read_bytes() if self.state.exists() else None) == before

    def asked(self, server: Web, prefix: str) -> set[str]:
        return {path.removeprefix(prefix) for path in server.asked if path.startswith(prefix)}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
async def scene(tmp_path: Path, stack: ExitStack) -> AsyncIterator[Scene]:
    made = Scene(tmp_path, stack)
    made.publish(1)
    yield made
    await made.origins.close()
    await made.coordinator.close()


async def test_what_is_named_by_hash_comes_from_the_origin_and_what_is_fresh_from_the_coordinator(scene: Scene) -> None:
    assert await scene.sees() == 1
    assert scene.asked(scene.origin, "/metadata/") == {"2.snapshot.json", "2.targets.json", target_path(1)}
    assert scene.asked(scene.home, "/v1/metadata/") == {"1.root.json", "2.root.json", "timestamp.json"}


@pytest.mark.parametrize(
    "manner",
    [
        manners.lies, manners.lacks, manners.hides, manners.fails, manners.stalls, manners.stalls_midway,
        manners.never_ends, manners.goes_away_midway, manners.redirects_to("http://127.0.0.1:1/"),
        lambda request: request.answer(200, gzip.compress(bytes(50 * MB)), Content_Encoding="gzip"),
        lambda request: request.answer(200, b"[" * 200_000),
    ],
)  # fmt: skip
async def test_origin_that_serves_no_good_documents_costs_time_only(scene: Scene, manner: Manner) -> None:
    scene.origin.manner = manner
    assert await scene.sees() == 1
    scene.publish(2)
    assert await scene.sees() == 2


@pytest.mark.parametrize("document", ["3.snapshot.json", "3.targets.json", target_path(2)])
async def test_mix_and_match_by_an_origin_is_noticed_and_undone(scene: Scene, document: str) -> None:
    """The document of the version before, honestly signed, under the name of the next."""
    assert await scene.sees() == 1
    scene.publish(2)
    mixed = scene.folder / "mixed"
    shutil.copytree(scene.real, mixed)
    before = document.replace("3.", "2.").replace(target_path(2), target_path(1))
    shutil.copyfile(scene.real / before, mixed / document)
    scene.origin.manner = scene.honest("/metadata/", mixed)
    assert await scene.sees() == 2
    assert scene.origins.in_order() == []


async def test_rollback_by_an_origin_is_refused_while_the_coordinator_is_silent(scene: Scene) -> None:
    old = scene.folder / "old"
    shutil.copytree(scene.real, old)
    scene.publish(2)
    assert await scene.sees() == 2
    scene.origin.manner = scene.honest("/metadata/", old)
    scene.home_manner = manners.fails
    await scene.refuses(Unreachable)


async def test_an_origin_alone_can_prove_a_new_version(scene: Scene) -> None:
    assert await scene.sees() == 1
    scene.publish(2)
    scene.home_manner = manners.fails
    assert await scene.sees() == 2


async def test_freeze_by_an_origin_ends_with_the_timestamp(scene: Scene) -> None:
    """An old copy proves something while the coordinator is silent, but not for longer than it says itself."""
    assert await scene.sees() == 1
    until = scene.updater.proved_until
    scene.home_manner = manners.fails
    assert await scene.sees() == 1
    assert scene.updater.proved_until == until
    late = SignedMetadata(scene.folder / "keys", scene.real, -1.0)
    late.renew_timestamp(datetime.now(UTC))
    await scene.refuses(Unreachable)
    scene.home_manner = scene.honest("/v1/metadata/")
    await scene.refuses(MetadataExpired)


@pytest.mark.parametrize("name", ["timestamp.json", "2.root.json"])
async def test_endless_data_from_the_coordinator_is_cut_off_and_costs_no_memory(scene: Scene, name: str) -> None:
    assert await scene.sees() == 1
    honest = scene.home_manner

    def manner(request: Handler) -> None:
        manners.never_ends(request) if request.path.endswith(name) else honest(request)

    scene.home_manner = manner
    tracemalloc.start()
    try:
        await scene.refuses(MessageTooLarge)
        assert tracemalloc.get_traced_memory()[1] < 8 * limits.METADATA_MAX_BYTES
    finally:
        tracemalloc.stop()


async def test_zip_bomb_in_place_of_a_document_is_refused(scene: Scene) -> None:
    assert await scene.sees() == 1
    bomb = gzip.compress(bytes(100 * MB))
    scene.home_manner = lambda request: request.answer(200, bomb, Content_Encoding="gzip")
    scene.origin.manner = manners.lacks
    await scene.refuses(Unreachable)
    scene.home_manner = lambda request: request.answer(200, bomb)
    with pytest.raises((UntrustedMetadata, MessageTooLarge)):
        await scene.sees()


async def test_wrong_size_claim_for_the_manifest_is_not_believed(scene: Scene) -> None:
    """Signed by the operator's own keys, and still: a petabyte is not waited for, and a short one not taken."""
    assert await scene.sees() == 1
    honest = limits.MANIFEST_MAX_BYTES

    class Claims(SignedMetadata):
        claim = 0

        def _publish(self, targets: Targets, snapshot: Snapshot, timestamp: Timestamp, now: datetime) -> None:
            targets.targets[target_path(2)].length = self.claim
            super()._publish(targets, snapshot, timestamp, now)

    liar = Claims(scene.folder / "keys", scene.real, 3600.0)
    for claim in (10**15, honest + 1, 1):
        liar.claim = claim
        liar.add_manifest(2, manifest_bytes(scene.metadata.round_id, 2), 4, datetime.now(UTC))
        scene.origin.manner = scene.honest("/metadata/")
        with pytest.raises((UntrustedMetadata, MessageTooLarge)):
            await scene.sees()


async def test_the_description_is_the_signed_one(scene: Scene) -> None:
    assert await scene.sees() == 1
    assert await scene.updater.description() is None
    said = RoundSection(title="Sums").describe(scene.metadata.round_id)
    scene.metadata.set_description(said, datetime.now(UTC))
    await scene.sees()
    assert await scene.updater.description() == said
    forged = RoundSection(title="Diff").describe(scene.metadata.round_id).to_bytes()
    scene.home_manner = lambda request: request.answer(200, forged)
    with pytest.raises(UntrustedMetadata, match="hash"):
        await scene.updater.description()
