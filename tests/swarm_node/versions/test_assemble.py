"""Policy folders from chunks: whole, checked, and never outside their place."""

from pathlib import Path

import pytest

from protocol.errors import DiskFull, ManifestInvalid, UnknownChunk
from protocol.policy.chunks import chunk_id, digest, split
from protocol.policy.manifest import FileEntry
from swarm_node.chunks.blobs import BlobStore
from swarm_node.versions.assemble import assemble, find, folder_of, prune
from tests.swarm_node.p2p_world import manifest_of

CHUNK_SIZE = 8
# 0: no chunk · 1, c-1: one short · c: one full · c+1: full and short · many
SIZES = {"empty.json": 0, "one.json": 1, "short.json": 7, "full.json": 8, "more.json": 9, "model.safetensors": 100}
FILES = {name: bytes((size + at) % 251 for at in range(size)) for name, size in SIZES.items()}


def entry(name: str, data: bytes) -> FileEntry:
    chunks = tuple(chunk_id(piece) for piece in split(data, CHUNK_SIZE))
    return FileEntry(path=name, size_bytes=len(data), digest=digest(data), chunks=chunks)


MANIFEST = manifest_of(*(entry(name, data) for name, data in FILES.items()), chunk_size=CHUNK_SIZE)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    store = BlobStore(tmp_path / "blobs")
    store.clean()
    for data in FILES.values():
        for piece in split(data, CHUNK_SIZE):
            store.write(chunk_id(piece), piece)
    return store


def test_every_file_is_rebuilt_byte_for_byte(tmp_path: Path, blobs: BlobStore) -> None:
    folder = assemble(tmp_path / "policies", MANIFEST, blobs)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert list((tmp_path / "policies").iterdir()) == [folder]


def test_a_complete_folder_is_recognised_without_its_chunks(tmp_path: Path, blobs: BlobStore) -> None:
    assert find(tmp_path / "policies", MANIFEST) is None
    folder = assemble(tmp_path / "policies", MANIFEST, blobs)
    blobs.prune(())
    assert find(tmp_path / "policies", MANIFEST) == folder
    assert assemble(tmp_path / "policies", MANIFEST, blobs) == folder


@pytest.mark.parametrize("name", ["full.json", "model.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_folder_that_was_harmed_is_built_again(tmp_path: Path, blobs: BlobStore, name: str, harm: str) -> None:
    victim = assemble(tmp_path / "policies", MANIFEST, blobs) / name
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(FILES[name][:-1] + (b"\xff" if harm == "flip" else b""))
    assert find(tmp_path / "policies", MANIFEST) is None
    assert (assemble(tmp_path / "policies", MANIFEST, blobs) / name).read_bytes() == FILES[name]


def test_a_missing_chunk_leaves_no_folder(tmp_path: Path, blobs: BlobStore) -> None:
    blobs.path(chunk_id(FILES["model.safetensors"][8:16])).unlink()
    with pytest.raises(UnknownChunk):
        assemble(tmp_path / "policies", MANIFEST, blobs)
    assert list((tmp_path / "policies").iterdir()) == []


def test_a_manifest_whose_file_digest_is_a_lie_is_refused(tmp_path: Path, blobs: BlobStore) -> None:
    true = entry("model.safetensors", FILES["model.safetensors"])
    lie = true.model_copy(update={"digest": digest(b"another file")})
    with pytest.raises(ManifestInvalid, match="do not make the file"):
        assemble(tmp_path / "policies", manifest_of(lie, chunk_size=CHUNK_SIZE), blobs)
    assert list((tmp_path / "policies").iterdir()) == []


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/b", "a\\b", "..", ".", "", ".hidden"])
def test_path_tricks_are_refused_even_if_the_manifest_let_them_through(
    tmp_path: Path, blobs: BlobStore, path: str
) -> None:
    trick = entry("one.json", FILES["one.json"]).model_copy(update={"path": path})
    manifest = MANIFEST.model_copy(update={"files": (trick,)})
    with pytest.raises(ManifestInvalid, match="bare file name"):
        assemble(tmp_path / "policies", manifest, blobs)
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


def test_another_manifest_of_the_same_version_has_another_folder(tmp_path: Path) -> None:
    other = manifest_of(entry("one.json", b"?"), chunk_size=CHUNK_SIZE)
    assert folder_of(tmp_path, MANIFEST) != folder_of(tmp_path, other)


def test_prune_removes_old_versions_and_what_crashes_left(tmp_path: Path, blobs: BlobStore) -> None:
    policies = tmp_path / "policies"
    old = assemble(policies, MANIFEST, blobs)
    new = assemble(policies, manifest_of(*MANIFEST.files, version=2, chunk_size=CHUNK_SIZE), blobs)
    (policies / ".unfinished").mkdir()
    assert prune(policies, {new}) == 1
    assert not old.exists()
    assert list(policies.iterdir()) == [new]
    assert prune(tmp_path / "nowhere", ()) == 0


def test_what_others_put_among_the_versions_stays_and_is_no_obstacle(tmp_path: Path, blobs: BlobStore) -> None:
    """A file manager's notes, and the folder of a file system's own, which its user may not remove."""
    policies = tmp_path / "policies"
    old = assemble(policies, MANIFEST, blobs)
    (policies / ".DS_Store").touch()
    (policies / "lost+found").mkdir()
    (policies / "0-old").symlink_to(tmp_path)
    assert prune(policies, ()) == 1
    assert not old.exists()
    assert {path.name for path in policies.iterdir()} == {".DS_Store", "lost+found", "0-old"}


def test_a_disk_that_fills_up_while_assembling_leaves_nothing(tiny_disk: Path, tmp_path: Path) -> None:
    data = bytes(400_000)
    store = BlobStore(tmp_path / "blobs")
    manifest = manifest_of(entry("model.safetensors", data), chunk_size=CHUNK_SIZE)
    for piece in split(data, CHUNK_SIZE):
        store.write(chunk_id(piece), piece)
    with pytest.raises(DiskFull):
        assemble(tiny_disk / "policies", manifest, store)
    assert list((tiny_disk / "policies").iterdir()) == []
