"""What reward processes run and may take."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardSpec:
    """Functions by their places, how much each counts, and the bounds of a process."""

    functions: tuple[tuple[str, float], ...]
    timeout_s: float = 10.0
    """For all completions of one group."""
    processes: int = 2
    memory_mib: int = 4096

    def for_child(self) -> dict[str, Any]:
        return {"functions": [list(each) for each in self.functions], "memory_mib": self.memory_mib}
