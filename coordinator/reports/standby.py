"""The lag of a standby copy: `standby.json` in its folder, which the follower writes after each pass.

- It is written after the copy was synced, so it never says too much.
- While it is young, the coordinator publishes nothing that the copy does not have: a checkpoint covers `ledger_size`
  entries at most, and work is given for a version once the copy has it. So whoever takes over from the copy continues
  what was published.
- A copy that has fallen behind for `PATIENCE_S` stops nothing: the round goes on without it, and says so.
"""

import time
from contextlib import suppress
from pathlib import Path

from pydantic import Field, ValidationError

from coordinator.base.files import read_at_most, write_durably
from coordinator.config.section import Section

NAME = "standby.json"
MAX_BYTES = 2**16

PATIENCE_S = 15.0
"""A pass takes a second or two. Nodes do not wait longer than this for a copy that may be lost."""

LOOK_EVERY_S = 0.1


class Confirmed(Section):
    """The last pass of a follower, and what came after it."""

    target: str
    taken_ms: int
    """Everything that was durable at this moment is in the copy."""
    ledger_size: int | None
    """Entries that the copy has; None where the store is replicated by PostgreSQL itself."""
    version: int
    lag_max_s: float = Field(ge=0)
    """The longest that the copy was behind lately."""
    problem: str = ""
    """Why the last attempt failed, if it did."""

    def age_s(self, now_ms: int) -> float:
        """Return the lag of the copy."""
        return max(0.0, (now_ms - self.taken_ms) / 1000)

    def is_current(self, now_ms: int) -> bool:
        """Return True if it is worth waiting for this copy; one of a time to come is of before a clock was set back."""
        return abs(now_ms - self.taken_ms) <= 1000 * PATIENCE_S


def read(folder: Path) -> Confirmed | None:
    """Return the last confirmation of the follower of a round; None if nobody follows it."""
    with suppress(OSError, ValueError, ValidationError):
        return Confirmed.model_validate_json(read_at_most(folder / NAME, MAX_BYTES))
    return None


def current(folder: Path) -> Confirmed | None:
    """The same, if it is worth waiting for."""
    found = read(folder)
    return found if found and found.is_current(time.time_ns() // 1_000_000) else None


def wait_for(folder: Path, version: int) -> None:
    """Wait until the copy has a signed version; no longer than it is worth waiting for the copy."""
    while (found := current(folder)) and found.version < version:
        time.sleep(LOOK_EVERY_S)  # the follower is another process, which tells its progress by a file alone


def write(folder: Path, confirmed: Confirmed) -> None:
    """Record a pass."""
    write_durably(folder / NAME, confirmed.model_dump_json(indent=1).encode())


def forget(folder: Path) -> None:
    """Record that nobody follows the round any more."""
    (folder / NAME).unlink(missing_ok=True)
