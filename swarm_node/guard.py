"""The guard: stops a node whose work is refused again and again, and says why.

- Nobody should burn power in vain, nor collect faults without knowing it.
- A refusal that is the node's fault counts against `REJECTIONS_MAX` in a row; one that only came too late, as after a
  lost line, against a larger number. Anything accepted begins the count anew.
- What is kept is what the owner needs: lease, code and the coordinator's words, for `swarm-node why`.
"""

from collections import deque
from typing import NamedTuple

import trio

from protocol.errors import ERRORS, LeaseClosed, StaleVersion, SwarmError
from protocol.ids import LeaseId
from protocol.messages import Verdict

REJECTIONS_MAX = 5
"""An honest node on sound hardware has none; five in a row are no accident."""

LATE_MAX = 24
"""Three requests full of rollouts that came back too late: a line that was away, or a machine that is too slow."""

LATE = frozenset({LeaseClosed.code, StaleVersion.code})


class RejectedTooOften(SwarmError):
    """This node's rollouts were refused again and again, so it stopped by itself."""

    code, http_status, fault = "rejected_too_often", 422, "node"


class Rejected(NamedTuple):
    """One refusal."""

    lease_id: str
    code: str
    message: str


class Guard:
    """Counts refusals in a row."""

    def __init__(self) -> None:
        self._faults = self._late = 0
        self._tripped = trio.Event()
        self.lately: deque[Rejected] = deque(maxlen=REJECTIONS_MAX)
        """The last refusals, the newest last."""

    @property
    def tripped(self) -> bool:
        return self._tripped.is_set()

    def note(self, lease_id: LeaseId, verdict: Verdict) -> None:
        """Take note of a verdict."""
        if verdict.outcome != "rejected":
            self._faults = self._late = 0
            return
        self.lately.append(Rejected(lease_id, verdict.code, verdict.message))
        if verdict.code in LATE:
            self._late += 1
        elif ERRORS.get(verdict.code, SwarmError).fault == "node":
            self._faults += 1
        if self._faults >= REJECTIONS_MAX or self._late >= LATE_MAX:
            self._tripped.set()

    async def run(self) -> None:
        """Raise when it is enough."""
        await self._tripped.wait()
        raise self.verdict()

    def verdict(self) -> RejectedTooOften:
        """What is said to the owner."""
        last = self.lately[-1]
        codes = ", ".join(dict.fromkeys(one.code for one in self.lately))
        if self._faults >= REJECTIONS_MAX:
            said = f"{self._faults} rollouts in a row were rejected ({codes}); the last, lease {last.lease_id}: "
            evidence = f"`swarm-node why JOIN_STRING {last.lease_id}` shows the evidence"
            hint = f"{evidence}, `swarm-node doctor` checks the engine."
        else:
            said = f"{self._late} rollouts in a row came too late ({codes}); the last, lease {last.lease_id}: "
            hint = "Take fewer at once with --groups, or see with `swarm-node doctor` whether line or disk are slow."
        return RejectedTooOften(said + last.message, hint=hint)
