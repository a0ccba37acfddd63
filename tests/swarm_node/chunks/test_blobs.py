"""The chunk store: only whole, verified chunks are ever in it or come out of it."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ChunkMismatch, DiskFull, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path, chunk_id
from swarm_node.base.disk import DiskFailed
from swarm_node.chunks.blobs import BlobStore

DATA = b"some bytes of a policy"
CHUNK = chunk_id(DATA)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    store = BlobStore(tmp_path / "blobs")
    store.clean()
    return store


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_what_is_written_can_be_read(blobs: BlobStore) -> None:
    assert not blobs.has(CHUNK)
    blobs.write(CHUNK, DATA)
    blobs.write(CHUNK, DATA)
    assert blobs.has(CHUNK)
    assert blobs.read(CHUNK) == DATA
    assert files_below(blobs.root) == [blobs.root / blob_path(CHUNK)] == [blobs.path(CHUNK)]


def test_bytes_under_a_false_name_are_not_written(blobs: BlobStore) -> None:
    with pytest.raises(ChunkMismatch):
        blobs.write(CHUNK, DATA + b"!")
    assert files_below(blobs.root) == []


def test_an_absent_chunk_has_a_name(blobs: BlobStore) -> None:
    with pytest.raises(UnknownChunk):
        blobs.read(CHUNK)


@pytest.mark.parametrize("bad", [b"", DATA[:-1], DATA[:-1] + b"?"])
def test_a_chunk_that_went_bad_on_the_disk_is_removed_and_can_be_fetched_again(blobs: BlobStore, bad: bytes) -> None:
    blobs.write(CHUNK, DATA)
    blobs.path(CHUNK).write_bytes(bad)
    with pytest.raises(UnknownChunk, match="was damaged"):
        blobs.read(CHUNK)
    assert not blobs.has(CHUNK)
    blobs.write(CHUNK, DATA)
    assert blobs.read(CHUNK) == DATA


def test_the_owner_removes_what_a_crash_left_and_a_reader_does_not(blobs: BlobStore) -> None:
    leftover = blobs.root / "incoming" / "tmp123"
    leftover.write_bytes(b"half a ch")
    BlobStore(blobs.root)
    assert leftover.exists()
    BlobStore(blobs.root).clean()
    assert not leftover.exists()


def test_a_store_whose_folder_was_removed_makes_it_again(blobs: BlobStore) -> None:
    shutil.rmtree(blobs.root)
    blobs.write(CHUNK, DATA)
    assert blobs.read(CHUNK) == DATA


def test_prune_keeps_only_what_it_is_told(blobs: BlobStore) -> None:
    many = {chunk_id(bytes([number])): bytes([number]) for number in range(20)}
    for chunk, data in many.items():
        blobs.write(chunk, data)
    keep = set(list(many)[::3])
    assert blobs.prune(keep) == 20 - len(keep)
    assert {ChunkId(path.name) for path in files_below(blobs.root)} == keep


def test_a_reader_of_a_folder_that_does_not_exist_yet_finds_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "later")
    assert not store.has(CHUNK)
    assert store.prune(()) == 0


def test_a_full_disk_has_a_name_a_next_step_and_leaves_no_half_file(tiny_disk: Path) -> None:
    blobs = BlobStore(tiny_disk / "blobs")
    blobs.clean()
    data = bytes(512 * 1024)
    with pytest.raises(DiskFull, match="Free some space"):
        blobs.write(chunk_id(data), data)
    assert files_below(tiny_disk) == []
    blobs.write(CHUNK, DATA)
    assert blobs.read(CHUNK) == DATA


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from protocol.policy.chunks import chunk_id
from protocol.errors import DiskFull
from swarm_node.chunks.blobs import BlobStore
from swarm_node.base.disk import DiskFailed
blobs = BlobStore(Path(sys.argv[1]))
blobs.clean()
try:
    blobs.write(chunk_id(bytes(100_000)), bytes(100_000))
except DiskFull:
    print("disk full, files left:", sum(path.is_file() for path in blobs.root.rglob("*")))
"""
    limited = subprocess.run(
        [sys.executable, "-P", "-c", script, tmp_path / "blobs"],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert limited.stdout == "disk full, files left: 0\n"


def test_a_disk_that_fails_for_another_reason_than_room_is_this_nodes_fault_by_name(blobs: BlobStore) -> None:
    blobs.path(CHUNK).parent.write_text("no folder")
    assert not blobs.has(CHUNK)
    with pytest.raises(UnknownChunk):
        blobs.read(CHUNK)
    with pytest.raises(DiskFailed, match=r"Disk error in .* \(Not a directory\)"):
        blobs.write(CHUNK, DATA)
    blobs.path(CHUNK).parent.unlink()
    blobs.path(CHUNK).mkdir(parents=True)
    with pytest.raises(DiskFailed, match="Is a directory"):
        blobs.read(CHUNK)
