"""A worker between a coordinator, an engine and an owner's gate that record what they are asked."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import trio
from trio.testing import wait_all_tasks_blocked

from protocol.errors import EngineFailed, SwarmError
from protocol.policy.manifest import FileEntry, PolicyManifest, Sampler
from protocol.wire.signing import NodeKey
from protocol.work.fragment import FragmentPart
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest, ReturnLeases
from protocol.work.rollout import Sample, pack_tokens
from swarm_node.allowance.rules import Decision, LimitReason, Why
from swarm_node.engine.messages import GroupDone, GroupFailed, Loaded, SampleRequest
from swarm_node.engine.throughput import SampleWork
from swarm_node.versions.fetcher import HeldVersion
from swarm_node.versions.follower import Milestones
from swarm_node.work.engine_turn import EngineTurns
from swarm_node.work.held_leases import HeldLeases
from swarm_node.work.lease_offers import LeaseOffers
from swarm_node.work.lease_pacing import LeasePacing, NodePace
from swarm_node.work.round_engine import RoundEngine
from swarm_node.work.sender import RolloutWriter
from swarm_node.work.worker import Worker

DEADLINE_S = 300.0
STANDBY_S = 10.0
FILE = FileEntry(path="config.json", size_bytes=0, digest="0" * 64, chunks=())


def policy(version: int) -> HeldVersion:
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
    return HeldVersion(manifest, Path(f"/{version}"))


class World:
    """Coordinator, policies, engine, outbox and sender at once; `log` is what they were asked, in order."""

    def __init__(
        self, *, leases: int, offered_version: int | None = None, at_least: int = 0, repeat: bool = False
    ) -> None:
        self.log: list[str] = []
        self.ready: HeldVersion | None = policy(1)
        self.distrust = None
        self.milestones = Milestones()
        self.finished_after = leases
        self.given = 0
        self.trouble: dict[str, SwarmError] = {}
        """Raised once, instead of what would be logged under this name."""
        self.before_end: Callable[[], None] = lambda: None
        self.on_return: Callable[[], None] = lambda: None
        self.on_wait: Callable[[float], None] = lambda patience_s: None
        self.on_wake: Callable[[], None] = lambda: None
        self.proof_ended = False
        self.pruned: dict[int, bool] = {}
        """Versions that are too old when they would be loaded."""
        self.measures_until = 0
        """Replies say that more of the version is measured, as long as fewer groups were given."""
        self.standby: set[int] = set()
        """Versions for which there is no work, by the coordinator's word."""
        self._offered_version, self.at_least, self._repeat = offered_version, at_least, repeat
        self.expires_ms = 60_000
        self.decision = Decision()
        self.finishing = False
        self.gate_moved = trio.Event()
        self.kept = set[str]()
        self.asked: list[LeaseRequest] = []
        self._engine: deque[SampleRequest] = deque()
        self.speed, self.cards_ready = 1.0, 1
        self.price_floor = 0
        everything = cast(Any, self)
        self.engine = RoundEngine(everything, EngineTurns().turn_of(0), everything)
        self.pacing = LeasePacing(lambda: 4 * self.engine.pool.cards_ready)
        self.leases = HeldLeases(everything, everything)
        writer = RolloutWriter(NodeKey(bytes(32)), "0" * 64, everything, everything)
        self.offers = LeaseOffers(
            coordinator=everything,
            leases=self.leases,
            lease_log=everything,
            gate=everything,
            pacing=self.pacing,
            pace=lambda: NodePace(self.engine.tokens_per_s, writer.tokens_per_sample),
            price_floor=lambda: self.price_floor,
        )
        self.worker = Worker(
            policies=everything,
            engine=self.engine,
            leases=self.leases,
            offers=self.offers,
            writer=writer,
            sender=everything,
            reporter=everything,
            gate=everything,
        )

    def decide(self, *whys: Why) -> None:
        """The owner's gate, as these reasons leave it."""
        self.decision = Decision(tuple(LimitReason(why, why) for why in whys))
        self.gate_moved.set()
        self.gate_moved = trio.Event()

    async def opened(self) -> None:
        self.note("wait for the gate")
        while not (self.decision.may_work or self.finishing):
            await self.gate_moved.wait()

    async def closed(self) -> None:
        while self.decision.may_work:
            await self.gate_moved.wait()

    async def rest(self) -> None:
        self._engine.clear()
        self.note("engine rests")

    def now_ms(self) -> int:
        return 0

    async def run(self) -> list[str]:
        with trio.fail_after(DEADLINE_S):
            await self.worker.run()
        return self.log

    def note(self, what: str) -> None:
        if error := self.trouble.pop(what, None):
            raise error
        self.log.append(what)

    async def usable(self) -> HeldVersion:
        if self.proof_ended:
            self.note("wait for proof")
            self.proof_ended = False
        assert self.ready is not None
        return self.ready

    def usable_now(self) -> HeldVersion | None:
        return None if self.proof_ended else self.ready

    def hold_versions(self, policy: HeldVersion, *others: HeldVersion | None) -> bool:
        return not self.pruned.pop(policy.manifest.version, False)

    def hint(self, newest_version: int) -> None:
        pass

    async def newer_than(self, policy: HeldVersion, *, patience_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.on_wait(patience_s)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        count = min(max(request.groups, self.at_least), self.finished_after - self.given)
        self.note(f"lease v{request.version}")
        self.asked.append(request)
        if request.version in self.standby:
            return LeaseReply(leases=(), newest_version=1, reason="standby", retry_s=STANDBY_S)
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
                expires_ms=self.expires_ms,
            )
            for number in numbers
        )
        reason: Any = "" if count else "finished"
        stays = self.given < self.measures_until
        return LeaseReply(leases=leases, newest_version=1, reason=reason, retry_s=0.0, stays=stays)

    async def return_leases(self, message: ReturnLeases) -> None:
        self.note("back " + " ".join(str(int(lease, 16)) for lease in message.lease_ids))
        self.on_return()

    def start(self, lease: Lease) -> None:
        pass

    def record(self, leases: Sequence[Lease]) -> None:
        """The lease log."""
        if error := self.trouble.pop("keep", None):
            raise error
        self.kept |= {lease.lease_id for lease in leases}

    def add_tokens(self, lease_id: str, parts: Collection[FragmentPart]) -> None:
        self.note(f"told {int(lease_id, 16)}")

    def forget(self, lease_id: str) -> None:
        pass

    def speed_with(self, choose: object) -> float:
        return self.speed

    async def load(self, folder: Path, version: int, warm_up: SampleWork, choose: object = None) -> Loaded:
        assert not self._engine
        self.note(f"load v{version}")
        return Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=True, seconds=0.0)

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        assert self.kept >= {request.request_id for request in requests}, "sampled before it was noted"
        self._engine.extend(requests)
        self.note("submit " + " ".join(str(int(request.request_id, 16)) for request in requests))

    async def finished(self, interrupted: trio.Event | None = None) -> GroupDone | GroupFailed | None:
        await trio.lowlevel.checkpoint()
        if interrupted is not None and interrupted.is_set():
            return None
        self.before_end()
        if not self._engine:
            return None
        request = self._engine.popleft()
        number = int(request.request_id, 16)
        try:
            self.note(f"end {number}")
        except EngineFailed as error:
            return GroupFailed.from_error(request.request_id, error)
        sample = Sample(tokens=pack_tokens([1]), logprobs=bytes(4), finish="stop")
        return GroupDone(request_id=request.request_id, samples=(sample,), first_token_ago_s=0.0)

    async def cancel(self, request_ids: Collection[str]) -> None:
        self._engine = deque(request for request in self._engine if request.request_id not in request_ids)

    def put(self, lease_id: str, claim: bytes) -> None:
        self.note(f"store {int(lease_id, 16)}")

    async def begun(self) -> None:
        """The sender of this world sends nothing."""

    def wake(self, *, at_once: bool = False) -> None:
        self.on_wake()

    def __len__(self) -> int:
        return 0


def answered(*numbers: int) -> list[str]:
    return [f"{what} {number}" for number in numbers for what in ("end", "store")]


async def settled() -> None:
    """Wait until every task waits for somebody else, and no thread works for one."""
    limiter, still = trio.to_thread.current_default_thread_limiter(), 0
    while still < 2:  # a thread may end after the tasks were looked at
        await wait_all_tasks_blocked(cushion=0.01)
        still = 0 if limiter.borrowed_tokens else still + 1
