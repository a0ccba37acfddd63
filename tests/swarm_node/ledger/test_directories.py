"""Directories that a home knows: the newest copy of each curator counts, and lies are remembered."""

import json
from functools import partial
from pathlib import Path

import pytest
import trio
from typer.testing import CliRunner, Result

from ledger.directory import RefusedRound, add_witness, require_witnessed
from ledger.listing import open_listing
from protocol.errors import ConfigInvalid, NotFound, ProofInvalid, RolledBack, UntrustedMetadata
from protocol.ids import NodeId
from protocol.limits import DAY_MS
from protocol.wire.signing import NodeKey
from swarm_node.base import disk
from swarm_node.base.clock import now_ms
from swarm_node.cli import app as cli
from swarm_node.commands.rounds import app
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.ledger.directories import (
    FILE,
    FOLDER,
    Directories,
    FoundRounds,
    parse_place,
    parse_witness,
    require_contactable,
)
from tests.swarm_node.listed_world import CURATOR, NOW_MS, ListedLog, directory
from tests.swarm_node.web import Web


@pytest.fixture
def rivers(tmp_path: Path) -> ListedLog:
    return ListedLog(tmp_path / "rivers")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def place(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return f"{path}#{CURATOR.node_id}"


def read(home: Path, *places: str, now_ms: int = NOW_MS) -> FoundRounds:
    known = Directories(home)
    known.remember(map(parse_place, places))
    return trio.run(known.read_all, now_ms)


def titles(found: FoundRounds) -> list[str]:
    return [known.listing.title for known in found.rounds]


@pytest.mark.parametrize(
    "text", ["", "rounds.json", "rounds.json#", "#12D3KooW", f"#{CURATOR.node_id}", "a#" + "1" * 52]
)
def test_a_place_without_the_curators_key_is_wrong_usage(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="key of the directory's curator"):
        parse_place(text)


def test_a_directory_is_read_from_a_web_server_and_remembered(rivers: ListedLog, home: Path) -> None:
    data = directory(rivers.listing())
    web = Web(lambda handler: handler.answer(200, data))
    try:
        assert titles(read(home, f"{web.url}/lists/rounds.json#{CURATOR.node_id}")) == ["Rivers"]
        assert set(web.asked) == {"/lists/rounds.json"}
    finally:
        web.close()
    found = read(home)
    assert titles(found) == ["Rivers"], "the kept copy counts while nobody answers"
    assert "does not answer" in found.problems[0]
    late = read(home, now_ms=NOW_MS + 8 * DAY_MS)
    assert titles(late) == []
    assert any("has expired" in problem for problem in late.problems)


def test_a_mirror_that_serves_yesterdays_file_is_named_and_not_believed(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    lakes = ListedLog(tmp_path / "lakes", "Lakes")
    new = directory(rivers.listing(), number=8)
    old = directory(rivers.listing(), lakes.listing(), number=7)
    assert titles(read(home, place(tmp_path / "a.json", new))) == ["Rivers"]
    found = read(home, place(tmp_path / "a.json", old))
    assert titles(found) == ["Rivers"]
    assert "number 7" in found.problems[0]
    assert "the mirror is old" in found.problems[0]
    both = read(home, place(tmp_path / "b.json", new))
    assert titles(both) == ["Rivers"]


def test_of_two_mirrors_the_newer_one_counts_in_any_order(rivers: ListedLog, home: Path, tmp_path: Path) -> None:
    lakes = ListedLog(tmp_path / "lakes", "Lakes")
    old = place(tmp_path / "old.json", directory(lakes.listing(), number=1))
    new = place(tmp_path / "new.json", directory(rivers.listing(), number=2))
    assert titles(read(home, old, new)) == ["Rivers"]
    assert titles(read(home / "other", new, old)) == ["Rivers"]


def test_a_round_that_lied_is_refused_whatever_directories_say(rivers: ListedLog, home: Path, tmp_path: Path) -> None:
    listed = place(tmp_path / "a.json", directory(rivers.listing()))
    assert titles(read(home, listed)) == ["Rivers"]
    lie = open_listing(rivers.boast(10**6))
    Directories(home).refuse(lie, ProofInvalid("Rivers lies."), NOW_MS)
    found = read(home)
    assert (titles(found), [wrong.reason for wrong in found.refused]) == ([], ["Rivers lies."])
    with pytest.raises(ProofInvalid, match="refuses the round Rivers: Rivers lies") as refused:
        Directories(home).require_not_refused(rivers.round_id)
    evidence = Directories(home).evidence(rivers.round_id)
    assert str(evidence) in refused.value.hint
    assert evidence.exists(), "anybody can check the lie with it"


def test_an_entry_that_nobody_signed_does_not_keep_a_round_from_being_joined(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    forged = rivers.listing()
    forged["signed"]["totals"]["paid_micros"] = 0
    found = read(home, place(tmp_path / "a.json", directory(forged)))
    assert (titles(found), found.refused) == ([], [])
    assert "has a wrong entry, Rivers" in found.problems[0]
    Directories(home).require_not_refused(rivers.round_id)


def test_two_curators_with_contradicting_listings_of_a_round_have_it_refused(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    payments = [payment | {"paid_micros": 100} for payment in rivers.signed()["payments"]]
    second = NodeKey(bytes(31) + b"\x09")
    (tmp_path / "b.json").write_bytes(directory(rivers.listing(payments=payments, made_ms=NOW_MS + 1), key=second))
    other = f"{tmp_path / 'b.json'}#{second.node_id}"
    assert titles(read(home / "alone", other)) == ["Rivers"], "one of them alone may be true"
    found = read(home, place(tmp_path / "a.json", directory(rivers.listing())), other)
    assert titles(found) == []
    assert "says two things" in found.refused[0].reason
    with pytest.raises(ProofInvalid):
        Directories(home).require_not_refused(rivers.round_id)


def test_a_curators_refusal_counts_until_the_curator_takes_it_back(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    wrong = RefusedRound(round_id=rivers.round_id, title="Rivers", reason="it lies", ms=NOW_MS)
    told = read(home, place(tmp_path / "a.json", directory(rivers.listing(), refused=(wrong,))))
    assert (titles(told), [one.reason for one in told.refused]) == ([], ["it lies"])
    Directories(home).require_not_refused(rivers.round_id)
    assert titles(read(home, place(tmp_path / "a.json", directory(rivers.listing(), number=2)))) == ["Rivers"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://192.168.1.1", "http://[fe80::1]", "http://10.1.2.3:8700"]
)
def test_a_directory_of_the_internet_cannot_send_this_machine_into_its_own_network(url: str) -> None:
    join = JoinString(url, "a" * 64)
    with pytest.raises(UntrustedMetadata, match="own network"):
        trio.run(partial(require_contactable, join, own_network=False))
    trio.run(partial(require_contactable, join, own_network=True))
    trio.run(partial(require_contactable, JoinString("http://9.9.9.9", "a" * 64), own_network=False))


@pytest.mark.parametrize(
    ("where", "may"), [("rounds.json", True), ("http://127.0.0.1/a", True), ("http://9.9.9.9/a", False)]
)
def test_only_a_near_directory_may_name_addresses_nearby(home: Path, where: str, may: bool) -> None:
    known = Directories(home)
    known.remember([parse_place(f"{where}#{CURATOR.node_id}")])
    assert trio.run(known.may_name_own_network) is may


def test_a_damaged_record_is_named(home: Path) -> None:
    home.mkdir()
    (home / FILE).write_text("{")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        Directories(home)


WITNESS = NodeKey(bytes(31) + b"\x08")


def seen_by_witness(data: bytes, key: NodeKey = WITNESS) -> bytes:
    return json.dumps(add_witness(data, key)).encode()


def test_a_curator_who_shows_two_directories_with_one_number_is_caught_by_who_sees_both(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    lakes = ListedLog(tmp_path / "lakes", "Lakes")
    mine, theirs = directory(rivers.listing(), number=5), directory(lakes.listing(), number=5)
    assert titles(read(home, place(tmp_path / "a.json", mine))) == ["Rivers"]
    found = read(home, place(tmp_path / "a.json", theirs))
    assert titles(found) == ["Rivers"]
    assert "two different directories with number 5" in found.problems[0]
    folder = home / FOLDER
    assert (folder / f"{CURATOR.node_id}-other.json").read_bytes() == theirs, "the proof, with the kept copy"
    assert read(home / "new", place(tmp_path / "a.json", seen_by_witness(theirs))).problems == []
    assert read(home / "new", place(tmp_path / "a.json", theirs)).problems == [], "a signature more or less is no view"


def test_who_asks_for_a_witness_sees_what_the_witness_saw(rivers: ListedLog, home: Path, tmp_path: Path) -> None:
    """A split view, and an older file that only this reader is shown, have no signature, or that of something else."""
    lakes = ListedLog(tmp_path / "lakes", "Lakes")
    mine, theirs = directory(rivers.listing(), number=5), directory(lakes.listing(), number=5)
    old = directory(lakes.listing(), number=4)
    assert titles(read(home, place(tmp_path / "a.json", theirs))) == ["Lakes"], "without a witness it is believed"
    known = Directories(home)
    known.require_witnesses([parse_witness(WITNESS.node_id)])
    moved = json.loads(theirs) | {"witnesses": json.loads(seen_by_witness(mine))["witnesses"]}
    foreign = seen_by_witness(theirs, NodeKey(bytes(31) + b"\x09"))
    for data in (theirs, old, foreign, json.dumps(moved).encode(), json.dumps(moved | {"witnesses": [1]}).encode()):
        found = read(home, place(tmp_path / "a.json", data))
        assert (titles(found), len(found.problems)) == ([], 2), found.problems
        assert f"the kept copy of {CURATOR.node_id[-8:]}: The witness" in found.problems[1]
    found = read(home, place(tmp_path / "a.json", seen_by_witness(mine)))
    assert titles(found) == []
    assert "two different directories with number 5" in found.problems[0], "what it was shown before is kept as proof"
    newer = directory(rivers.listing(), number=6)
    assert titles(read(home, place(tmp_path / "a.json", seen_by_witness(newer)))) == ["Rivers"]
    assert titles(read(home, place(tmp_path / "a.json", old))) == ["Rivers"], "the kept copy, which is witnessed"
    (home / FOLDER / f"{CURATOR.node_id}-other.json").unlink()
    other = directory(lakes.listing(), number=6)
    assert titles(read(home, place(tmp_path / "a.json", other))) == ["Rivers"]
    assert (home / FOLDER / f"{CURATOR.node_id}-other.json").read_bytes() == other, "a proof without a witness, too"


def test_a_witness_signs_one_file_for_each_number_and_none_that_is_older(
    rivers: ListedLog, home: Path, tmp_path: Path
) -> None:
    lakes = ListedLog(tmp_path / "lakes", "Lakes")
    far_ms = now_ms() + DAY_MS
    listed, out = tmp_path / "a.json", tmp_path / "out.json"

    def sign(number: int, log: ListedLog, *witnesses: NodeKey) -> Result:
        data = directory(log.listing(), number=number, made_ms=now_ms(), expires_ms=far_ms)
        for key in witnesses:
            data = seen_by_witness(data, key)
        return CliRunner().invoke(app, ["witness", place(listed, data), str(out), "--home", str(home)])

    first = sign(5, rivers)
    assert first.exit_code == 0, first.output
    own = NodeId(first.output.split()[-1])
    require_witnessed(out.read_bytes(), [own])
    for number, error in ((5, ProofInvalid), (4, RolledBack)):
        assert isinstance(sign(number, lakes).exception, error)
    Directories(home).require_witnesses([own])
    assert sign(6, lakes).exit_code == 0, "it asks nobody for its own signature"
    Directories(home).require_witnesses([WITNESS.node_id])
    for number, error in ((6, ProofInvalid), (5, RolledBack)):
        assert isinstance(sign(number, rivers, WITNESS).exception, error), "what it signed before counts"
    with disk.hold_lock(home / FOLDER / "lock", RolledBack("")):
        assert "Another command" in str(sign(7, rivers, WITNESS).exception), "two commands cannot both be first"
    assert sign(7, rivers, WITNESS).exit_code == 0


def test_a_witness_is_forgotten_by_a_command(rivers: ListedLog, home: Path, tmp_path: Path) -> None:
    moment_ms = now_ms()
    data = directory(rivers.listing(), number=5, made_ms=moment_ms, expires_ms=moment_ms + DAY_MS)
    where = place(tmp_path / "a.json", data)

    def listed(*words: str) -> Result:
        return CliRunner().invoke(cli, ["rounds", "--directory", where, "--home", str(home), *words])

    assert "Rivers" not in listed("--witness", WITNESS.node_id).output
    unknown = listed("--forget-witness", CURATOR.node_id)
    assert isinstance(unknown.exception, NotFound)
    assert WITNESS.node_id in unknown.exception.hint, "it says which are required"
    assert "Rivers" in listed("--forget-witness", WITNESS.node_id).output
    assert Directories(home).witnesses == []


@pytest.mark.parametrize("text", ["", "12D3KooW", CURATOR.node_id[:-1]])
def test_a_witness_is_named_by_a_whole_key(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="is not the key of a witness"):
        parse_witness(text)
