"""A node's own note of what was leased: there before anything is sampled, whole after a crash, bounded on the disk."""

from pathlib import Path

import pytest

from protocol.errors import ConfigInvalid, DiskFull, LeaseClosed, SwarmError
from protocol.policy.chunks import digest
from protocol.work.lease import Lease
from protocol.work.rollout import pack_tokens
from swarm_node.work import records
from swarm_node.work.records import LeaseLog
from tests.swarm_node.worker_world import World


def lease(number: int, prompt: int = 1) -> Lease:
    return Lease(
        lease_id=f"{number:032x}", version=1, seed=number % 2**63, samples=1, prompt=pack_tokens([prompt]),
        price_micros_per_mtok=1, expires_ms=1,
    )  # fmt: skip


def test_a_lease_is_known_by_all_that_it_said(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    log.record([lease(1), lease(2)])
    log.record([lease(3)])
    for number in (1, 2, 3):
        assert LeaseLog(tmp_path).digest_of(f"{number:032x}") == digest(lease(number).to_bytes())
    assert log.digest_of(f"{2:032x}") != digest(lease(2, prompt=9).to_bytes())
    assert log.digest_of(f"{4:032x}") is None


def test_the_files_are_read_once_and_again_when_the_older_one_is_replaced(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    log.record([lease(1)])
    (tmp_path / records.FILE).write_text("")
    log.record([lease(1)])
    assert (tmp_path / records.FILE).read_text() == "", "it is known already"
    (tmp_path / records.FILE).write_text(" " * records.FILE_MAX_BYTES)
    log.record([lease(2)])
    log.record([lease(1)])
    assert log.digest_of(f"{1:032x}") == digest(lease(1).to_bytes()), "no file had it any more"


def test_a_line_that_a_crash_cut_short_is_no_note_and_spoils_none(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    log.record([lease(1)])
    file = tmp_path / records.FILE
    file.write_text(file.read_text()[:-1])
    log.record([lease(2)])
    assert log.digest_of(f"{1:032x}") is None
    assert log.digest_of(f"{2:032x}") == digest(lease(2).to_bytes())


def test_a_lease_that_is_offered_again_with_another_prompt_does_not_rewrite_its_note(tmp_path: Path) -> None:
    """Else the second offer made the lie of afterwards true, and the honest answer to the first one a fault."""
    log = LeaseLog(tmp_path)
    log.record([lease(1)])
    with pytest.raises(LeaseClosed, match=f"{1:032x}"):
        log.record([lease(2), lease(1, prompt=9)])
    log.record([lease(1)])  # as it was
    assert log.digest_of(f"{1:032x}") == digest(lease(1).to_bytes())
    assert log.digest_of(f"{2:032x}") is None
    (tmp_path / records.FILE).rename(tmp_path / f"{records.FILE}.old")
    with pytest.raises(LeaseClosed):
        log.record([lease(1, prompt=9)])


def test_the_beginning_of_a_lease_names_it_as_status_shows_it(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    log.record([lease(0xAB << 120), lease(0xCD << 120), lease((0xCD << 120) + 1)])
    whole = f"{0xAB << 120:032x}"
    assert log.typed(whole[:8]) == log.typed(whole) == whole
    assert log.typed("f" * 32) == "f" * 32, "the coordinator may know of it"
    assert log.typed("f" * 64) == "f" * 64, "a claim"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "'nonsense' is not the id of a lease"),
        ("cd0", "'cd0' is not the id of a lease"),
        ("f" * 65, "is not the id of a lease"),
        ("cd000000", "2 leases in this folder start with cd000000"),
        ("ee000000", "No lease in this folder start"),
        ("e" * 40, "No lease in this folder start"),
    ],
)
def test_what_names_no_lease_is_wrong_usage(tmp_path: Path, text: str, said: str) -> None:
    log = LeaseLog(tmp_path)
    log.record([lease(0xCD << 120), lease((0xCD << 120) + 1)])
    with pytest.raises(ConfigInvalid, match=said):
        log.typed(text)


def test_a_note_that_is_no_text_spoils_none(tmp_path: Path) -> None:
    log = LeaseLog(tmp_path)
    (tmp_path / records.FILE).write_bytes(b"\xff" * 9 + f"\n{1:032x} ".encode() + b"\xff" * 64)
    log.record([lease(2)])
    assert log.digest_of(f"{2:032x}") == digest(lease(2).to_bytes())


def test_the_notes_are_bounded_and_the_last_ones_are_there(tmp_path: Path) -> None:
    log, a_line = LeaseLog(tmp_path), 1 + 32 + 1 + 64
    fit = records.FILE_MAX_BYTES // a_line
    for start in range(0, 3 * fit, fit // 4):
        log.record([lease(number) for number in range(start, start + fit // 4)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * records.FILE_MAX_BYTES
    last = start + fit // 4 - 1
    for number in (last, last - fit + fit // 4):
        assert log.digest_of(f"{number:032x}") == digest(lease(number).to_bytes())
    assert log.digest_of(f"{0:032x}") is None


@pytest.mark.trio
@pytest.mark.parametrize("trouble", [DiskFull("No room."), LeaseClosed("Offered again.")], ids=lambda error: error.code)
async def test_leases_that_cannot_be_noted_go_back_unsampled(trouble: SwarmError) -> None:
    """Leases go back when there is no room for the note, or one of them says other things than it did before."""
    world = World(leases=8)
    world.trouble["keep"] = trouble
    log = await world.run()
    assert log[:5] == ["load v1", "lease v1", "back 0 1 2 3", "lease v1", "submit 4 5 6 7"], log
