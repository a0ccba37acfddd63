"""Publishing: whole versions or none, the same again is harmless, and only what nobody needs is deleted."""

import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from coordinator.transactions import policy_versions
from protocol import limits
from protocol.errors import ManifestInvalid, OutOfOrder
from protocol.ids import ChunkId
from protocol.policy import chunks
from protocol.policy.manifest import FileEntry, PolicyManifest, Sampler, target_path
from protocol.work.learning import Publication, UploadedFile
from tests.coordinator.world import World, manifest
from tests.safetensors_files import file_of, next_file, policy_file, weights

KEEP = 2
C = 1024


class Press:
    """A publisher and its folder."""

    def __init__(self, folder: Path, now: datetime) -> None:
        self.folder = folder
        places = (folder / "keys", folder / "metadata", 600.0)
        self.metadata = SignedMetadata(*places) if places[1].exists() else SignedMetadata.create(*places, now)
        self.publisher = self.open()

    def open(self, *, patches: bool = True, room_bytes: int = 10**6, chunk_size_bytes: int = C) -> Publisher:
        return Publisher(
            folder=self.folder,
            metadata=self.metadata,
            task="arithmetic",
            sampler=Sampler(temperature=1.0, max_new_tokens=8),
            chunk_size_bytes=chunk_size_bytes,
            keep=KEEP,
            patches=patches,
            room_bytes=room_bytes,
        )

    def upload(self, version: int, files: dict[str, bytes]) -> Publication:
        folder = self.publisher.uploads / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        uploads = tuple(UploadedFile(path=name, digest=chunks.digest(data)) for name, data in files.items())
        return Publication(version=version, update=version - 1, files=uploads)

    def publish(self, version: int, files: dict[str, bytes]) -> PolicyManifest:
        made, digest = self.publisher.publish(self.upload(version, files))
        assert digest == chunks.digest(made.to_bytes())
        return made

    def signed(self, version: int) -> bool:
        """Return True if nodes can see this version."""
        return target_path(version) in self.metadata._current()[2].targets

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
    first, second = press.publish(1, {"f.model": b"1"}), press.publish(2, {"f.model": b"2"})
    assert first.parent is None
    assert second.parent == chunks.digest(first.to_bytes())


def test_a_damaged_upload_is_not_published(press: Press) -> None:
    publication = press.upload(1, {"f.model": b"whole"})
    (press.publisher.uploads / "1" / "f.model").write_bytes(b"whol")
    with pytest.raises(ManifestInvalid, match="damaged"):
        press.publisher.publish(publication)
    assert press.metadata.read(target_path(1)) is None


def test_a_file_that_was_never_uploaded_is_named(press: Press) -> None:
    publication = press.upload(1, {"f.model": b"1"})
    (press.publisher.uploads / "1" / "f.model").unlink()
    with pytest.raises(ManifestInvalid, match=r"f\.model was not uploaded"):
        press.publisher.publish(publication)


def test_publishing_the_same_again_gives_the_same_bytes(press: Press) -> None:
    files = {"a.model": bytes(3 * C), "b.model": b"b.model"}
    first = press.publish(1, files)
    before = {path: path.stat().st_mtime_ns for path in press.publisher.blobs.glob("??/*")}
    assert press.publish(1, files) == first
    assert {path: path.stat().st_mtime_ns for path in press.publisher.blobs.glob("??/*")} == before


def test_what_did_not_change_is_stored_once(press: Press) -> None:
    common = bytes(range(256)) * 4
    press.publish(1, {"model.model": common + b"1", "tokenizer.json": b"{}"})
    press.publish(2, {"model.model": common + b"2", "tokenizer.json": b"{}"})
    assert len(press.blobs()) == 4


def test_chunks_of_versions_in_use_are_kept_and_older_ones_deleted(press: Press) -> None:
    wanted = {
        version: press.publish(version, {"f.model": b"%d" % version, "g.model": b"same"}) for version in (1, 2, 3)
    }
    press.publisher.forget_old(3)
    assert press.blobs() == {*wanted[2].chunk_sizes(), *wanted[3].chunk_sizes()}
    assert press.publisher.read_file(2, "f.model") == b"2"
    assert press.publisher.read_file(3, "g.model") == b"same"
    assert [path.name for path in press.publisher.uploads.iterdir()] == ["3"]
    press.publisher.forget_old(3)
    assert press.publisher.read_file(3, "f.model") == b"3"


