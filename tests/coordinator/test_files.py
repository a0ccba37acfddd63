"""Durable files: a reader sees the old bytes or the new ones, and private ones are nobody else's."""

import os
import stat
import threading
from pathlib import Path

import pytest

from coordinator.files import write_durably


def test_a_file_is_made_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_durably(path, b"data")
    assert path.read_bytes() == b"data"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    versions = [bytes([number]) * 100_000 for number in range(20)]
    write_durably(path, versions[0])

    def write() -> None:
        for data in versions:
            write_durably(path, data)

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(versions)
    assert path.read_bytes() == versions[-1]


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_private_file_is_its_owners_alone(tmp_path: Path, private: bool, mode: int) -> None:
    before = os.umask(0)
    try:
        write_durably(tmp_path / "file", b"", private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_public_file_replaced_by_a_private_one_is_private(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"old")
    write_durably(tmp_path / "file", b"secret", private=True)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_durably(target, b"a file cannot replace a folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    assert (target / "inside").is_dir()
