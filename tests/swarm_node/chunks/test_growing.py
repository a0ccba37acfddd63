"""Files that grow while their chunks arrive: in any order, exactly the manifest's or not at all."""

from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
import trio

from protocol.errors import DiskFull, ManifestInvalid, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id, digest, split
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore, GrowingFile
from swarm_node.versions.assemble import PLACED_AT_ONCE_BYTES, Draft, assemble, folder_of
from tests.swarm_node.p2p_world import fetch, make_version, node, plan_of, store

SIZE = 8
DATA = bytes(range(4 * SIZE)) + bytes(range(SIZE)) + b"end"
"""Five chunks, of which the first comes again as the last whole one, and a short one."""
PIECES = {chunk_id(piece): piece for piece in split(DATA, SIZE)}


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return store(tmp_path / "blobs", PIECES)


def grow(path: Path, blobs: BlobStore, *, promised: bytes = DATA) -> GrowingFile:
    names = [chunk_id(piece) for piece in split(DATA, SIZE)]
    return GrowingFile(
        path, names, chunk_size_bytes=SIZE, size_bytes=len(promised), digest=digest(promised), blobs=blobs
    )


def fill(growing: GrowingFile, order: Iterable[ChunkId]) -> None:
    for chunk in order:
        growing.place(chunk)
    growing.finish()


def test_chunks_may_come_in_any_order(tmp_path: Path, blobs: BlobStore) -> None:
    for number, order in enumerate(permutations(PIECES)):
        growing = grow(tmp_path / str(number), blobs)
        fill(growing, order)
        assert growing.path.read_bytes() == DATA


def test_what_is_in_its_place_is_not_needed_from_the_store_again(tmp_path: Path, blobs: BlobStore) -> None:
    growing = grow(tmp_path / "file", blobs)
    for chunk in PIECES:
        growing.place(chunk)
    blobs.prune(())
    for chunk in PIECES:
        growing.place(chunk)
    growing.place(chunk_id(b"of another file"))
    growing.finish()
    assert growing.path.read_bytes() == DATA


@pytest.mark.parametrize("harm", ["flip", "cut", "lengthen", "empty"])
@pytest.mark.parametrize("when", ["first", "last"])
def test_a_chunk_that_went_bad_in_the_store_leaves_it_and_makes_no_file(
    tmp_path: Path, blobs: BlobStore, harm: str, when: str
) -> None:
    victim, true = list(PIECES.items())[1]
    bad = {"flip": true[:-1] + b"\xff", "cut": true[:-1], "lengthen": true + DATA, "empty": b""}[harm]
    blobs.path(victim).write_bytes(bad)
    growing = grow(tmp_path / "file", blobs)
    order = sorted(PIECES, key=victim.__eq__, reverse=when == "first")
    with pytest.raises(UnknownChunk, match=f"{victim[:12]}.* was damaged"):
        fill(growing, order)
    assert not blobs.has(victim)
    assert all(blobs.has(chunk) for chunk in PIECES if chunk != victim)


def test_a_chunk_that_grew_in_the_store_does_not_lengthen_the_file(tmp_path: Path, blobs: BlobStore) -> None:
    """Bytes behind the end of the file are covered by no digest."""
    whole = DATA[: 4 * SIZE]
    last = chunk_id(whole[-SIZE:])
    blobs.path(last).write_bytes(whole[-SIZE:] + b"more")
    names = [chunk_id(piece) for piece in split(whole, SIZE)]
    growing = GrowingFile(
        tmp_path / "file", names, chunk_size_bytes=SIZE, size_bytes=len(whole), digest=digest(whole), blobs=blobs
    )
    with pytest.raises(UnknownChunk, match=f"{last[:12]}.* was damaged"):
        growing.finish()


def test_a_chunk_that_goes_bad_after_it_was_placed_makes_no_file(tmp_path: Path, blobs: BlobStore) -> None:
    first, second, *_ = PIECES
    growing = grow(tmp_path / "file", blobs)
    growing.place(second)
    with growing.path.open("r+b") as file:
        file.seek(SIZE)
        file.write(b"?")
    growing.place(first)
    with pytest.raises(UnknownChunk, match=f"{second[:12]}.* copied to file"):
        growing.finish()


@pytest.mark.parametrize("promised", [DATA[:-1] + b"?", DATA[:-1]])
def test_sound_chunks_that_make_another_file_are_the_manifests_fault(
    tmp_path: Path, blobs: BlobStore, promised: bytes
) -> None:
    growing = grow(tmp_path / "file", blobs, promised=promised)
    with pytest.raises(ManifestInvalid, match="do not make the file"):
        growing.finish()
    assert all(blobs.has(chunk) for chunk in PIECES)


def test_a_full_disk_is_met_while_chunks_arrive_and_again_at_the_end(tiny_disk: Path, tmp_path: Path) -> None:
    version = make_version(chunk_count=40)
    blobs, arrivals = store(tmp_path / "blobs", version.chunks), Arrivals()
    draft = Draft(tiny_disk / "policies", version.manifest, blobs, {})
    with draft.following(arrivals), arrivals.expecting((), version.chunks):
        pass
    with pytest.raises(DiskFull):
        draft.finish()
    draft.discard()
    assert list((tiny_disk / "policies").iterdir()) == []


def test_what_an_earlier_draft_left_gives_way_to_the_next(tmp_path: Path) -> None:
    version = make_version()
    blobs, policies = store(tmp_path / "blobs", version.chunks), tmp_path / "policies"
    Draft(policies, version.manifest, blobs, {})
    (policies / ".unfinished" / "strange").write_bytes(b"left by a crash")
    folder = assemble(policies, version.manifest, blobs)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert list(policies.iterdir()) == [folder]


@pytest.mark.trio
async def test_chunks_are_put_in_their_places_while_others_are_on_their_way(tmp_path: Path) -> None:
    """The origin gives a chunk only when all that it gave before stand in the draft, but for the last few."""
    at_once = 4
    version = make_version(chunk_size=PLACED_AT_ONCE_BYTES // at_once)
    held = dict(Random(1).sample(list(version.chunks.items()), 3))
    blobs, arrivals, policies = store(tmp_path / "blobs", held), Arrivals(), tmp_path / "policies"
    draft = Draft(policies, version.manifest, blobs, {})
    growing, given = policies / ".unfinished" / "model.safetensors", set(held)

    def in_place() -> set[ChunkId]:
        return {chunk_id(piece) for piece in split(growing.read_bytes(), version.manifest.chunk_size_bytes)}

    async def origin(chunk: ChunkId) -> bytes:
        while len(given - in_place()) > at_once + 1:  # noqa: ASYNC110  # a file tells nobody that it grew
            await trio.sleep(0.001)
        given.add(chunk)
        return version.chunks[chunk]

    async with node(1) as host:
        with draft.following(arrivals):
            await fetch(version, plan_of(), host, blobs, origin=origin, arrivals=arrivals)
    assert await trio.to_thread.run_sync(draft.finish) == folder_of(policies, version.manifest)
    data = b"".join(version.chunks.values())
    assert (folder_of(policies, version.manifest) / "model.safetensors").read_bytes() == data
