"""The worker, between a coordinator and an engine that record what they are asked."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from protocol.errors import DiskFull, EngineFailed, SwarmError, Unreachable
from protocol.fragment import Part
from protocol.lease import Lease
from protocol.manifest import FileEntry, PolicyManifest, Sampler
from protocol.messages import LeaseReply, LeaseRequest, ReturnLeases
from protocol.rollout import Sample, pack_tokens
from protocol.signing import NodeKey
from swarm_node.engine.messages import GroupDone, GroupFailed, Loaded, Measured, Request
from swarm_node.milestones import Milestones
from swarm_node.policies import Policy
from swarm_node.worker import ENGINE_FAILURES_MAX, LOAD_AGAIN_S, Worker

pytestmark = pytest.mark.trio

DEADLINE_S = 30.0
FILE = FileEntry(path="config.json", size_bytes=0, digest="0" * 64, chunks=())


def policy(version: int) -> Policy:
    manifest = PolicyManifest(
        round_id="0" * 64,
        version=version,
        update=version,
        parent=None,
        task="arithmetic",
        sampler=Sampler(temperature=1.0, max_new_tokens=4),
        chunk_size_bytes=1024,
        files=(FILE,),
    )
    return Policy(manifest, Path(f"/{version}"))


class World:
    """Coordinator, policies, engine, outbox and sender at once; `log` is what they were asked, in order."""

    def __init__(
        self, *, leases: int, offered_version: int | None = None, at_least: int = 0, repeat: bool = False
    ) -> None:
        self.log: list[str] = []
        self.ready: Policy | None = policy(1)
        self.distrust = None
        self.milestones = Milestones()
        self.finished_after = leases
        self.given = 0
        self.trouble: dict[str, SwarmError] = {}
        """Raised once, instead of what would be logged under this name."""
        self.before_end: Callable[[], None] = lambda: None
        self.on_give_back: Callable[[], None] = lambda: None
        self.on_wait: Callable[[float], None] = lambda patience_s: None
        self.proof_ended = False
        self._offered_version, self.at_least, self._repeat = offered_version, at_least, repeat
        self._engine: deque[Request] = deque()
        everything = cast(Any, self)
        self.worker = Worker(
            coordinator=everything,
            policies=everything,
            engine=everything,
            outbox=everything,
            sender=everything,
            teller=everything,
            key=NodeKey(bytes(32)),
            round_id="0" * 64,
            groups_per_request=4,
        )
        self.worker.tokens_per_s = 1.0  # known already

    async def run(self) -> list[str]:
        with trio.fail_after(DEADLINE_S):
            await self.worker.run()
        return self.log

    def note(self, what: str) -> None:
        if error := self.trouble.pop(what, None):
            raise error
        self.log.append(what)

    async def usable(self) -> Policy:
        if self.proof_ended:
            self.note("wait for proof")
            self.proof_ended = False
        assert self.ready is not None
        return self.ready

    def usable_now(self) -> Policy | None:
        return None if self.proof_ended else self.ready

    def hint(self, newest_version: int) -> None:
        pass

    async def newer_than(self, policy: Policy, *, patience_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.on_wait(patience_s)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        count = min(max(request.groups, self.at_least), self.finished_after - self.given)
        self.note(f"lease v{request.version}")
        numbers = [0] * count if self._repeat else range(self.given, self.given + count)
        self.given += count
        version = self._offered_version or request.version
        leases = tuple(
            Lease(
                lease_id=f"{number:032x}",
                version=version,
                seed=number,
                samples=1,
                prompt=pack_tokens([1]),
                price_micros_per_mtok=1,
                expires_ms=1,
            )
            for number in numbers
        )
        reason: Any = "" if count else "finished"
        return LeaseReply(leases=leases, newest_version=1, reason=reason, retry_s=0.0)

    async def give_back(self, message: ReturnLeases) -> None:
        self.note("back " + " ".join(str(int(lease, 16)) for lease in message.lease_ids))
        self.on_give_back()

    def begin(self, lease: Lease) -> None:
        pass

    def grew(self, lease_id: str, parts: Collection[Part]) -> None:
        self.note(f"told {int(lease_id, 16)}")

    def forget(self, lease_id: str) -> None:
        pass

    async def load(self, folder: Path, version: int) -> Loaded:
        assert not self._engine
        self.note(f"load v{version}")
        return Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=True, seconds=0.0)

    async def measured(self) -> Measured:
        return Measured(prompt_tokens=1, first_tokens=3, prefill_s=1.0, later_tokens=3, decode_s=1.0)

    async def submit(self, requests: Sequence[Request]) -> None:
        self._engine.extend(requests)
        self.note("submit " + " ".join(str(int(request.request_id, 16)) for request in requests))

    async def finished(self) -> GroupDone | GroupFailed | None:
        await trio.lowlevel.checkpoint()
        self.before_end()
        request = self._engine.popleft()
        number = int(request.request_id, 16)
        try:
            self.note(f"end {number}")
        except EngineFailed as error:
            return GroupFailed.of(request.request_id, error)
        sample = Sample(tokens=pack_tokens([1]), logprobs=bytes(4), finish="stop")
        return GroupDone(request_id=request.request_id, samples=(sample,), first_token_ago_s=0.0)

    async def cancel(self, request_ids: Collection[str]) -> None:
        self._engine = deque(request for request in self._engine if request.request_id not in request_ids)

    def put(self, lease_id: str, claim: bytes) -> None:
        self.note(f"store {int(lease_id, 16)}")

    def wake(self) -> None:
        pass

    def __len__(self) -> int:
        return 0


def answered(*numbers: int) -> list[str]:
    return [f"{what} {number}" for number in numbers for what in ("end", "store")]


async def test_more_is_leased_when_half_of_the_groups_have_ended() -> None:
    log = await World(leases=8).run()
    assert log[:3] == ["load v1", "lease v1", "submit 0 1 2 3"]
    assert log[3:9] == [*answered(0, 1), "lease v1", "submit 4 5"]
    assert log[9:15] == [*answered(2, 3), "lease v1", "submit 6 7"]
    assert log[15:] == [*answered(4, 5), "lease v1", *answered(6), "back 7"], "what is left at the end helps nobody"


async def test_a_newer_version_waits_for_the_groups_of_the_old_one_and_nothing_more_is_leased_for_that() -> None:
    world = World(leases=8)

    def publish() -> None:
        world.ready = policy(2)

    world.before_end = publish
    log = await world.run()
    assert log[:13] == ["load v1", "lease v1", "submit 0 1 2 3", *answered(0, 1, 2, 3), "load v2", "lease v2"]
    assert log[13] == "submit 4 5 6 7"


async def test_a_coordinator_that_is_away_costs_nothing_that_is_being_sampled() -> None:
    world = World(leases=8)

    def leave() -> None:
        world.trouble = {"lease v1": Unreachable("away")}
        world.before_end = lambda: None

    world.before_end = leave
    log = await world.run()
    assert log[3:12] == [*answered(0, 1, 2, 3), "lease v1"]


async def test_leases_for_another_version_go_back_unanswered() -> None:
    world = World(leases=4, offered_version=7)
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3", "lease v1"]


async def test_more_leases_than_asked_for_are_refused_and_cost_no_group_that_runs() -> None:
    world = World(leases=8, at_least=8)
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3 4 5 6 7", "lease v1"]
    world = World(leases=12)

    def offer_more() -> None:
        world.at_least = 4

    world.before_end = offer_more
    log = await world.run()
    assert log[3:8] == [*answered(0, 1), "lease v1"]
    assert log[8:14] == ["back 4 5 6 7", *answered(2, 3), "lease v1"]


async def test_a_lease_that_is_offered_twice_is_sampled_by_nobody() -> None:
    assert await World(leases=4, repeat=True).run() == ["load v1", "lease v1", "back 0", "lease v1"]


async def test_proof_that_ends_lets_no_group_wait_that_runs_and_no_other_begin() -> None:
    world = World(leases=8)

    def end_proof() -> None:
        world.proof_ended = True
        world.before_end = lambda: None

    world.before_end = end_proof
    log = await world.run()
    assert log[3:14] == [*answered(0, 1, 2, 3), "wait for proof", "lease v1", "submit 4 5 6 7"]


async def test_a_group_that_fails_goes_back_alone() -> None:
    world = World(leases=8)
    world.trouble = {"end 1": EngineFailed("no numbers")}
    log = await world.run()
    assert log[3:8] == ["end 0", "store 0", "back 1", "lease v1", "submit 4 5"]
    assert log[8:12] == answered(2, 3)


async def test_a_full_disk_gives_back_all_that_is_open() -> None:
    world = World(leases=8)
    world.trouble = {"store 1": DiskFull("full")}
    world.on_give_back = world.worker.finished.set
    log = await world.run()
    assert log == ["load v1", "lease v1", "submit 0 1 2 3", "end 0", "store 0", "end 1", "back 1 2 3"]


async def test_a_version_that_cannot_be_loaded_is_left_for_the_next_one() -> None:
    world, waited_s = World(leases=1), list[float]()
    world.trouble["load v1"] = EngineFailed("its weights are damaged")

    def publish(patience_s: float) -> None:
        waited_s.append(patience_s)
        world.ready = policy(2)

    world.on_wait = publish
    log = await world.run()
    assert log[:3] == ["load v2", "lease v2", "submit 0"]
    assert waited_s[0] == LOAD_AGAIN_S


async def test_an_engine_that_keeps_failing_ends_the_node_and_its_leases_go_back() -> None:
    world = World(leases=100)

    def fail() -> None:
        raise EngineFailed("it died")

    world.before_end = fail
    with pytest.raises(EngineFailed, match="it died"):
        await world.run()
    submitted = [line.removeprefix("submit ") for line in world.log if line.startswith("submit")]
    assert len(submitted) == ENGINE_FAILURES_MAX
    assert submitted == [line.removeprefix("back ") for line in world.log if line.startswith("back")]
