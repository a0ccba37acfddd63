"""Durable files: a reader sees the old bytes or the new ones, and private ones are nobody else's."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.base.files import close_to_others, together, write_durably


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


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the umask, whatever the user that runs us has set."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_file_is_its_owners_alone_unless_it_is_public(tmp_path: Path) -> None:
    write_durably(tmp_path / "a" / "b" / "private", b"")
    assert [mode(path) for path in sorted((tmp_path / "a").rglob("*"))] == [0o700, 0o600]
    assert mode(tmp_path / "a") == 0o700
    write_durably(tmp_path / "c" / "d" / "public", b"", public=True)
    assert [mode(path) for path in sorted((tmp_path / "c").rglob("*"))] == [0o755, 0o644]
    assert mode(tmp_path / "c") == 0o755


@pytest.mark.usefixtures("umask")
def test_chunks_that_become_durable_together_are_for_everybody(tmp_path: Path) -> None:
    with together(tmp_path / "incoming") as batch:
        batch.add(tmp_path / "blobs" / "ab" / "chunk", b"")
    assert [mode(path) for path in sorted((tmp_path / "blobs").rglob("*"))] == [0o755, 0o644]


def test_a_public_file_replaced_by_a_private_one_is_private(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"old", public=True)
    write_durably(tmp_path / "file", b"secret")
    assert mode(tmp_path / "file") == 0o600


def test_what_others_could_look_into_is_closed_once_and_named(tmp_path: Path) -> None:
    for name in ("public", "metadata", "blobs", "learner", "empty", "strict"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)  # whatever the umask
    (tmp_path / "strict").chmod(0o500)
    (tmp_path / "state.db").touch()
    (tmp_path / "state.db").chmod(0o644)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "public")
    assert close_to_others(tmp_path) == ["empty", "learner", "state.db"]
    assert close_to_others(tmp_path) == []
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {
        "public": 0o755, "metadata": 0o755, "blobs": 0o755, "elsewhere": 0o755,
        "learner": 0o700, "empty": 0o700, "strict": 0o500, "state.db": 0o600,
    }  # fmt: skip


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_durably(target, b"a file cannot replace a folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    assert (target / "inside").is_dir()
