"""Versions that come as patches: from an older folder, from nothing, and from what damage and crashes left."""

import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.errors import ManifestInvalid, PatchInvalid, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy import delta
from protocol.policy.chunks import chunk_id, digest, split
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest
from swarm_node.chunks.blobs import BlobStore
from swarm_node.versions.assemble import assemble, find, held_files, prune, restock
from tests.safetensors_files import next_file, policy_file
from tests.swarm_node.p2p_world import manifest_of

C = 1024
MODEL = "model.safetensors"
CONFIG = b"{}"

FILES = [policy_file()]
for seed in range(3):
    FILES.append(next_file(FILES[-1], seed=seed))
"""The model of versions 1 to 4."""


class Line:
    """Versions as a coordinator publishes them: version 1 in full, then patches."""

    def __init__(self, folder: Path) -> None:
        self.policies = folder / "policies"
        self.published = BlobStore(folder / "published")
        self.blobs = BlobStore(folder / "blobs")
        self.manifests = [self._manifest(number) for number in range(len(FILES))]

    def _cut(self, data: bytes) -> tuple[str, ...]:
        for piece in split(data, C):
            self.published.write(chunk_id(piece), piece)
        return tuple(chunk_id(piece) for piece in split(data, C))

    def _patch(self, base: bytes, new: bytes) -> Patch:
        patch = b"".join(delta.encode(base, new, base_digest=digest(base)))
        return Patch(
            base_digest=digest(base), base_size_bytes=len(base), size_bytes=len(patch), chunks=self._cut(patch)
        )

    def _manifest(self, number: int, *, anchor: int = 0) -> PolicyManifest:
        """The version's manifest; `anchor` says which file of its chain is there in full."""
        patches = tuple(self._patch(base, new) for base, new in pairwise(FILES[: number + 1]))
        model = FileEntry(
            path=MODEL,
            size_bytes=len(FILES[number]),
            digest=digest(FILES[number]),
            chunks=self._cut(FILES[anchor]),
            patches=patches,
            patches_after_anchor=number - anchor,
        )
        config = FileEntry(path="config.json", size_bytes=len(CONFIG), digest=digest(CONFIG), chunks=self._cut(CONFIG))
        return manifest_of(model, config, version=number + 1, chunk_size=C)

    def anchored(self, number: int) -> PolicyManifest:
        """Publish the version as an anchor: in full, and with its patches for those who follow."""
        return self._manifest(number, anchor=number)

    def fetch(self, manifest: PolicyManifest) -> int:
        """Fetch what this node lacks, as little as it can; how many bytes that was."""
        wanted = manifest.chunk_sizes_for(held_files(self.policies, manifest))
        missing = [ChunkId(chunk) for chunk in wanted if not self.blobs.has(ChunkId(chunk))]
        for chunk in missing:
            self.blobs.write(chunk, self.published.read(chunk))
        return sum(wanted[chunk] for chunk in missing)

    def make(self, manifest: PolicyManifest) -> Path:
        return assemble(self.policies, manifest, self.blobs, held_files(self.policies, manifest))

    def take(self, manifest: PolicyManifest) -> Path:
        self.fetch(manifest)
        return self.make(manifest)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_who_follows_fetches_one_patch_for_each_version(line: Line) -> None:
    assert line.fetch(line.manifests[0]) == len(FILES[0]) + len(CONFIG)
    line.make(line.manifests[0])
    for number in (1, 2, 3):
        assert line.fetch(line.manifests[number]) < len(FILES[0]) / 20
        folder = line.make(line.manifests[number])
        assert (folder / MODEL).read_bytes() == FILES[number]
        assert names(folder) == {MODEL, "config.json"}
    assert len(names(line.policies)) == 4


def test_who_begins_with_nothing_takes_the_anchor_and_all_patches(line: Line) -> None:
    folder = line.take(line.manifests[3])
    assert (folder / MODEL).read_bytes() == FILES[3]
    assert names(folder) == {MODEL, "config.json"}
    assert names(line.policies) == {folder.name}


def test_who_missed_versions_takes_the_patches_in_between(line: Line) -> None:
    line.take(line.manifests[0])
    line.blobs.prune(())
    assert line.fetch(line.manifests[3]) < len(FILES[0]) / 10
    assert (line.make(line.manifests[3]) / MODEL).read_bytes() == FILES[3]


def test_a_new_anchor_costs_a_follower_one_patch_and_gives_newcomers_one_more_source(line: Line) -> None:
    line.take(line.manifests[1])
    anchor = line.anchored(2)
    assert line.fetch(anchor) < len(FILES[0]) / 20
    folder = line.make(anchor)
    assert (folder / MODEL).read_bytes() == FILES[2]
    restock(folder, anchor, line.blobs)
    assert all(line.blobs.has(ChunkId(chunk)) for chunk in anchor.files[0].chunks)


def test_a_newcomer_at_an_anchor_takes_no_patch(line: Line) -> None:
    anchor = line.anchored(3)
    assert line.fetch(anchor) == len(FILES[3]) + len(CONFIG)
    assert (line.make(anchor) / MODEL).read_bytes() == FILES[3]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_harmed_base_is_no_base(line: Line, harm: str) -> None:
    """A base that went bad on the disk is found out before it is built upon, and the way from the anchor is taken."""
    victim = line.take(line.manifests[0]) / MODEL
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(FILES[0][:-1] + (b"\xff" if harm == "flip" else b""))
    line.blobs.prune(())
    assert line.fetch(line.manifests[1]) > len(FILES[0])
    assert (line.make(line.manifests[1]) / MODEL).read_bytes() == FILES[1]


