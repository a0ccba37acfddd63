"""Finding a round: the list that people read, and the speed of this machine in a round that it does not know."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from ledger.directory import KnownRound, RefusedRound
from ledger.listing import LIFETIME_MS, OpenListing, open_listing
from protocol.errors import ConfigInvalid, NotFound, Unreachable, UntrustedMetadata
from protocol.limits import DAY_MS
from protocol.policy.root_document import Documents
from protocol.text.money import Unit
from protocol.wire import canonical
from swarm_node.base.clock import now_ms
from swarm_node.commands import finding, surveying
from swarm_node.commands.options import BestBy, BestOptions
from swarm_node.coordinator_api.join_string import TRUST_FILE, JoinString
from swarm_node.doctor.forecast import MeasuredSpeed, forecast, record_speed
from swarm_node.doctor.round_choice import Aim
from swarm_node.engine.capacity import Capacity
from swarm_node.engine.choose import EngineOptions, this_machine
from swarm_node.engine.precision import Memory
from swarm_node.ledger import directories
from swarm_node.ledger.directories import Directories, FoundRounds, parse_place
from swarm_node.machine.gpu import Card, GpuProbe
from tests.coordinator.world import manifest
from tests.swarm_node.listed_world import CURATOR, NOW_MS, ListedLog, directory
from tests.swarm_node.web import Handler, Web

ROUND = "a" * 64


def measured(home: Path, name: str, tokens_per_s: float, weights_bytes: int) -> None:
    """Leave what a home has of a round in which the agent has worked."""
    folder = home / "rounds" / name
    folder.mkdir(parents=True)
    record_speed(folder, tokens_per_s, 1_000)
    file = {"path": "model.safetensors", "size_bytes": weights_bytes, "digest": "d" * 64, "chunks": ["c" * 64]}
    made = manifest(1, 0, files=[file], chunk_size_bytes=4 * 2**20)
    held = Documents(ROUND, b"root", manifest=made.to_bytes(), policy_version=1)
    (folder / TRUST_FILE).write_bytes(canonical.encode(vars(held)))


def test_the_speed_with_the_most_similar_model_is_scaled_by_the_weights(tmp_path: Path) -> None:
    assert finding.similar_speed(tmp_path, 2_000_000) is None
    measured(tmp_path, "far", 900.0, 100_000)
    measured(tmp_path, "twice", 100.0, 4_000_000)
    measured(tmp_path, "third", 300.0, 700_000)
    assert finding.similar_speed(tmp_path, 2_000_000) == MeasuredSpeed(200.0, 1_000, 2.0)
    assert finding.similar_speed(tmp_path, 0) is None, "the size of its model is not known"
    assert finding.similar_speed(tmp_path, 10**9) is None, "nothing similar"
    (tmp_path / "rounds" / "twice" / TRUST_FILE).write_bytes(b"damaged")
    third = finding.similar_speed(tmp_path, 2_000_000)
    assert third
    assert third.tokens_per_s == pytest.approx(300.0 * 0.35)


def test_the_memory_of_the_running_agent_counts_as_free_when_it_moves() -> None:
    card = Card("nvidia", "RTX 4090", memory_bytes=24 * 10**9, used_bytes=22 * 10**9)
    seen = GpuProbe((card,))
    assert finding.usable(seen, (64, 9), is_running=False) == (seen, 9)
    assert finding.usable(seen, (64, 9), is_running=True) == (GpuProbe((card._replace(used_bytes=0),)), 64)


def test_a_file_is_remembered_by_its_whole_path() -> None:
    assert parse_place(f"rounds.json#{CURATOR.node_id}").where == str(Path.cwd() / "rounds.json")
    assert parse_place(f"https://a.example/r.json#{CURATOR.node_id}").where == "https://a.example/r.json"


def test_an_estimate_from_another_round_says_so() -> None:
    status = {"budget_micros": 10**9, "as_of_ms": 0}
    rough = forecast(status, [], price=10**6, unit=Unit("EUR", 2), speed=MeasuredSpeed(100.0, 0, 2.0))
    assert rough.high == 360_000
    assert "estimated from this machine's speed in another round. Rough" in rough.basis


def test_the_list_names_each_round_the_refused_and_the_look_alikes(tmp_path: Path) -> None:
    rivers, copy = ListedLog(tmp_path / "a"), ListedLog(tmp_path / "b", "R\u0456vers")
    wrong = RefusedRound(round_id="f" * 64, title="Lakes", reason="it lies", ms=0)
    found = FoundRounds([KnownRound(rivers.open()), KnownRound(copy.open())], [wrong])
    first, second, refused, alike = finding.blocks(found, {}, Capacity(Memory(10**9, None)), 10**6)
    assert first.startswith(f"Rivers ({rivers.round_id[:8]})\n")
    assert "Model: hf://some/model, 1 GB, task arithmetic" in first
    assert "cannot join: its listing has expired" in first or "GPU memory" in first
    assert "Gifts: others gave 0.0005 EUR" in first
    assert f"swarm-node join 'http://rivers.example:8700#{rivers.round_id}'" in first
    assert copy.round_id[:8] in second
    assert refused == "Refused:\n  Lakes (ffffffff): it lies"
    assert alike.startswith("Look-alikes: Rivers (")


@pytest.mark.parametrize(
    ("options", "join_string"),
    [
        (BestOptions([], best=BestBy.CAUSE), "http://a#b"),
        (BestOptions([], cause="water"), ""),
        (BestOptions(["a#b"]), "http://a#b"),
        (BestOptions([], yes=True), ""),
    ],
)
def test_options_of_a_choice_that_is_not_made_are_wrong_usage(options: BestOptions, join_string: str) -> None:
    with pytest.raises(ConfigInvalid):
        options.require_whole(join_string)
    BestOptions([]).require_whole(join_string)
    BestOptions([], best=BestBy.EARNINGS, unit="EUR").require_whole("")


def test_without_a_round_that_fits_the_choice_says_why(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (tmp_path / "rounds.json").write_bytes(b"{}")
    known = Directories(home)
    known.remember([parse_place(f"{tmp_path / 'rounds.json'}#{CURATOR.node_id}")])
    with pytest.raises(NotFound, match="No round of these directories fits"):
        trio.run(_choose, known, home)


def test_rounds_of_another_unit_take_no_place_among_those_that_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment_ms = now_ms()
    fresh = {"url": "http://127.0.0.1:1", "made_ms": moment_ms, "expires_ms": moment_ms + LIFETIME_MS}
    eager = ListedLog(tmp_path / "a", "Lakes", unit="USD").listing(waiting_permille=1000, **fresh)
    listed = directory(ListedLog(tmp_path / "b").listing(**fresh), eager, made_ms=moment_ms, expires_ms=moment_ms + 1)
    (tmp_path / "rounds.json").write_bytes(listed)
    monkeypatch.setattr(finding, "now_ms", lambda: moment_ms)  # the directory expires a millisecond later
    known, told = Directories(tmp_path / "home"), list[str]()
    known.remember([parse_place(f"{tmp_path / 'rounds.json'}#{CURATOR.node_id}")])
    with pytest.raises(NotFound):
        trio.run(partial(_choose, known, tmp_path, "earnings", unit="EUR", tell=told.append, asked_max=1))
    assert [line.partition("(")[0] for line in told] == ["left out: Rivers "]


async def _choose(
    known: Directories,
    home: Path,
    aim: Aim = "cause",
    unit: str = "",
    tell: Callable[[str], None] = lambda _line: None,
    asked_max: int = 32,
) -> None:
    machine = finding.Here("auto", EngineOptions(), this_machine(), Capacity(Memory(None, None)))
    await finding.choose(
        known, aim, words="", unit=unit, price=0, home=home, machine=machine, tell=tell, asked_max=asked_max
    )


class Rounds:
    """A server with the true listing of a round; it never finishes any other answer."""

    def __init__(self, log: ListedLog, host: str) -> None:
        self.web = Web(self._answer)
        moment_ms = now_ms()
        self.said = log.listing(
            url=f"http://{host}:{self.web.port}", made_ms=moment_ms, expires_ms=moment_ms + LIFETIME_MS
        )
        self.known = KnownRound(open_listing(self.said))

    def _answer(self, handler: Handler) -> None:
        if handler.path == "/v1/listing":
            handler.answer(200, json.dumps(self.said).encode())
        else:
            handler.web.over.wait()


@pytest.fixture
def rounds(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rounds]:
    made = Rounds(ListedLog(tmp_path / "rivers"), request.param)
    yield made
    made.web.close()


@pytest.mark.parametrize("rounds", ["127.0.0.1"], indirect=True)
def test_a_log_without_end_keeps_nobody_waiting_for_ever(rounds: Rounds, tmp_path: Path) -> None:
    known = Directories(tmp_path / "home")
    known.remember([parse_place(f"rounds.json#{CURATOR.node_id}")])
    with pytest.raises(Unreachable, match="could not be read within"):
        trio.run(partial(finding.prove_now, known, rounds.known, patience_s=0.2))
    assert known.refused == {}, "it may be an honest log that is long"


@pytest.mark.parametrize("rounds", ["localhost"], indirect=True)
def test_a_name_that_changes_after_its_check_leads_nobody_into_the_own_network(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def public(_host: str) -> list[str]:
        return ["9.9.9.9"]

    monkeypatch.setattr(directories, "resolve", public)  # no real name has one address now and another later
    known = Directories(tmp_path / "home")
    known.remember([parse_place(f"http://9.9.9.9/rounds.json#{CURATOR.node_id}")])
    with pytest.raises(Unreachable, match="no public address"):
        trio.run(finding.prove_now, known, rounds.known)
    [asked] = trio.run(finding._ask_all, known, [rounds.known], 0, tmp_path / "home")
    assert asked.forecast.unknown
    with pytest.raises(Unreachable, match="no public address"):
        trio.run(partial(finding.prove, rounds.known.listing, own_network=False))
    assert not rounds.web.asked


@pytest.mark.parametrize("rounds", ["127.0.0.1"], indirect=True)
def test_a_round_of_the_internet_does_not_send_its_curator_into_the_curators_network(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetched(*_: object, **__: object) -> OpenListing:
        return rounds.known.listing

    monkeypatch.setattr(surveying, "fetch_listing", fetched)  # tests reach no round on the internet
    join = JoinString("http://9.9.9.9", rounds.known.listing.round_id)
    out = tmp_path / "rounds.json"
    made = surveying.make(out, [join], CURATOR, name="", removed=set(), days=7, now_ms=now_ms())
    assert (made.directory.rounds, made.directory.refused) == ((), ())
    assert "own network" in made.lines[0]
    assert not rounds.web.asked


def test_a_round_that_gives_a_payment_another_time_than_its_curator_saw_is_not_joined_nor_refused(
    tmp_path: Path,
) -> None:
    rivers = ListedLog(tmp_path)
    said, seen = rivers.open(), rivers.sighting(ms=NOW_MS - 9 * DAY_MS)
    with pytest.raises(UntrustedMetadata, match="later time"):
        finding.require_uncontested(KnownRound(said, (seen,)))
    finding.require_uncontested(KnownRound(said, (rivers.sighting(),)))
