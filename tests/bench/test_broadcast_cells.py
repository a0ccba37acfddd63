"""The cells of the broadcast bench: their names, their links, and the bound that no scheme beats."""

from dataclasses import replace

import pytest

from bench.broadcast.cells import MBIT, MIB, PAYLOAD_SHARE, Cell, Link, fluid_bound_s, parse
from bench.broadcast.paper import completion_s


def test_a_cell_is_read_from_its_name() -> None:
    cell = parse("8:3:mixed", worker_mbit_s=20, size_bytes=MIB)
    assert cell == Cell(workers=8, source_factor=3, links="mixed", worker_mbit_s=20, size_bytes=MIB)
    assert cell.name == "8:3:mixed"
    assert cell.source_link == Link(60 * MBIT, 60 * MBIT)
    assert parse("8:3:mixed:0.5", worker_mbit_s=20, size_bytes=7) == replace(cell, size_bytes=MIB // 2)


def test_a_cell_behind_nat_says_of_how_many_workers() -> None:
    half = parse("8:3:uniform:nat", worker_mbit_s=20, size_bytes=MIB)
    assert half.name == "8:3:uniform:nat"
    assert [half.is_behind_nat(number) for number in range(1, 9)] == [False, True] * 4
    more = parse("8:3:uniform:nat75:0.5", worker_mbit_s=20, size_bytes=7)
    assert (more.name, more.size_bytes) == ("8:3:uniform:nat75", MIB // 2)
    assert sum(map(more.is_behind_nat, range(1, 9))) == 6
    without = parse("8:3:uniform", worker_mbit_s=20, size_bytes=MIB)
    assert not any(map(without.is_behind_nat, range(1, 9)))
    assert half.bound_s == without.bound_s
    assert completion_s(half) == completion_s(without), "on paper everybody feeds everybody"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8:3",
        "8:3:odd",
        "0:3:uniform",
        "201:3:uniform",
        "8:0:mixed",
        "a:3:mixed",
        "8:3:mixed:natx",
        "8:3:mixed:nat101",
        "8:3:mixed:32:nat",
        *(f"8:3:mixed:{mib}" for mib in ("", "0", "-1", "x", "nan", "inf", "1:1")),
    ],
)
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"workers|write"):
        parse(text, worker_mbit_s=20, size_bytes=MIB)


def test_mixed_links_take_half_one_and_two_uplinks_in_turns_below_a_double_downlink() -> None:
    links = parse("4:8:mixed", worker_mbit_s=10, size_bytes=MIB).worker_links
    assert [link.up_bit_s / MBIT for link in links] == [5, 10, 20, 5]
    assert {link.down_bit_s / MBIT for link in links} == {20}


@pytest.mark.parametrize(
    ("source", "up", "down", "workers", "seconds"),
    [
        (1, 10, 10, 2, 100),  # the source must send everything once
        (8, 10, 4, 3, 25),  # the slowest must receive everything
        (3, 1, 100, 9, 75),  # all uplinks together must carry it nine times
        (8, 1, 1, 1, 100),  # one worker: its own link
    ],
)
def test_the_bound_is_the_tightest_of_three(
    source: float, up: float, down: float, workers: int, seconds: float
) -> None:
    assert fluid_bound_s(100, Link(source, source), [Link(up, down)] * workers) == pytest.approx(seconds)


def test_the_bound_of_a_cell_counts_bits_not_bytes() -> None:
    cell = parse("4:8:uniform", worker_mbit_s=20, size_bytes=2_500_000)
    assert cell.bound_s == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["4:8:mixed", "8:3:uniform", "16:8:mixed"])
def test_links_are_slowed_until_all_workers_together_receive_what_the_cores_can_bear(name: str) -> None:
    cell = parse(name, worker_mbit_s=20, size_bytes=MIB)
    assert cell.together_mbit_s > 80
    slower = cell.within(80)
    assert slower.together_mbit_s == pytest.approx(80)
    assert slower.bound_s == pytest.approx(slower.workers * 8 * MIB / (80 * MBIT))
    assert slower.within(100) == slower


def test_a_cell_on_paper_takes_a_little_longer_than_its_bound_over_what_tcp_leaves() -> None:
    cell = parse("4:3:mixed", worker_mbit_s=20, size_bytes=32 * MIB)
    assert 1.0 <= completion_s(cell) * PAYLOAD_SHARE / cell.bound_s <= 1.25
