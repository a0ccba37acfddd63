"""The cores that this process may use, and the default number of engine threads.

- Two threads of one core share its arithmetic units, and count once. Cores that a container, a service's quota or
  `taskset` withholds do not count.
- An engine uses half of the cores: the owner may still use the machine. It uses four at most, since each further thread
  adds less speed (bench/RESULTS.md) and uses as much power.
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
    """Files of Linux with CPU topology and quotas."""

    cpu: Path = Path("/sys/devices/system/cpu")
    own_group: Path = Path("/proc/self/cgroup")
    groups: Path = Path("/sys/fs/cgroup")


LINUX = LinuxFiles()


def by_default(cores: int) -> int:
    """Return the default number of threads of an engine on the CPU."""
    return max(1, min(cores // 2, MOST))


def usable(files: LinuxFiles = LINUX, allowed: Collection[int] | None = None) -> int:
    """Return the number of cores that this process may use, at least one."""
    allowed = _allowed() if allowed is None else allowed
    topologies = [files.cpu / f"cpu{number}" / "topology" / "thread_siblings_list" for number in allowed]
    cores = {_text(topology) or str(topology) for topology in topologies}
    return max(1, min(_mac_cores() or len(cores), _quota(files) or len(cores)))


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _quota(files: LinuxFiles) -> int | None:
    """Return the CPU quota of this process's group in whole cores, if there is one."""
    group = re.search(r"^0::/(.*)$", _text(files.own_group), re.MULTILINE)
    said = _text(files.groups / group[1] / "cpu.max").split() if group else []
    return max(1, int(said[0]) // int(said[1])) if len(said) == 2 and said[0].isdigit() else None


def _mac_cores() -> int | None:
    """Return the number of Apple's performance cores; efficiency cores are for background work."""
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
