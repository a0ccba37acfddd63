"""Why the last agent of a home ended, for an owner who comes back to a machine that is idle.

- Written when an agent ends, whatever the reason; removed when one starts. A kill leaves nothing, which is told, too,
  and so does a disk that takes no more: what ends the agent is worth more than a note of it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import DiskFull, SwarmError
from swarm_node.base.clock import now_ms
from swarm_node.base.disk import write_durably

FILE = "stopped.json"


def record_end(home: Path, error: SwarmError | None, said: str = "") -> None:
    """The agent ends now."""
    told: dict[str, Any] = {"at_ms": now_ms(), "said": said}
    if error is not None:
        told |= error.to_wire()
    with suppress(DiskFull):
        write_durably(home / FILE, json.dumps(told).encode(), temp_folder=home)


def forget(home: Path) -> None:
    """An agent starts."""
    (home / FILE).unlink(missing_ok=True)


def last(home: Path) -> dict[str, Any] | None:
    """What was noted; None if nothing was, or it cannot be read."""
    try:
        told: dict[str, Any] = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told.get("at_ms"), int) else None
