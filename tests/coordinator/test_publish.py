"""Publishing: whole versions or none, the same again is harmless, and only what nobody needs is deleted."""

from datetime import datetime
from pathlib import Path

import pytest

from coordinator import publish
from coordinator.publish import Publisher
from coordinator.signed_metadata import SignedMetadata, utc_now
from protocol import chunks
from protocol.errors import ManifestInvalid, OutOfOrder
from protocol.ids import ChunkId
from protocol.learning import Publication, Upload
from protocol.manifest import PolicyManifest, Sampler, target_path
from tests.coordinator.world import World, manifest

KEEP = 2
C = 1024


class Press:
    """A publisher and its folder."""

    def __init__(self, folder: Path, now: datetime) -> None:
        self.folder = folder
        self.metadata = SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, now)
        self.publisher = Publisher(
            folder=folder,
            metadata=self.metadata,
            task="arithmetic",
            sampler=Sampler(temperature=1.0, max_new_tokens=8),
            chunk_size_bytes=C,
            keep=KEEP,
        )

    def upload(self, version: int, files: dict[str, bytes]) -> Publication:
        folder = self.publisher.uploads / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        uploads = tuple(Upload(path=name, digest=chunks.digest(data)) for name, data in files.items())
        return Publication(version=version, update=version - 1, files=uploads)

    def publish(self, version: int, files: dict[str, bytes]) -> PolicyManifest:
        made, digest = self.publisher.publish(self.upload(version, files))
        assert digest == chunks.digest(made.to_bytes())
        return made

    def blobs(self) -> set[str]:
        return {path.name for path in self.publisher.blobs.glob("??/*")}


@pytest.fixture
def press(tmp_path: Path) -> Press:
    return Press(tmp_path, utc_now())


@pytest.mark.parametrize("size_bytes", [0, 1, C - 1, C, C + 1, 3 * C + 7])
def test_a_file_of_any_size_can_be_put_together_again(press: Press, size_bytes: int) -> None:
    data = bytes(number % 251 for number in range(size_bytes))
    made = press.publish(1, {"model.safetensors": data})
    assert press.publisher.read_file(1, "model.safetensors") == data
    assert press.publisher.manifest(1) == made
    for name, size in made.chunk_sizes().items():
        chunk = press.publisher.read_chunk(ChunkId(name))
        assert chunk is not None
        assert len(chunk) == size
        chunks.verify(ChunkId(name), chunk)


def test_a_version_names_its_parent(press: Press) -> None:
    first, second = press.publish(1, {"f": b"1"}), press.publish(2, {"f": b"2"})
    assert first.parent is None
    assert second.parent == chunks.digest(first.to_bytes())


def test_a_damaged_upload_is_not_published(press: Press) -> None:
    publication = press.upload(1, {"f": b"whole"})
    (press.publisher.uploads / "1" / "f").write_bytes(b"whol")
    with pytest.raises(ManifestInvalid, match="damaged"):
        press.publisher.publish(publication)
    assert press.metadata.read(target_path(1)) is None


def test_a_file_that_was_never_uploaded_is_named(press: Press) -> None:
    publication = press.upload(1, {"f": b"1"})
    (press.publisher.uploads / "1" / "f").unlink()
    with pytest.raises(ManifestInvalid, match="f"):
        press.publisher.publish(publication)


def test_publishing_the_same_again_gives_the_same_bytes(press: Press) -> None:
    files = {"a": bytes(3 * C), "b": b"b"}
    first = press.publish(1, files)
    before = {path: path.stat().st_mtime_ns for path in press.publisher.blobs.glob("??/*")}
    assert press.publish(1, files) == first
    assert {path: path.stat().st_mtime_ns for path in press.publisher.blobs.glob("??/*")} == before


def test_what_did_not_change_is_stored_once(press: Press) -> None:
    common = bytes(range(256)) * 4
    press.publish(1, {"model": common + b"1", "tokenizer.json": b"{}"})
    press.publish(2, {"model": common + b"2", "tokenizer.json": b"{}"})
    assert len(press.blobs()) == 4


def test_chunks_of_versions_in_use_are_kept_and_older_ones_deleted(press: Press) -> None:
    wanted = {version: press.publish(version, {"f": b"%d" % version, "g": b"same"}) for version in (1, 2, 3)}
    press.publisher.forget_old(3)
    assert press.blobs() == {*wanted[2].chunk_sizes(), *wanted[3].chunk_sizes()}
    assert press.publisher.read_file(2, "f") == b"2"
    assert press.publisher.read_file(3, "g") == b"same"
    assert list(press.publisher.uploads.iterdir()) == []
    press.publisher.forget_old(3)
    assert press.publisher.read_file(3, "f") == b"3"


def test_an_upload_under_way_is_not_forgotten(press: Press) -> None:
    press.publish(1, {"f": b"1"})
    press.upload(2, {"f": b"2"})
    press.publisher.forget_old(1)
    assert [path.name for path in press.publisher.uploads.iterdir()] == ["2"]


def test_what_is_not_published_cannot_be_read(press: Press) -> None:
    press.publish(1, {"f": b"1"})
    for version, name in ((1, "g"), (2, "f"), (1, "../keys/root.pem")):
        with pytest.raises(ManifestInvalid):
            press.publisher.read_file(version, name)
    assert press.publisher.read_chunk(ChunkId("0" * 64)) is None


def test_dispatch_hears_of_a_version_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(1, 0)
    before = world.dump()
    world.publish(1, 0)
    assert world.dump() == before
    with pytest.raises(OutOfOrder, match="other content"):
        world.run(publish.record, manifest(1, 0, task="other"), "f" * 64, now_ms=0)
    with pytest.raises(OutOfOrder, match="does not follow"):
        world.publish(3, 5)
    world.publish(2, 3)
    assert world.run(publish.newest_version) == (2, 3)
    world.database.close()
