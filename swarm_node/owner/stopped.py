"""Record of why the last agent of a home ended, for an owner who returns to an idle machine.

- Written when an agent ends, for any reason; removed when one starts. A killed agent leaves no record, which `status`
  reports, too; neither does an agent on a full disk: its own error matters more than the record.
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
    """Record the end of the agent."""
    record: dict[str, Any] = {"at_ms": now_ms(), "said": said}
    if error is not None:
        record |= error.to_wire()
    with suppress(DiskFull):
        write_durably(home / FILE, json.dumps(record).encode(), temp_folder=home)


def forget(home: Path) -> None:
    """Remove the record when an agent starts."""
    (home / FILE).unlink(missing_ok=True)


def last(home: Path) -> dict[str, Any] | None:
    """Return the record; None if there is none, or it cannot be read."""
    try:
        record: dict[str, Any] = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record.get("at_ms"), int) else None
