"""Files and chunks of a home's other rounds: taken over by links, checked, and never waited for without end."""

import math
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import UnknownChunk
from protocol.policy.chunks import chunk_id, digest, split
from protocol.policy.manifest import FileEntry, PolicyManifest
from swarm_node.chunks.blobs import BlobStore
from swarm_node.versions import assemble
from swarm_node.versions.other_rounds import BLOBS, WAIT_S, OtherRounds
from tests.swarm_node.p2p_world import manifest_of

CHUNK_SIZE = 8
BASE, CONFIG = bytes(range(100)), b"{}"


def entry(name: str, data: bytes) -> FileEntry:
    chunks = tuple(chunk_id(piece) for piece in split(data, CHUNK_SIZE))
    return FileEntry(path=name, size_bytes=len(data), digest=digest(data), chunks=chunks)


def version(base: bytes = BASE) -> PolicyManifest:
    files = entry("config.json", CONFIG), entry("model.safetensors", base)
    return manifest_of(*files, chunk_size=CHUNK_SIZE)


MANIFEST = version()
WEIGHTS = digest(BASE)


class Round:
    """A round's folder in a home."""

    def __init__(self, home: Path, name: str) -> None:
        self.policies = home / name / "policies"
        self.blobs = BlobStore(home / name / BLOBS)
        self.blobs.clean()

    def build(self, base: bytes = BASE) -> Path:
        for data in (CONFIG, base):
            for piece in split(data, CHUNK_SIZE):
                self.blobs.write(chunk_id(piece), piece)
        return assemble.assemble(self.policies, version(base), self.blobs)


@pytest.fixture
def others(tmp_path: Path) -> OtherRounds:
    return OtherRounds(tmp_path)


@pytest.fixture
def first(tmp_path: Path) -> Round:
    return Round(tmp_path, "first")


@pytest.fixture
def second(tmp_path: Path) -> Round:
    return Round(tmp_path, "second")


def test_a_base_of_another_round_is_the_same_file(others: OtherRounds, first: Round, second: Round) -> None:
    held = first.build()
    others.take_over(second.policies, MANIFEST, second.blobs)
    bases = assemble.held_files(second.policies, MANIFEST)
    built = assemble.assemble(second.policies, MANIFEST, second.blobs, bases)
    assemble.clear_taken(second.policies)
    assert (built / "model.safetensors").stat().st_ino == (held / "model.safetensors").stat().st_ino
    assert list(second.policies.iterdir()) == [built]


def test_a_file_that_its_round_prunes_after_the_link_is_used(others: OtherRounds, first: Round, second: Round) -> None:
    first.build()
    others.take_over(second.policies, MANIFEST, second.blobs)
    bases = assemble.held_files(second.policies, MANIFEST)
    assert assemble.prune(first.policies, ()) == 1
    first.blobs.prune(())
    built = assemble.assemble(second.policies, MANIFEST, second.blobs, bases)
    assert (built / "model.safetensors").read_bytes() == BASE


def test_a_file_that_its_round_prunes_before_the_link_is_fetched(
    others: OtherRounds, first: Round, second: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other round removes its version after the files were listed."""
    first.build()
    real = Path.hardlink_to

    def pruned_first(target: Path, source: Path) -> None:
        assemble.prune(first.policies, ())
        first.blobs.prune(())
        real(target, source)

    monkeypatch.setattr(Path, "hardlink_to", pruned_first)  # the other round prunes at the worst moment
    others.take_over(second.policies, MANIFEST, second.blobs)
    assert assemble.held_files(second.policies, MANIFEST) == {}
    assert not any(second.blobs.has(chunk_id(piece)) for piece in split(BASE, CHUNK_SIZE))


def test_a_hostile_base_of_the_same_name_and_size_is_not_used(others: OtherRounds, first: Round, second: Round) -> None:
    first.build(BASE[::-1])
    others.take_over(second.policies, MANIFEST, second.blobs)
    assert WEIGHTS not in assemble.held_files(second.policies, MANIFEST)


def test_a_damaged_chunk_of_another_round_is_not_linked_again_and_again(
    others: OtherRounds, first: Round, second: Round
) -> None:
    """A power cut left it: chunks are not synced."""
    first.build()
    assemble.prune(first.policies, ())
    chunk, *rest = (chunk_id(piece) for piece in split(BASE, CHUNK_SIZE))
    first.blobs.path(chunk).write_bytes(bytes(CHUNK_SIZE))
    others.take_over(second.policies, MANIFEST, second.blobs)
    assert not second.blobs.has(chunk)
    assert all(second.blobs.read(one) for one in rest)
    with pytest.raises(UnknownChunk):
        first.blobs.read(chunk)


def test_a_file_system_without_links_costs_a_download(
    others: OtherRounds, first: Round, second: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(target: Path, source: Path) -> None:
        raise PermissionError(1, "no links here")

    first.build()
    monkeypatch.setattr(Path, "hardlink_to", refuse)  # as on a file system without hard links
    others.take_over(second.policies, MANIFEST, second.blobs)
    assert assemble.held_files(second.policies, MANIFEST) == {}


def test_links_that_a_killed_agent_left_are_removed_with_the_old_versions(
    others: OtherRounds, first: Round, second: Round
) -> None:
    held = first.build()
    others.take_over(second.policies, MANIFEST, second.blobs)
    assert (held / "model.safetensors").stat().st_nlink == 2
    assemble.prune(second.policies, ())
    assert (held / "model.safetensors").stat().st_nlink == 1


@pytest.mark.trio
async def test_a_round_waits_for_the_same_weights_until_the_other_has_them(
    others: OtherRounds, first: Round, second: Round
) -> None:
    waited = []

    async def wait() -> None:
        waited.append(await others.wait_for_shared(second.policies, MANIFEST, slice_s=math.inf))

    async with trio.open_nursery() as nursery:
        with others.fetching(first.policies, MANIFEST):
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert not waited
    assert waited == [True]


@pytest.mark.trio
async def test_other_weights_are_not_waited_for(others: OtherRounds, first: Round, second: Round) -> None:
    with others.fetching(first.policies, version(BASE[::-1])):
        assert await others.wait_for_shared(second.policies, MANIFEST, slice_s=math.inf)


@pytest.mark.trio
async def test_a_round_that_never_gets_the_weights_it_names_costs_others_one_wait(
    others: OtherRounds, first: Round, second: Round, autojump_clock: MockClock
) -> None:
    """A hostile round may name the weights of each version that another round publishes."""
    began = trio.current_time()
    for number in range(3):
        manifest = version(bytes([number]) * 100)
        with others.fetching(first.policies, manifest):
            while not await others.wait_for_shared(second.policies, manifest, slice_s=7.0):
                assert trio.current_time() < began + 2 * WAIT_S
    assert trio.current_time() == pytest.approx(began + WAIT_S)


@pytest.mark.trio
async def test_a_base_that_a_round_has_already_is_not_waited_for(
    others: OtherRounds, first: Round, second: Round, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    assert await others.wait_for_shared(second.policies, MANIFEST, slice_s=7.0)
    with others.fetching(first.policies, MANIFEST):
        assert await others.wait_for_shared(second.policies, MANIFEST, slice_s=7.0)
    assert trio.current_time() == began