def test_an_upload_under_way_is_not_forgotten(press: Press) -> None:
    press.publish(1, {"f.model": b"1"})
    press.upload(2, {"f.model": b"2"})
    press.publisher.forget_old(1)
    assert {path.name for path in press.publisher.uploads.iterdir()} == {"1", "2"}


def test_what_is_not_published_cannot_be_read(press: Press) -> None:
    press.publish(1, {"f.model": b"1"})
    for version, name in ((1, "g.model"), (2, "f.model"), (1, "../keys/root.pem")):
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
        world.run(policy_versions.record, manifest(1, 0, task="other"), "f" * 64, now_ms=0)
    with pytest.raises(OutOfOrder, match="does not follow"):
        world.publish(3, 5)
    world.publish(2, 3)
    assert world.run(policy_versions.newest_version) == (2, 3)
    world.database.close()


MODEL = "model.safetensors"


def only(made: PolicyManifest) -> FileEntry:
    (entry,) = made.files
    return entry


def joiner_bytes(made: PolicyManifest) -> int:
    return sum(made.chunk_sizes_for(()).values())


def test_a_sparse_change_is_published_as_a_patch(press: Press) -> None:
    base = policy_file()
    new = next_file(base)
    first, second = press.publish(1, {MODEL: base}), press.publish(2, {MODEL: new})
    assert only(first).patches == ()
    (patch,) = only(second).patches
    assert patch.base_digest == chunks.digest(base)
    assert only(second).digest == chunks.digest(new)
    assert only(second).chunks == only(first).chunks
    assert sum(second.chunk_sizes_for({patch.base_digest}).values()) == patch.size_bytes < len(new) / 20
    assert press.publisher.read_file(2, MODEL) == new


def test_a_chain_is_read_to_its_end_and_a_newcomer_never_fetches_twice_the_file(press: Press) -> None:
    files = [policy_file()]
    for version in range(1, 2 * limits.PATCHES_MAX + 4):
        made = press.publish(version, {MODEL: files[-1]})
        assert press.publisher.read_file(version, MODEL) == files[-1]
        assert joiner_bytes(made) < 2 * len(files[-1])
        if version > 1:
            follower = made.chunk_sizes_for({chunks.digest(files[-2])})
            assert sum(follower.values()) < len(files[-1]) / 20, "who follows fetches a patch, at an anchor too"
        press.publisher.forget_old(version)
        files.append(next_file(files[-1], seed=version))
    anchors = [version for version in range(1, len(files)) if not only(found(press, version)).patches_after_anchor]
    assert anchors == [1, 1 + (limits.PATCHES_MAX + 1), 1 + 2 * (limits.PATCHES_MAX + 1)]


