"""Users of a machine, by the files and words of several.

Cores of a processor, and how many an engine takes by itself, by the files of several machines.
"""

import os
import time
from pathlib import Path

import pytest

from swarm_node.machine import use


def write(folder: Path, **lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, line in lines.items():
        (folder / name).write_text(f"{line}\n")


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}, "AC": {"type": "Mains"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
    ],
)
def test_a_laptop_on_battery_is_told_from_one_that_is_plugged_in_and_from_a_mouse(
    tmp_path: Path, supplies: dict[str, dict[str, str]], on_battery: bool
) -> None:
    for name, lines in supplies.items():
        write(tmp_path / name, **lines)
    assert use.on_battery(tmp_path) is on_battery


def test_a_system_without_power_supplies_tells_nothing(tmp_path: Path) -> None:
    assert use.on_battery(tmp_path / "none") is None


def test_the_last_key_on_any_terminal_counts(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    for name, idle_s in (("pts/0", 900), ("pts/3", 120), ("tty1", 5000), ("ttyS0x", 3600), ("null", 0)):
        path = tmp_path / name
        path.touch()
        os.utime(path, (time.time() - idle_s, time.time()))
    found = use.idle_s(tmp_path)
    assert found is not None
    assert 119 <= found < 900


def test_desktops_tell_more_than_terminals() -> None:
    away = "Type=wayland\nState=active\nIdleHint=yes\nIdleSinceHint=1000000000\n"
    here = "Type=x11\nState=active\nIdleHint=no\nIdleSinceHint=0\n"
    terminal = "Type=tty\nState=active\nIdleHint=no\nIdleSinceHint=0\n"
    closing = "Type=x11\nState=closing\nIdleHint=no\n"
    assert use.session_idle_s([away, terminal], now_s=1060.0) == 60.0
    assert use.session_idle_s([away, here], now_s=1060.0) == 0.0
    assert use.session_idle_s([terminal, closing, "", "junk"], now_s=1060.0) is None


def test_heat_is_the_hottest_sensor_of_the_processor_and_watts_are_what_the_chips_draw(tmp_path: Path) -> None:
    write(tmp_path / "hwmon0", name="k10temp", temp1_input="61500", temp2_input="70000", temp1_max="95000")
    write(tmp_path / "hwmon1", name="amdgpu", temp1_input="52000", power1_average="31000000")
    write(tmp_path / "hwmon2", name="nvme", temp1_input="99000")
    assert use.heat(tmp_path) == use.Heat(70.0, 31.0)
    assert use.heat(tmp_path / "none") == use.Heat(None, None)


def test_memory_is_read_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n")
    assert use.memory_bytes(tmp_path / "meminfo") == (16384 * 1024, 8192 * 1024)
    total, _ = use.memory_bytes(tmp_path / "none")
    assert total


@pytest.mark.parametrize(
    ("version", "wsl"),
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@buildkit) #1 SMP", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP", False),
    ],
)
def test_wsl_is_told_from_linux_by_its_kernel(tmp_path: Path, version: str, wsl: bool) -> None:
    (tmp_path / "version").write_text(version)
    assert use.is_wsl(tmp_path / "version") is wsl


def test_a_system_without_proc_is_no_wsl_and_reports_nothing(tmp_path: Path) -> None:
    """Many of these files are missing in WSL 2 and in small containers."""
    missing = tmp_path / "none"
    assert use.is_wsl(missing) is False
    assert use.on_battery(missing) is None
    assert use.heat(missing) == use.Heat()
    assert use.memory_bytes(missing)[1] is None


def machine(root: Path, siblings: list[str], *, quota: str = "", group: str = "/") -> use.LinuxFiles:
    """Write Linux's files of a processor with these threads on each core, below a limit of containers or services."""
    cpu = root / "cpu"
    for core in siblings:
        first, _, last = core.partition("-")
        for number in range(int(first), int(last or first) + 1):
            topology = cpu / f"cpu{number}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{core}\n")
    folder = root / "cgroup" / group.lstrip("/")
    folder.mkdir(parents=True)
    if quota:
        (folder / "cpu.max").write_text(f"{quota}\n")
    (root / "own").write_text(f"0::{group}\n")
    return use.LinuxFiles(cpu, root / "own", root / "cgroup")


@pytest.mark.parametrize(
    ("siblings", "allowed", "physical", "threads"),
    [
        (["0", "1"], range(2), 2, 1),
        (["0-1", "2-3"], range(4), 2, 1),
        (["0", "1", "2"], range(3), 3, 1),
        (["0-1", "2-3", "4-5", "6-7"], range(8), 4, 2),
        ([f"{2 * core}-{2 * core + 1}" for core in range(16)], range(32), 16, 4),
        ([f"{2 * core}-{2 * core + 1}" for core in range(16)], range(6), 3, 1),
    ],
    ids=["two", "two with siblings", "three", "four", "sixteen", "three of sixteen by taskset"],
)
def test_an_engine_takes_half_of_the_cores_and_four_at_most(
    tmp_path: Path, siblings: list[str], allowed: range, physical: int, threads: int
) -> None:
    found = use.usable_cores(machine(tmp_path, siblings), allowed)
    assert found == physical
    assert use.default_threads(found) == threads


@pytest.mark.parametrize(
    ("quota", "group", "physical"),
    [("max 100000", "/", 8), ("400000 100000", "/", 4), ("150000 100000", "/system.slice/node.service", 1)],
    ids=["none", "a container of four", "a service with a CPUQuota of 150 %"],
)
def test_a_quota_counts_as_so_many_cores(tmp_path: Path, quota: str, group: str, physical: int) -> None:
    files = machine(tmp_path, [str(core) for core in range(8)], quota=quota, group=group)
    assert use.usable_cores(files, range(8)) == physical


def test_a_system_that_tells_nothing_counts_what_python_does(tmp_path: Path) -> None:
    assert use.usable_cores(use.LinuxFiles(tmp_path, tmp_path, tmp_path), range(5)) == 5


def test_this_machine_has_a_core_and_lets_an_engine_have_one() -> None:
    assert 1 <= use.default_threads(use.usable_cores()) <= use.usable_cores()
