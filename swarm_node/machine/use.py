"""Use of this machine: user input, load, battery, heat, as far as readable without special rights; and its cores.

- Every unknown value is None; the caller decides what that means.
- Folders are arguments, so that a test can use the files of other machines.
- Two threads of one core share its arithmetic units, and count once. Cores that a container, a service's quota or
  `taskset` withholds do not count.
- An engine uses half of the cores: the owner may still use the machine. It uses four at most, since each further thread
  adds less speed (bench/RESULTS.md) and uses as much power.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

ASK_TIMEOUT_S = 5.0

SESSIONS_MAX = 16
"""Limit of sessions that are read; each starts a program."""


class Heat(NamedTuple):
    """Temperature and power of the CPU, for machines whose graphics card reports none."""

    celsius: float | None = None
    watts: float | None = None


def idle_s(dev: Path = Path("/dev")) -> float | None:
    """Return the seconds since the last user input, on the desktop or a terminal."""
    if sys.platform == "darwin":
        return _mac_idle_s()
    touched = [*_access_times(dev, "pts/[0-9]*"), *_access_times(dev, "tty[0-9]*")]
    session = _session_idle_s()
    known = [max(0.0, time.time() - max(touched))] if touched else []
    return min([*known, *([session] if session is not None else [])], default=None)


def others_load(own_threads: int) -> float | None:
    """Return the CPU load of other programs over the last minute, per CPU."""
    try:
        mean, *_ = os.getloadavg()
    except OSError:
        return None
    return max(0.0, mean - own_threads) / (os.cpu_count() or 1)


def is_wsl(version: Path = Path("/proc/version")) -> bool:
    """Return True in WSL, where Windows has the drivers, the user's input and the battery."""
    return "microsoft" in _text(version).lower()


def on_battery(supplies: Path = Path("/sys/class/power_supply")) -> bool | None:
    """Return True if this machine runs on battery; None if unknown."""
    if sys.platform == "darwin":
        said = _output_of(["pmset", "-g", "batt"])
        return None if said is None else "Battery Power" in said
    if not supplies.is_dir():
        return None
    kinds = {supply: _line(supply / "type") for supply in supplies.iterdir()}
    batteries = [supply for supply, kind in kinds.items() if kind == "Battery" and _line(supply / "scope") != "Device"]
    return any(_line(battery / "status") == "Discharging" for battery in batteries)


def heat(hwmon: Path = Path("/sys/class/hwmon")) -> Heat:
    """Return the highest temperature of the CPU's sensors, and its power if known."""
    celsius, watts = [], []
    if hwmon.is_dir():
        for chip in sorted(hwmon.iterdir()):
            if _line(chip / "name") in ("coretemp", "k10temp", "zenpower", "cpu_thermal", "amdgpu"):
                celsius += [value / 1000 for value in _numbers(chip, r"temp\d+_input")]
                watts += [value / 1e6 for value in _numbers(chip, r"power\d+_(average|input)")]
    return Heat(max(celsius, default=None), sum(watts) or None)


def memory_bytes(info: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """Return the total and the available memory."""
    values = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _text(info), re.MULTILINE))
    total, free = (int(values[key]) * 1024 if key in values else None for key in ("MemTotal", "MemAvailable"))
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, free


def _access_times(dev: Path, pattern: str) -> list[float]:
    times = []
    for path in dev.glob(pattern):
        try:
            times.append(path.stat().st_atime)
        except OSError:
            continue
    return times


def _session_idle_s() -> float | None:
    """Return the idle time that desktops report to logind."""
    if not shutil.which("loginctl"):
        return None
    names = [
        line.split()[0]
        for line in (_output_of(["loginctl", "list-sessions", "--no-legend"]) or "").splitlines()
        if line
    ]
    wanted = [word for name in ("Type", "State", "IdleHint", "IdleSinceHint") for word in ("-p", name)]
    said = [_output_of(["loginctl", "show-session", name, *wanted]) or "" for name in names[:SESSIONS_MAX]]
    return session_idle_s(said, now_s=time.time())


def session_idle_s(sessions: Sequence[str], *, now_s: float) -> float | None:
    """Return the idle time of the least idle desktop; None without one: terminal sessions never report idle."""
    idle_times = []
    for session in sessions:
        session_values = dict(line.split("=", 1) for line in session.splitlines() if "=" in line)
        if session_values.get("Type") in ("x11", "wayland", "mir") and session_values.get("State") == "active":
            since_us = session_values.get("IdleSinceHint", "0")
            idle = session_values.get("IdleHint") == "yes" and since_us.isdigit()
            idle_times.append(max(0.0, now_s - int(since_us) / 1e6) if idle else 0.0)
    return min(idle_times, default=None)


def _mac_idle_s() -> float | None:
    match = re.search(r'"HIDIdleTime" = (\d+)', _output_of(["ioreg", "-c", "IOHIDSystem", "-d", "4"]) or "")
    return int(match[1]) / 1e9 if match else None


def _numbers(folder: Path, pattern: str) -> list[float]:
    lines = (_line(path) for path in sorted(folder.iterdir()) if re.fullmatch(pattern, path.name))
    return [float(line) for line in lines if re.fullmatch(r"-?\d+", line)]


def _line(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=ASK_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


THREADS_MOST = 4


class LinuxFiles(NamedTuple):
    """Files of Linux with CPU topology and quotas."""

    cpu: Path = Path("/sys/devices/system/cpu")
    own_group: Path = Path("/proc/self/cgroup")
    groups: Path = Path("/sys/fs/cgroup")


LINUX = LinuxFiles()


def default_threads(cores: int) -> int:
    """Return the default number of threads of an engine on the CPU."""
    return max(1, min(cores // 2, THREADS_MOST))


def usable_cores(files: LinuxFiles = LINUX, allowed: Collection[int] | None = None) -> int:
    """Return the number of cores that this process may use, at least one."""
    allowed = _allowed() if allowed is None else allowed
    topologies = [files.cpu / f"cpu{number}" / "topology" / "thread_siblings_list" for number in allowed]
    cores = {_line(topology) or str(topology) for topology in topologies}
    return max(1, min(_mac_cores() or len(cores), _quota(files) or len(cores)))


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _quota(files: LinuxFiles) -> int | None:
    """Return the CPU quota of this process's group in whole cores, if there is one."""
    group = re.search(r"^0::/(.*)$", _line(files.own_group), re.MULTILINE)
    said = _line(files.groups / group[1] / "cpu.max").split() if group else []
    return max(1, int(said[0]) // int(said[1])) if len(said) == 2 and said[0].isdigit() else None


def _mac_cores() -> int | None:
    """Return the number of Apple's performance cores; efficiency cores are for background work."""
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdigit() else None
