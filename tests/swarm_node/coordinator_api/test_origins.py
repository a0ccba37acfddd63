"""Several origins, some of them bad: the chunk comes from the next, and a bad one is left alone for a while."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from random import Random

import pytest
import trio

from protocol.errors import UnknownChunk, Unreachable
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.policy.manifest import PolicyManifest
from protocol.policy.origin import OriginList, chunk_path
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origin import Patience
from swarm_node.coordinator_api.origins import PAUSE_S, Origins, open_origins
from tests.protocol.tuf_repository import manifest_bytes
from tests.swarm_node import web as manners
from tests.swarm_node.web import Handler, Manner, Web, serves, web

CHUNK = bytes(1000)
NAME = chunk_id(CHUNK)
FILES = {chunk_path(NAME): CHUNK}
HASTY = Patience(silence_s=1.5, grace_s=3.0)
PATIENT_SECONDS = 60.0

pytestmark = pytest.mark.trio


class Swarm:
    """A coordinator that tells of origins, and the origins."""

    def __init__(self, stack: ExitStack, others: Sequence[Manner], home: Manner) -> None:
        self.webs = [stack.enter_context(web(manner)) for manner in others]
        self.told = [server.url for server in self.webs]
        self.home = stack.enter_context(web(self._answer))
        self._home_manner = home
        self.coordinator = Coordinator(self.home.url, "a" * 64, NodeKey(b"1" * 32))
        self.origins = Origins(self.coordinator, Random(1), HASTY)

    def _answer(self, request: Handler) -> None:
        if request.path == "/v1/origins":
            request.answer(200, OriginList(urls=tuple(self.told)).to_bytes())
        else:
            self._home_manner(request)

    async def chunk(self) -> bytes:
        await self.origins.learn()
        return await self.origins.chunk(NAME, len(CHUNK))

    def asked(self, server: Web) -> int:
        return server.asked[f"/{chunk_path(NAME)}"]


@asynccontextmanager
async def swarm(*others: Manner, home: Manner = manners.fails) -> AsyncIterator[Swarm]:
    with ExitStack() as stack, trio.fail_after(PATIENT_SECONDS):
        made = Swarm(stack, others, home)
        yield made
        await made.origins.close()
        await made.coordinator.close()


async def test_a_chunk_comes_from_an_origin_and_the_coordinator_is_spared() -> None:
    async with swarm(serves(FILES)) as here:
        assert await here.chunk() == CHUNK
        assert here.asked(here.webs[0]) == 1
        assert set(here.home.asked) == {"/v1/origins"}


async def test_without_origins_the_coordinator_is_asked() -> None:
    async with swarm(home=serves({f"v1/{path}": data for path, data in FILES.items()})) as here:
        assert await here.chunk() == CHUNK


@pytest.mark.parametrize(
    "bad",
    [
        manners.lies, manners.stalls, manners.stalls_midway, manners.drips, manners.never_ends, manners.lacks,
        manners.hides, manners.fails, manners.goes_away_midway, manners.redirects_to("file:///etc/passwd"),
    ],
)  # fmt: skip
async def test_a_bad_origin_costs_time_and_the_chunk_comes_from_the_next(bad: Manner) -> None:
    """The first origin that is asked may be either; and the bad one is not asked again at once."""
    async with swarm(bad, serves(FILES)) as here:
        bad_one = here.webs[0]
        for _ in range(20):
            assert await here.chunk() == CHUNK
        assert here.asked(bad_one) == 1


async def test_when_every_origin_is_bad_the_coordinator_is_the_last_resort() -> None:
    home = serves({f"v1/{path}": data for path, data in FILES.items()})
    async with swarm(manners.lies, manners.fails, manners.lacks, home=home) as here:
        assert await here.chunk() == CHUNK
        assert [here.asked(server) for server in here.webs] == [1, 1, 1]


async def test_when_the_coordinator_fails_too_its_error_is_the_one_told() -> None:
    async with swarm(manners.lies, home=manners.fails) as here:
        with pytest.raises(Unreachable, match="500"):
            await here.chunk()
    async with swarm(manners.fails, home=manners.lacks) as here:
        with pytest.raises(UnknownChunk):
            await here.chunk()


async def test_requests_spread_over_all_origins() -> None:
    async with swarm(*[serves(FILES)] * 3) as here:
        for _ in range(60):
            await here.chunk()
        assert min(here.asked(server) for server in here.webs) > 5


async def test_an_origin_that_is_gone_is_tried_again_later_and_later(autojump_clock: trio.testing.MockClock) -> None:
    origins = Origins(Coordinator("http://127.0.0.1:1", "a" * 64, NodeKey(b"1" * 32)), Random(1))
    origin = origins.home
    origins._others[origin.url] = origin
    for doubled in (1, 2, 4, 8):
        assert origins.in_order() == [origin]
        origins.failed(origin, None)
        assert origins.in_order() == []
        await trio.sleep(doubled * PAUSE_S - 0.1)
        assert origins.in_order() == []
        await trio.sleep(0.2)
    await origins.close()


async def test_an_origin_the_operator_no_longer_names_is_forgotten() -> None:
    async with swarm(serves(FILES), serves(FILES)) as here:
        await here.chunk()
        del here.told[0]
        here.origins._learnt_at -= 3600
        await here.origins.learn()
        assert [origin.url for origin in here.origins.in_order()] == here.told


async def test_a_coordinator_without_a_list_is_no_failure() -> None:
    with web(manners.lacks) as server:
        coordinator = Coordinator(server.url, "a" * 64, NodeKey(b"1" * 32))
        async with open_origins(coordinator) as origins:
            await origins.learn()
            assert origins.in_order() == []
        await coordinator.close()


@pytest.mark.parametrize("told", [b"", b"\xc1", b"x" * 100_000, b"\x81\xa4urls\x91\xa9file:///x"])
async def test_hostile_list_of_origins_is_passed_over(told: bytes) -> None:
    async with swarm(serves(FILES)) as here:
        await here.chunk()
        before = here.origins.in_order()
        here.origins._learnt_at -= 3600
        here.home.manner = lambda request: request.answer(200, told)
        await here.origins.learn()
        assert {origin.url for origin in here.origins.in_order()} == {origin.url for origin in before}


async def test_the_manifest_says_how_long_a_chunk_may_be() -> None:
    manifest = PolicyManifest.from_bytes(manifest_bytes("a" * 64, 1))
    name = ChunkId(next(iter(manifest.chunk_sizes())))
    async with swarm(serves({chunk_path(name): b"xy"}), home=manners.lacks) as here:
        await here.origins.learn()
        with pytest.raises(UnknownChunk):
            await here.origins.fetcher_for(manifest)(name)