def test_a_base_that_goes_bad_after_it_was_chosen_makes_no_folder(line: Line) -> None:
    base = line.take(line.manifests[0]) / MODEL
    line.fetch(line.manifests[1])
    chosen = held_files(line.policies, line.manifests[1])
    base.write_bytes(next_file(FILES[0], seed=99))
    with pytest.raises(PatchInvalid, match="does not become"):
        assemble(line.policies, line.manifests[1], line.blobs, chosen)
    assert len(names(line.policies)) == 1
    assert (line.take(line.manifests[1]) / MODEL).read_bytes() == FILES[1]


def test_the_base_is_never_written_to(line: Line) -> None:
    base = line.take(line.manifests[0]) / MODEL
    line.take(line.manifests[1])
    assert base.read_bytes() == FILES[0]
    assert base.stat().st_nlink == 1


def test_an_unchanged_file_is_shared_with_the_version_before_and_outlives_it(line: Line) -> None:
    old = line.take(line.manifests[0])
    new = line.take(line.manifests[1])
    assert (old / "config.json").samefile(new / "config.json")
    prune(line.policies, {new})
    assert (new / "config.json").read_bytes() == CONFIG
    assert find(line.policies, line.manifests[1]) == new


def test_an_unchanged_file_is_copied_where_it_cannot_be_shared(line: Line, tiny_disk: Path) -> None:
    """A file on another file system can have no second name on this one."""
    base = line.take(line.manifests[0])
    line.fetch(line.manifests[1])
    folder = assemble(
        tiny_disk / "policies", line.manifests[1], line.blobs, held_files(line.policies, line.manifests[1])
    )
    assert (folder / "config.json").read_bytes() == CONFIG
    assert (folder / MODEL).read_bytes() == FILES[1]
    assert (base / "config.json").stat().st_nlink == 1


def test_a_patch_mixed_in_from_another_version_is_refused(line: Line) -> None:
    """The manifest would have to be signed by the coordinator; the bytes contradict it all the same."""
    line.take(line.manifests[0])
    model, config = line.manifests[1].files
    stranger = line.manifests[2].files[0].patches[1]
    mixed = model.patches[0].model_copy(update={"size_bytes": stranger.size_bytes, "chunks": stranger.chunks})
    manifest = manifest_of(model.model_copy(update={"patches": (mixed,)}), config, version=2, chunk_size=C)
    line.fetch(manifest)
    with pytest.raises(PatchInvalid, match="made for the base"):
        line.make(manifest)


def test_a_patch_that_makes_another_file_than_the_manifest_says_is_refused(line: Line) -> None:
    line.take(line.manifests[0])
    model, config = line.manifests[1].files
    for lie, size in ((digest(b"another file"), len(FILES[1])), (model.digest, len(FILES[1]) - 1)):
        manifest = manifest_of(
            model.model_copy(update={"digest": lie, "size_bytes": size}), config, version=2, chunk_size=C
        )
        line.fetch(manifest)
        with pytest.raises(ManifestInvalid):
            line.make(manifest)


def test_a_missing_chunk_of_a_patch_leaves_no_folder(line: Line) -> None:
    line.take(line.manifests[0])
    line.fetch(line.manifests[1])
    line.blobs.path(ChunkId(line.manifests[1].files[0].patches[0].chunks[0])).unlink()
    with pytest.raises(UnknownChunk):
        line.make(line.manifests[1])
    assert len(names(line.policies)) == 1


BUILDER = """
import sys
from pathlib import Path
from protocol.policy.manifest import PolicyManifest
from swarm_node.versions import assemble
from swarm_node.chunks.blobs import BlobStore

policies, blobs, manifest = Path(sys.argv[1]), BlobStore(Path(sys.argv[2])), Path(sys.argv[3]).read_bytes()
manifest = PolicyManifest.from_bytes(manifest)
def stop(event, arguments):
    if event == "os.rename":
        print(sorted(path.name for path in Path(arguments[0]).iterdir()), flush=True)
        sys.stdin.read()
sys.addaudithook(stop)
assemble.assemble(policies, manifest, blobs, assemble.held_files(policies, manifest))
"""


@pytest.mark.processes
def test_kill_9_between_patching_and_renaming_leaves_base_and_chunks_to_go_on_with(line: Line, tmp_path: Path) -> None:
    base = line.take(line.manifests[0])
    line.fetch(line.manifests[1])
    (tmp_path / "manifest").write_bytes(line.manifests[1].to_bytes())
    places = [line.policies, line.blobs.root, tmp_path / "manifest"]
    command = [sys.executable, "-c", BUILDER, *map(str, places)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == f"{['config.json', MODEL]}\n"
        os.kill(builder.pid, signal.SIGKILL)
    assert find(line.policies, line.manifests[1]) is None
    assert len(names(line.policies)) == 2, "the base, and what was not finished"
    assert line.fetch(line.manifests[1]) == 0
    folder = line.make(line.manifests[1])
    assert (folder / MODEL).read_bytes() == FILES[1]
    prune(line.policies, {base, folder})
    assert names(line.policies) == {base.name, folder.name}


def test_an_unfinished_folder_is_no_base(line: Line) -> None:
    folder = line.take(line.manifests[0])
    shutil.move(folder, line.policies / ".unfinished-x")
    assert held_files(line.policies, line.manifests[1]) == {}
