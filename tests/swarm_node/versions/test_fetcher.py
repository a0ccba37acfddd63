"""A version that does not fit on the disk is refused before it is fetched, and taken once it does."""

import re
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol import limits
from protocol.policy.chunks import chunk_id, digest
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest
from swarm_node.versions.fetcher import needed_bytes
from tests.swarm_node.p2p_world import PATIENT_SECONDS, Version, make_version, manifest_of
from tests.swarm_node.versions.test_follower import CHILD, Round

CHUNK = 1000


def file(name: str, *sizes: int, anchor: int = 0, patch_bytes: int = 30) -> FileEntry:
    """A file that came over files of these sizes, each made by a patch; `anchor` says which one is there in full."""
    digests = [digest(f"{name} {number}".encode()) for number in range(len(sizes))]
    patches = tuple(
        Patch(base_digest=base, base_size_bytes=size, size_bytes=patch_bytes, chunks=(chunk_id(base.encode()),))
        for base, size in zip(digests[:-1], sizes[:-1], strict=True)
    )
    count = -(-sizes[anchor] // CHUNK)
    return FileEntry(
        path=name,
        size_bytes=sizes[-1],
        digest=digests[-1],
        chunks=tuple(chunk_id(f"{name} {number}".encode()) for number in range(count)),
        patches=patches,
        patches_after_anchor=len(patches) - anchor,
    )


def needs(*files: FileEntry, held: dict[str, Path] | None = None, missing: int = 0) -> int:
    return needed_bytes(manifest_of(*files, chunk_size=CHUNK), held or {}, missing)


def test_a_whole_version_needs_its_chunks_and_its_files() -> None:
    assert needs(file("a", 5000), file("b", 700), missing=5700) == 2 * 5700


def test_chunks_that_are_here_take_no_room_again() -> None:
    assert needs(file("a", 5000), missing=1000) == 6000


def test_a_patch_needs_room_for_itself_and_for_the_new_file() -> None:
    """The file that is patched belongs to the version before, and stays; the patch is unpacked beside its chunk."""
    changed = file("a", 5000, 5200)
    (base, _) = changed.sizes()
    assert needs(changed, held={base: Path("before")}, missing=30) == 30 + 30 + 5200


def test_a_file_that_is_the_same_needs_nothing() -> None:
    same = file("a", 5000)
    assert needs(same, file("b", 300), held={same.digest: Path("before")}, missing=300) == 2 * 300


def test_of_a_chain_of_patches_two_files_are_there_at_a_time() -> None:
    """The anchor and its successor, 4000 + 6000 with the patch between; then that one and the last, 6000 + 5000."""
    assert needs(file("a", 4000, 6000, 5000), missing=4060) == 4060 + 30 + 6000 + 5000


def test_the_files_of_a_version_are_finished_one_after_the_other() -> None:
    """Both anchors grow while chunks come; then the first is patched beside the second, and then the second."""
    assert needs(file("a", 4000, 4000), file("b", 9000, 9000), missing=0) == 4000 + 9000 + 30 + 9000


def enormous() -> PolicyManifest:
    """Return a version as large as may be that names one file's worth of chunks: together more than a disk holds."""
    most = limits.MANIFEST_MAX_CHUNKS * limits.CHUNK_MAX_BYTES
    names = tuple(f"{number:064x}" for number in range(limits.MANIFEST_MAX_CHUNKS))
    whole = FileEntry(path="0.safetensors", size_bytes=most, digest="0" * 64, chunks=names)
    grown = (file(f"{number}.safetensors", 1, most) for number in range(1, limits.REPEATED_FACTOR_MAX))
    return manifest_of(whole, *grown, chunk_size=limits.CHUNK_MAX_BYTES, version=2)


def everything_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.trio
async def test_a_manifest_that_names_impossible_sizes_is_refused_early_and_costs_nothing_that_is_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_version(2)
    here = Round(first, CHILD)
    follower = here.follower(tmp_path)
    await follower._follow()
    held, plans, ready = everything_in(tmp_path), here.plans, follower.ready
    here.publish(Version(enormous(), {}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        with trio.fail_after(PATIENT_SECONDS):
            while follower.trouble.error is None:
                await wait_all_tasks_blocked(0.01)
            assert re.match(
                r"Version 2 needs [0-9.]+ TB of disk space, but only .* are free", str(follower.trouble.error)
            )
            assert (follower.usable_now(), follower.fetcher.download) == (ready, None), "work goes on with what is here"
            assert here.plans == plans, "nobody was asked for any of it"
            assert everything_in(tmp_path) == held
            here.publish(third := make_version(3, seed=3))
            follower.hint(follower.newest + 1)
            while follower.ready is None or follower.ready.manifest != third.manifest:
                await follower._changed.wait()
            while follower.trouble.error is not None:
                await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    assert caplog.text.count("cannot store the new version") == 1, "said once, not each time that it is tried"
