"""Versions that only audits wait for: kept by what they take of the disk, the newest first, and missed aloud."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.policy import chunks
from tests.coordinator.publishing.test_publish import KEEP, MODEL, C, Press, press
from tests.safetensors_files import next_file, policy_file

__all__ = ["press"]  # a fixture


def test_versions_that_audits_wait_for_are_kept_as_long_as_there_is_room(
    press: Press, caplog: pytest.LogCaptureFixture
) -> None:
    for version in range(1, 31):
        press.publish(version, {"f.model": b"%02d" % version})
    kept = press.publisher.forget_old(30, audited=2)
    assert kept == (2 * (30 - KEEP - 1), 10**6), "however many versions behind"
    assert press.publisher.read_file(2, "f.model") == b"02"
    assert not press.publisher.blobs.joinpath(chunks.blob_path(chunks.chunk_id(b"01"))).exists()
    press.publisher.forget_old(30, audited=99)  # one that is audited already takes nothing away
    assert press.publisher.read_file(29, "f.model") == b"29"
    assert not caplog.records


def test_the_oldest_versions_go_first_where_there_is_no_room_and_that_is_said(
    press: Press, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of the three waiting versions have room: each has one chunk of its own, and all share one."""
    for version in range(1, 6):
        press.publish(version, {"f.model": b"%d" % version * C, "common.model": b"c" * C})
    press.publisher = press.open(room_bytes=2 * C + 10)
    assert press.publisher.forget_old(5, audited=1) == (2 * C, 2 * C + 10)
    assert [press.publisher.read_file(version, "f.model")[:1] for version in (2, 3, 4, 5)] == [b"2", b"3", b"4", b"5"]
    with pytest.raises(FileNotFoundError):
        press.publisher.read_file(1, "f.model")
    (record,) = caplog.records
    assert "first=1 last=1" in record.message
    assert "audit.kept_gib" in record.message
    press.publisher.forget_old(5, audited=1)
    assert len(caplog.records) == 1, "what is gone is not lost again"


def test_half_of_the_free_disk_is_the_most_whatever_is_set(press: Press, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(1, 6):
        press.publish(version, {"f.model": b"%d" % version * C})
    # A disk cannot be filled here without harm to others; how much is free is the only thing that is made up.
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=C))
    assert press.publisher.forget_old(5, audited=1) == (2 * C, 2 * C), "free, and what the three hold, by two"
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=0))
    assert press.publisher.forget_old(5, audited=1) == (C, C)
    assert press.publisher.read_file(3, "f.model") == b"3" * C


def test_a_version_of_a_chain_costs_what_its_patches_take(press: Press) -> None:
    """Patches are small; the anchor that all of them need is that of the versions in use."""
    files = [policy_file()]
    for _ in range(4):
        files.append(next_file(files[-1]))
    made = [press.publish(version, {MODEL: data}) for version, data in enumerate(files, 1)]
    in_use = {*made[3].chunk_sizes(), *made[4].chunk_sizes()}
    alone = {name: size for one in made[:3] for name, size in one.chunk_sizes().items() if name not in in_use}
    assert press.publisher.forget_old(5, audited=1).size_bytes == sum(alone.values()) < len(files[0])
    assert press.publisher.read_file(1, MODEL) == files[0]


def test_a_version_is_written_without_a_whole_file_in_memory(press: Press, tmp_path: Path) -> None:
    """Auditors and exports write versions of many gigabytes."""
    press.publisher = press.open(chunk_size_bytes=2**20)
    files = [policy_file(elements=2**24)]
    for _ in range(2):
        files.append(next_file(files[-1], share=1e-4))
    for version, data in enumerate(files, 1):
        press.publish(version, {MODEL: data})
    tracemalloc.start()
    press.publisher.write_folder(3, tmp_path / "policy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "policy" / MODEL).read_bytes() == files[2]
    assert [path.name for path in (tmp_path / "policy").iterdir()] == [MODEL]
    assert peak < len(files[2]) / 2
