"""The mirror: a member that does not sample; it downloads every version and serves the chunks.

- For owners with bandwidth and no GPU, and for tests that need a real data plane without an engine.
- It registers and sends heartbeats like any node, but never requests a lease, and so earns nothing.
- A version is reported when its files are complete: every chunk and every file's digest has been checked.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import trio

from swarm_node.coordinator_api import last_round
from swarm_node.member import MemberSettings, cancel_on_signal, open_home, open_member
from swarm_node.versions.fetcher import Traffic
from swarm_node.versions.follower import PolicyFollower
from swarm_node.work.pulse import Phase, Pulse


@dataclass(frozen=True)
class Held:
    """A version that this mirror has completed, with the bytes downloaded for it."""

    version: int
    at_s: float
    """Time of completion, in seconds of the Unix clock."""
    bytes: int
    from_peers: int
    from_seeder: int
    from_http: int
    folder: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


async def run(settings: MemberSettings, *, show: Callable[[Held], None]) -> None:
    """Mirror a round until it is finished or a signal comes."""
    async with (
        open_home(settings.home, settings.limits) as node,
        open_member(settings, node) as me,
        trio.open_nursery() as nursery,
    ):
        mirror = _Mirror(me.policies, show)
        pulse = Pulse(me, mirror)
        nursery.start_soon(cancel_on_signal, node.signals, nursery.cancel_scope)
        await pulse.register()
        last_round.record_joined(settings.home, [settings.join], settings.given_name, page=settings.page)
        try:
            for machine in (pulse, me.policies, me.log_watch, mirror):
                nursery.start_soon(machine.run)
            if me.mapper is not None:
                nursery.start_soon(me.mapper.run)
            nursery.start_soon(pulse.listen)
            await mirror.finished.wait()
            nursery.cancel_scope.cancel()
        finally:
            await pulse.leave()


class _Mirror:
    """Activity that watches the follower, and reports every version."""

    phase = Phase.MIRRORING
    tokens_per_s = 0.0

    def __init__(self, policies: PolicyFollower, show: Callable[[Held], None]) -> None:
        self._policies = policies
        self._show = show
        self._told = Traffic()
        self.finished = trio.Event()

    @property
    def version(self) -> int:
        """The newest complete version; 0 before the first."""
        return self._policies.ready.manifest.version if self._policies.ready else 0

    async def run(self) -> None:
        while True:
            policy = await self._policies.usable()
            held = Held(
                version=policy.manifest.version,
                at_s=time.time(),
                bytes=sum(entry.size_bytes for entry in policy.manifest.files),
                folder=str(policy.folder),
                **self._moved(),
            )
            self._show(held)
            await self._policies.newer_than(policy, patience_s=float("inf"))

    def _moved(self) -> dict[str, int]:
        """Return the bytes by source since the last call."""
        kinds = ("from_peers", "from_seeder", "from_http")
        moved = {kind: getattr(self._policies.fetcher.traffic, kind) - getattr(self._told, kind) for kind in kinds}
        self._told = Traffic(**{kind: getattr(self._policies.fetcher.traffic, kind) for kind in kinds})
        return moved
