"""Cores of a processor, and how many an engine takes by itself, by the files of several machines."""

from pathlib import Path

import pytest

from swarm_node.machine import cores


def machine(root: Path, siblings: list[str], *, quota: str = "", group: str = "/") -> cores.LinuxFiles:
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
    return cores.LinuxFiles(cpu, root / "own", root / "cgroup")


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
    found = cores.usable(machine(tmp_path, siblings), allowed)
    assert found == physical
    assert cores.by_default(found) == threads


@pytest.mark.parametrize(
    ("quota", "group", "physical"),
    [("max 100000", "/", 8), ("400000 100000", "/", 4), ("150000 100000", "/system.slice/node.service", 1)],
    ids=["none", "a container of four", "a service with a CPUQuota of 150 %"],
)
def test_a_quota_counts_as_so_many_cores(tmp_path: Path, quota: str, group: str, physical: int) -> None:
    files = machine(tmp_path, [str(core) for core in range(8)], quota=quota, group=group)
    assert cores.usable(files, range(8)) == physical


def test_a_system_that_tells_nothing_counts_what_python_does(tmp_path: Path) -> None:
    assert cores.usable(cores.LinuxFiles(tmp_path, tmp_path, tmp_path), range(5)) == 5


def test_this_machine_has_a_core_and_lets_an_engine_have_one() -> None:
    assert 1 <= cores.by_default(cores.usable()) <= cores.usable()