def test_larger_patches_bring_the_next_anchor_earlier(press: Press) -> None:
    """Patches of a fifth of the file each: a few of them would make a joining node fetch more than twice the file."""
    data = weights(1)
    lengths = []
    for version in range(1, 10):
        file = file_of({"t": ("BF16", data)})
        made = press.publish(version, {MODEL: file})
        assert joiner_bytes(made) < 2 * len(file)
        lengths.append(only(made).patches_after_anchor)
        data = weights(version + 1, len(data) // 10) + data[len(data) // 5 :]
    assert max(lengths) < limits.PATCHES_MAX
    assert lengths.count(0) > 1


def test_a_dense_change_is_published_in_full(press: Press) -> None:
    press.publish(1, {MODEL: file_of({"t": ("F32", Random(1).randbytes(40_000))})})
    dense = file_of({"t": ("F32", Random(2).randbytes(40_000))})
    made = press.publish(2, {MODEL: dense})
    assert only(made).patches == ()
    assert press.publisher.read_file(2, MODEL) == dense
    press.publish(3, {MODEL: next_file(dense)})
    assert press.publisher.read_file(3, MODEL) == next_file(dense)


def test_a_version_without_any_change_costs_nothing(press: Press) -> None:
    base = policy_file()
    first, second = press.publish(1, {MODEL: base}), press.publish(2, {MODEL: base})
    assert second.files == first.files
    third = press.publish(3, {MODEL: next_file(base)})
    assert len(only(third).patches) == 1


def test_a_policy_that_comes_back_to_an_earlier_one_is_published_in_full(press: Press) -> None:
    base = policy_file()
    for version, file in enumerate([base, next_file(base), base, next_file(base)], 1):
        press.publish(version, {MODEL: file})
        assert press.publisher.read_file(version, MODEL) == file


@pytest.mark.parametrize("harm", ["gone", "changed", "cut"])
def test_without_the_true_base_the_next_version_is_published_in_full(press: Press, harm: str) -> None:
    base = policy_file()
    press.publish(1, {MODEL: base})
    kept = press.publisher.uploads / "1" / MODEL
    if harm == "gone":
        kept.unlink()
    else:
        kept.write_bytes(next_file(base, seed=9) if harm == "changed" else base[:-2])
    made = press.publish(2, {MODEL: next_file(base)})
    assert only(made).patches == ()
    assert press.publisher.read_file(2, MODEL) == next_file(base)


def test_a_chain_with_a_lost_chunk_is_not_continued(press: Press) -> None:
    base = policy_file()
    made = press.publish(1, {MODEL: base})
    (press.publisher.blobs / chunks.blob_path(ChunkId(only(made).chunks[3]))).unlink()
    press.publish(2, {MODEL: next_file(base)})
    assert press.publisher.read_file(2, MODEL) == next_file(base)


@pytest.mark.parametrize("base", [b"", b"no tensors", b"\xff" * 5000])
def test_files_that_are_no_tensor_files_are_published_in_full(press: Press, base: bytes) -> None:
    press.publish(1, {MODEL: base})
    made = press.publish(2, {MODEL: policy_file()})
    assert only(made).patches == ()
    press.publish(3, {MODEL: base})
    assert press.publisher.read_file(3, MODEL) == base


def test_a_round_that_wants_no_patches_has_none(press: Press) -> None:
    press.publish(1, {MODEL: policy_file()})
    press.publisher = press.open(patches=False)
    made = press.publish(2, {MODEL: next_file(policy_file())})
    assert only(made).patches == ()


def test_an_adapter_is_patched_by_itself_and_the_model_below_it_costs_nothing(press: Press) -> None:
    model, adapter = policy_file(), policy_file(seed=5, elements=900)
    config = {"adapter_config.json": b"{}"}
    press.publish(1, config | {MODEL: model, "adapter_model.safetensors": adapter})
    tuned = next_file(adapter, share=0.05)
    made = press.publish(2, config | {MODEL: model, "adapter_model.safetensors": tuned})
    held = {chunks.digest(data) for data in (model, adapter, b"{}")}
    assert sum(made.chunk_sizes_for(held).values()) < len(adapter) / 2
    assert press.publisher.read_file(2, "adapter_model.safetensors") == tuned


def test_a_base_that_is_not_sent_again_costs_nobody_anything(press: Press) -> None:
    """A base that changes later is patched as if it had been sent each time."""
    base = policy_file()
    first = press.publish(1, {"model.safetensors": base, "adapter_model.safetensors": b"a" * 90})
    assert press.publisher.unchanged(1) == ()
    held = press.publisher.unchanged(2)
    assert {upload.path for upload in held} == {"model.safetensors", "adapter_model.safetensors"}
    sent = press.upload(2, {"adapter_model.safetensors": b"b" * 90})
    publication = sent.model_copy(update={"files": (*sent.files, *(one for one in held if one.path[0] == "m"))})
    press.publisher.publish(publication)
    press.publisher.forget_old(2)
    second, _ = press.publisher.publish(publication)  # as after a crash
    digests = {entry.digest for entry in first.files}
    assert list(second.chunk_sizes_for(digests).values()) == [90]
    assert press.publisher.read_file(2, "model.safetensors") == base
    third = press.publish(3, {"model.safetensors": next_file(base), "adapter_model.safetensors": b"c" * 90})
    assert next(entry for entry in third.files if entry.path == "model.safetensors").patches


def test_what_is_not_sent_and_has_changed_is_missed(press: Press) -> None:
    press.publish(1, {"a.model": b"one"})
    publication = press.upload(2, {"b.model": b"two"})
    other = UploadedFile(path="a.model", digest=chunks.digest(b"other"))
    with pytest.raises(ManifestInvalid, match="not uploaded"):
        press.publisher.publish(publication.model_copy(update={"files": (*publication.files, other)}))


def test_publishing_a_patch_again_gives_the_same_bytes_and_leaves_nothing_behind(press: Press) -> None:
    press.publish(1, {MODEL: policy_file()})
    second = press.publish(2, {MODEL: next_file(policy_file())})
    assert press.publish(2, {MODEL: next_file(policy_file())}) == second
    assert [path.name for path in (press.publisher.uploads / "2").iterdir()] == [MODEL]
    press.publisher.forget_old(2)
    assert press.blobs() == set(second.chunk_sizes())


def found(press: Press, version: int) -> PolicyManifest:
    made = press.publisher.manifest(version)
    assert made is not None
    return made


CRASHING = """
import os, signal, sys
from pathlib import Path
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata
from protocol.work.learning import Publication
from protocol.policy.manifest import Sampler

folder, left = Path(sys.argv[1]), int(sys.argv[2])
publisher = Publisher(
    folder=folder, metadata=SignedMetadata(folder / "keys", folder / "metadata", 600.0), task="arithmetic",
    sampler=Sampler(temperature=1.0, max_new_tokens=8), chunk_size_bytes=1024, keep=2,
)
def count(event, arguments):
    global left
    left -= event == "os.rename"
    if left < 0:
        left = sys.maxsize  # this is an event, too
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
publisher.publish(Publication.from_bytes((folder / "publication").read_bytes()))
"""


@pytest.mark.processes
def test_kill_9_before_any_file_gets_its_name_leaves_the_old_version_or_the_new(tmp_path: Path) -> None:
    """Killed before its first rename, before its second, and so on to the last; then published again."""
    first = Press(tmp_path / "first", utc_now())
    old, new = Random(1).randbytes(3 * C), Random(2).randbytes(3 * C + 7)
    first.publish(1, {"f.model": old})
    (first.folder / "publication").write_bytes(first.upload(2, {"f.model": new}).to_bytes())
    renames = 4 + 1 + 3  # chunks, manifest, and the three documents that are signed anew
    for left in range(renames + 1):
        folder = tmp_path / str(left)
        shutil.copytree(first.folder, folder)
        publish = [sys.executable, "-P", "-c", CRASHING, str(folder)]
        assert subprocess.run([*publish, str(left)]).returncode == (-signal.SIGKILL if left < renames else 0)
        press = Press(folder, utc_now())
        for path in press.publisher.blobs.glob("??/*"):
            chunks.verify(ChunkId(path.name), path.read_bytes())
        assert press.publisher.read_file(1, "f.model") == old
        assert len([version for version in (1, 2) if press.signed(version)]) == (2 if left == renames else 1)
        if left in (3, renames - 1):
            assert subprocess.run([*publish, str(sys.maxsize)]).returncode == 0
            assert press.publisher.read_file(2, "f.model") == new
            assert not (press.publisher.blobs / "incoming").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"filler.bin": b"1"}, "has a file filler.bin, which no engine reads"),
        ({"config.json": bytes(limits.POLICY_CONFIG_MAX_BYTES + 1)}, "are allowed"),
        ({"model.safetensors": bytes(limits.REPEATED_MIN_BYTES + 1)}, "of distinct chunks"),
    ],
    ids=["name", "size", "repeated"],
)
def test_what_nodes_would_refuse_is_not_signed(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    press = Press(tmp_path, utc_now())
    press.publisher = press.open(chunk_size_bytes=limits.MIB)
    with pytest.raises(ManifestInvalid, match=why):
        press.publish(1, files)
    assert press.metadata.read(target_path(1)) is None
