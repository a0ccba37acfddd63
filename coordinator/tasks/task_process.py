"""A task process: its functions or its environment, its limits, its environment variables, and its messages.

A message is JSON after its length; a question is followed by its answer.

to the child    {"functions": [[place, weight], …], "environment": null or [place, parameters], "memory_mib", "sandbox"}
                                                                                   once
                {"problem", "completions", "tokens", "timeout_s"}                  for each group to judge, or
                {"problem", "key", "turns": [[text, …] or null, …], "over", "timeout_s"}  for each turn of a group
from the child  {"ready": true, "missing": […]} or {"error": "…"}                  once
                {"rewards": [[score, status, components, weight, skip], …]} or {"error": "…"}, or
                {"episodes": [{"read": [text or messages, …], "reward": null or such a list} or null, …]}, or
                {"down": "…", "hint": "…"}  if nothing can be judged for now
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.tasks.sandbox import Sandbox
from protocol import limits
from protocol.tasks import Reward

LENGTH = struct.Struct(">I")

ANSWER_MAX_BYTES = limits.MIB
"""The largest answer; 64 samples with a dozen components need a hundredth of it."""


def pack(value: Any) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return LENGTH.pack(len(data)) + data


def reward_to(reward: Reward) -> list[Any]:
    return [reward.score, reward.status, dict(reward.components), reward.weight, reward.skip]


SEEN = {
    "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TEMP", "TMP", "TMPDIR", "TZ", "USER",
    "VIRTUAL_ENV", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
}  # fmt: skip
SEEN_PREFIXES = ("CUDA_", "LC_", "PYTHON", "XDG_", "SWARM_CODE_", "SWARM_JUDGE_")
"""The variables that libraries need to find their files. A list of secret variables would never be complete."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class TaskProcessSpec:
    """The functions by their places with their weights, and the limits of a process."""

    functions: tuple[tuple[str, float], ...]
    timeout_s: float = 10.0
    """The time limit for all completions of one group."""
    processes: int = 2
    memory_mib: int = 4096
    variables: tuple[str, ...] = ()
    """Further environment variables that the functions need."""
    environment: tuple[str, Mapping[str, Any]] | None = None
    """The place of the environment's class, and its parameters, if the samples are episodes."""
    sandbox: Sandbox | None = field(default_factory=Sandbox)
    """The sandbox; None for a bench that compares."""

    @property
    def files(self) -> set[Path]:
        """The operator's files that the functions and the environment are loaded from."""
        places = [place for place, _ in self.functions] + ([self.environment[0]] if self.environment else [])
        return {Path(file) for file, _, _ in (place.rpartition(":") for place in places) if file.endswith(".py")}

    def for_child(self, scratch: Path) -> dict[str, Any]:
        return {
            "functions": [list(each) for each in self.functions],
            "environment": list(self.environment) if self.environment else None,
            "memory_mib": self.memory_mib,
            "sandbox": self.sandbox and self.sandbox.for_child(scratch),
        }

    def seen(self, environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
        """Return the part of `environment` that a process gets."""
        wanted = {*SEEN, *self.variables}
        ours = {name: value for name, value in environment.items() if name in wanted or name.startswith(SEEN_PREFIXES)}
        return ours | ONE_THREAD | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch))
