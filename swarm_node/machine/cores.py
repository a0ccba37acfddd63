"""The cores that this process may use, and how many of them an engine takes by itself.

- Two threads of one core share its arithmetic, and count once. What a container, a service's quota or `taskset` keeps
  from us is not there.
- An engine takes half of them: whoever lends a machine still sits at it. It takes four at most, since each further
  thread brings less (bench/RESULTS.md) and costs its electricity all the same.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

MOST = 4


class LinuxFiles(NamedTuple):
    """Where Linux tells."""

    cpu: Path = Path("/sys/devices/system/cpu")
    own_group: Path = Path("/proc/self/cgroup")
    groups: Path = Path("/sys/fs/cgroup")


LINUX = LinuxFiles()


def by_default(cores: int) -> int:
    """Threads of an engine that computes on the processor, where nobody has said how many."""
    return max(1, min(cores // 2, MOST))


def usable(files: LinuxFiles = LINUX, allowed: Collection[int] | None = None) -> int:
    """Cores that this process may use, at least one."""
    allowed = _allowed() if allowed is None else allowed
    topologies = [files.cpu / f"cpu{number}" / "topology" / "thread_siblings_list" for number in allowed]
    cores = {_text(topology) or str(topology) for topology in topologies}
    return max(1, min(_mac_cores() or len(cores), _quota(files) or len(cores)))


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _quota(files: LinuxFiles) -> int | None:
    """Whole cores' worth of time that this process's group may use, if there is a bound."""
    group = re.search(r"^0::/(.*)$", _text(files.own_group), re.MULTILINE)
    said = _text(files.groups / group[1] / "cpu.max").split() if group else []
    return max(1, int(said[0]) // int(said[1])) if len(said) == 2 and said[0].isdigit() else None


def _mac_cores() -> int | None:
    """Of Apple's cores the fast ones; the others are for what should not be noticed."""
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
