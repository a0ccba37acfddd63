"""Stages that the last versions have passed on this node, with their age, until the coordinator has received them.

- A version passes each stage once; passing it again after a failure changes nothing.
- The age is reported, not the time: this machine's clock may be wrong.
- A stage is reported with every heartbeat until a coordinator that knows the version has answered one.
"""

import trio

from protocol import limits
from protocol.work.messages import Reached, Stage


class Milestones:
    """The stages that were passed recently."""

    def __init__(self) -> None:
        self._passed: dict[tuple[int, Stage], float] = {}
        """Time of each stage, on the loop's monotonic clock."""
        self._received: set[tuple[int, Stage]] = set()

    def passed(self, version: int, stage: Stage, *, ago_s: float = 0.0) -> None:
        """Record that a version passed a stage, `ago_s` seconds ago."""
        if (version, stage) in self._passed:
            return
        self._passed[version, stage] = trio.current_time() - ago_s
        for oldest in list(self._passed)[: -limits.REACHED_MAX]:
            del self._passed[oldest]
            self._received.discard(oldest)

    def heard_ago_s(self, version: int) -> float | None:
        """Return the seconds since this node first knew of a version; None if unknown."""
        heard_at = self._passed.get((version, "heard"))
        return None if heard_at is None else trio.current_time() - heard_at

    def unreported(self) -> tuple[Reached, ...]:
        """Return the stages that the coordinator may not know yet."""
        now = trio.current_time()
        return tuple(
            Reached(version=version, stage=stage, ago_s=min(now - passed_at, limits.REACHED_AGO_MAX_S))
            for (version, stage), passed_at in self._passed.items()
            if (version, stage) not in self._received
        )

    def acknowledge(self, reached: tuple[Reached, ...], *, newest_version: int) -> None:
        """Record that the coordinator received these stages; it could not use those of a version above its newest."""
        self._received |= {(stage.version, stage.stage) for stage in reached if stage.version <= newest_version}
