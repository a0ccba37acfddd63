"""The outbox: what was put is there until it is removed, in order, and in portions that fit into a request."""

import os
from pathlib import Path

from protocol.ids import LeaseId
from swarm_node.work.outbox import Outbox

FIRST, SECOND, THIRD = (LeaseId(digit * 32) for digit in "cad")


def filled(folder: Path) -> Outbox:
    outbox = Outbox(folder)
    for second, lease_id in enumerate((FIRST, SECOND, THIRD)):
        outbox.put(lease_id, bytes(100))
        written_at(folder, second, lease_id)
    return outbox


def written_at(folder: Path, second: int, *leases: LeaseId) -> None:
    for lease_id in leases:
        os.utime(folder / f"{lease_id}.rollout", (second, second))


def test_the_oldest_come_first_whatever_their_names(tmp_path: Path) -> None:
    assert list(filled(tmp_path).waiting(2, 10_000)) == [FIRST, SECOND]


def test_those_of_one_tick_of_the_clock_come_by_name(tmp_path: Path) -> None:
    outbox = filled(tmp_path)
    written_at(tmp_path, 1, FIRST, SECOND, THIRD)
    assert list(outbox.waiting(3, 10_000)) == sorted((FIRST, SECOND, THIRD))


def test_large_rollouts_go_in_portions_that_fit(tmp_path: Path) -> None:
    assert list(filled(tmp_path).waiting(8, 250)) == [FIRST, SECOND]


def test_one_that_is_larger_than_the_portion_still_goes_alone(tmp_path: Path) -> None:
    assert list(filled(tmp_path).waiting(8, 10)) == [FIRST]


def test_a_new_start_finds_what_was_unsent_and_no_half_files(tmp_path: Path) -> None:
    filled(tmp_path).remove(FIRST)
    (tmp_path / "incoming" / "half").write_bytes(b"x")
    outbox = Outbox(tmp_path)
    assert set(outbox.waiting(8, 10_000)) == {SECOND, THIRD}
    assert len(outbox) == 2
    assert not list((tmp_path / "incoming").iterdir())


def test_putting_a_lease_twice_keeps_one(tmp_path: Path) -> None:
    outbox = filled(tmp_path)
    outbox.put(FIRST, b"again")
    assert len(outbox) == 3


def test_one_that_is_removed_while_the_folder_is_read_is_no_disk_error(tmp_path: Path) -> None:
    outbox = filled(tmp_path)
    (tmp_path / f"{'b' * 32}.rollout").symlink_to(tmp_path / "removed")  # listed, and not there
    assert list(outbox.waiting(8, 10_000)) == [FIRST, SECOND, THIRD]
