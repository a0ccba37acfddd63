"""How far the last versions have come on this node, by a stopwatch, until the coordinator has been told.

- A version passes each stage once; that it passes again, after a failure, changes nothing.
- What is told is how long ago, never at which time: this machine's clock may be wrong.
- A stage is told again with every heartbeat until one is answered by a coordinator that knows the version itself.
"""

import trio

from protocol import limits
from protocol.work.messages import Reached, Stage


class Milestones:
    """The stages that were passed lately."""

    def __init__(self) -> None:
        self._passed: dict[tuple[int, Stage], float] = {}
        """When, on the loop's clock, which only ever runs forward."""
        self._told: set[tuple[int, Stage]] = set()

    def passed(self, version: int, stage: Stage, *, ago_s: float = 0.0) -> None:
        """Note that a version came so far, now or a moment ago."""
        if (version, stage) in self._passed:
            return
        self._passed[version, stage] = trio.current_time() - ago_s
        for oldest in list(self._passed)[: -limits.REACHED_MAX]:
            del self._passed[oldest]
            self._told.discard(oldest)

    def heard_ago_s(self, version: int) -> float | None:
        """How long this node has known of a version, if it remembers."""
        heard_at = self._passed.get((version, "heard"))
        return None if heard_at is None else trio.current_time() - heard_at

    def untold(self) -> tuple[Reached, ...]:
        """What the coordinator may not know yet."""
        now = trio.current_time()
        return tuple(
            Reached(version=version, stage=stage, ago_s=min(now - passed_at, limits.REACHED_AGO_MAX_S))
            for (version, stage), passed_at in self._passed.items()
            if (version, stage) not in self._told
        )

    def acknowledge(self, reached: tuple[Reached, ...], *, newest_version: int) -> None:
        """The coordinator has heard this; of a version above its newest it could make no use yet."""
        self._told |= {(one.version, one.stage) for one in reached if one.version <= newest_version}
