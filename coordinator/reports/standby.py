"""The lag of a standby copy: `standby.json` in its folder, which the follower writes after each pass.

- It is written after the copy was synced, so it never claims more than the copy has.
- While it is recent, the coordinator publishes nothing that the copy does not have: a checkpoint covers `ledger_size`
  entries at most, and leases for a version are given once the copy has it. So a coordinator that is started from the
  copy continues from the last published state.
- A copy that is more than `PATIENCE_S` behind does not stop the round: it goes on without the copy, and reports that.
"""

import time
from contextlib import suppress
from pathlib import Path

from pydantic import Field, ValidationError

from coordinator.base.clock import now_ms
from coordinator.base.files import read_at_most, write_durably
from coordinator.config.section import Section

NAME = "standby.json"
MAX_BYTES = 2**16

PATIENCE_S = 15.0
"""The longest wait for a copy, which may be lost. A pass normally takes 1 s to 2 s."""

LOOK_EVERY_S = 0.1


class Confirmed(Section):
    """The last pass of a follower, and its result."""

    target: str
    taken_ms: int
    """Everything that was durable at this moment is in the copy."""
    ledger_size: int | None
    """Entries that the copy has; None where the store is replicated by PostgreSQL itself."""
    version: int
    lag_max_s: float = Field(ge=0)
    """The largest recent lag of the copy."""
    problem: str = ""
    """The reason why the last attempt failed; empty if it did not."""

    def age_s(self, now_ms: int) -> float:
        """Return the lag of the copy."""
        return max(0.0, (now_ms - self.taken_ms) / 1000)

    def is_current(self, now_ms: int) -> bool:
        """Return True if the copy is recent enough to wait for; False if the clock was set back since the last pass."""
        return abs(now_ms - self.taken_ms) <= 1000 * PATIENCE_S


def read(folder: Path) -> Confirmed | None:
    """Return the last confirmation of the follower of a round; None if there is no follower."""
    with suppress(OSError, ValueError, ValidationError):
        return Confirmed.model_validate_json(read_at_most(folder / NAME, MAX_BYTES))
    return None


def current(folder: Path) -> Confirmed | None:
    """Return the last confirmation, if the copy is recent enough to wait for."""
    copy = read(folder)
    return copy if copy and copy.is_current(now_ms()) else None


def wait_for(folder: Path, version: int) -> None:
    """Wait until the copy has a signed version, as long as the copy is recent enough."""
    while (copy := current(folder)) and copy.version < version:
        time.sleep(LOOK_EVERY_S)  # the follower is another process, which reports its progress in a file only


def write(folder: Path, confirmed: Confirmed) -> None:
    """Record a pass."""
    write_durably(folder / NAME, confirmed.model_dump_json(indent=1).encode())


def forget(folder: Path) -> None:
    """Record that the round has no follower any more."""
    (folder / NAME).unlink(missing_ok=True)
