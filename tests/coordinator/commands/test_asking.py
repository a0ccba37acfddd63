"""Commands about a round that nobody leads: they read the store, and say since when that is so and how it goes on."""

import asyncio
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.commands import asking
from coordinator.config import load
from coordinator.service.opening import LOCK, led_until_ms, only_coordinator, touch
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.state import Database
from protocol.errors import ConfigInvalid, NotAuthorised, NotFound, SwarmError, Unreachable
from tests.coordinator.served import SETTINGS, serve
from tests.processes.programs import free_address

STOPPED_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a round with a version and a node, stopped in November 2023."""
    folder = tmp_path_factory.mktemp("stopped")

    async def run() -> None:
        async with serve(folder, f"round.listen={free_address()}") as served:
            await served.publish()
            await served.join(7)

    asyncio.run(run())
    os.utime(folder / "round" / LOCK, (STOPPED_MS / 1000, STOPPED_MS / 1000))
    file = folder / "round.toml"
    file.write_text(f'[round]\ndirectory = "{folder}/round"\n')
    return file


def say(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_status_says_that_it_is_stopped_since_when_and_how_it_goes_on(stopped: Path) -> None:
    first, *rest = say("status", str(stopped)).splitlines()
    launch = f"`swarm-coordinator launch {stopped}`"
    assert first == f"state      STOPPED since 2023-11-14 22:13:20 UTC: continue with {launch}."
    assert any("0 of 1 node alive" in line for line in rest)
    assert any("version 1 of update 0" in line for line in rest)
    assert not any(line.startswith("learner ") for line in rest)


def test_the_status_of_a_finished_round_does_not_say_that_it_goes_on(stopped: Path) -> None:
    with closing(Database(stopped.with_name("round") / "state.db")) as database:
        database.run_now(set_fact, FINISHED, True)
        said = say("status", str(stopped))
        database.run_now(set_fact, FINISHED, False)
    assert said.startswith("state      FINISHED, and STOPPED since 2023-11-14 22:13:20 UTC: ")
    assert "serves its pages" in " ".join(said.split())
    assert "continue with" not in said


@pytest.mark.parametrize("command", [("status",), ("nodes", "list"), ("policy", "list")], ids=" ".join)
def test_the_command_that_continues_a_round_has_the_settings_that_were_given(
    stopped: Path, command: tuple[str, ...]
) -> None:
    told = say(*command, str(stopped), "--set", "round.title=Sums for all")
    assert f"`swarm-coordinator launch {stopped} --set 'round.title=Sums for all'`" in told


def test_status_ends_in_the_string_to_join_with(stopped: Path) -> None:
    last = say("status", str(stopped)).splitlines()[-1]
    told: dict[str, Any] = json.loads(say("status", str(stopped), "--json"))
    assert last == f"Join with:   swarm-node join {told['join_string']}"
    assert told["join_string"].endswith(f"#{told['round_id']}")


def test_for_scripts_it_is_the_same_json_with_the_moment(stopped: Path) -> None:
    told: dict[str, Any] = json.loads(say("status", str(stopped), "--json"))
    assert told["stopped_since_ms"] == STOPPED_MS
    assert (told["version"], told["nodes"], told["nodes_alive"]) == (1, 1, 0)
    assert told["samples_per_group"] == 2, "as it was launched, not as the file says"


def test_a_round_that_was_only_made_is_not_called_stopped(tmp_path: Path) -> None:
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
    say("init", str(file))
    line = f"NOT LAUNCHED YET: start it with `swarm-coordinator launch {file}`."
    first, *rest = say("status", str(file)).splitlines()
    assert first == f"state      {line}"
    assert not any("STOPPED" in one for one in rest)
    for what in ("nodes", "policy"):
        assert say(what, "list", str(file)).splitlines()[-1] == line
    assert json.loads(say("status", str(file), "--json"))["stopped"] == line


class Older(BaseHTTPRequestHandler):
    """A coordinator that has no word for the operator alone, or takes the token for a stranger's."""

    refusal: SwarmError

    def do_GET(self) -> None:  # named so by `http.server`
        known = self.path == "/v1/status"
        body = {"version": 3, "round_id": "a" * 64} if known else self.refusal.to_wire()
        self.send_response(200 if known else self.refusal.http_status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.mark.parametrize("refusal", [NotFound("No such address."), NotAuthorised("This address is the operator's.")])
def test_a_coordinator_that_refuses_the_operators_figures_is_asked_for_the_public_ones(
    tmp_path: Path, refusal: SwarmError
) -> None:
    (tmp_path / "operator.token").write_text("a" * 64)
    handler = type("Refusing", (Older,), {"refusal": refusal})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor() as pool:
        serving = pool.submit(server.serve_forever)
        file = tmp_path / "round.toml"
        file.write_text(f'[round]\ndirectory = "{tmp_path}"\nlisten = "127.0.0.1:{server.server_port}"\n')
        try:
            assert json.loads(say("status", str(file), "--json"))["version"] == 3
        finally:
            server.shutdown()
            serving.result()


def test_another_round_that_has_taken_the_address_is_not_shown_as_this_one(stopped: Path, tmp_path: Path) -> None:
    """A coordinator of another round refuses our token, and its public figures have another round id."""
    (tmp_path / "round").mkdir()
    shutil.copytree(stopped.parent / "round", tmp_path / "round", dirs_exist_ok=True)
    handler = type("Another", (Older,), {"refusal": NotAuthorised("This address is the operator's.")})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor() as pool:
        serving = pool.submit(server.serve_forever)
        resolved = tmp_path / "round" / "resolved.json"
        settings = json.loads(resolved.read_text())
        settings["round"] |= {"directory": f"{tmp_path}/round", "listen": f"127.0.0.1:{server.server_port}"}
        resolved.write_text(json.dumps(settings))
        file = tmp_path / "round.toml"
        file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
        try:
            assert json.loads(say("status", str(file), "--json"))["round_id"] != "a" * 64
            assert "STOPPED" in say("nodes", "list", str(file))
        finally:
            server.shutdown()
            serving.result()


def test_nodes_and_versions_are_told_with_the_same_line(stopped: Path) -> None:
    nodes, versions = (say(what, "list", str(stopped)).splitlines() for what in ("nodes", "policy"))
    assert "n7" in nodes[0]
    assert " silent " in nodes[0], "nobody works for a round that nobody leads"
    assert nodes[-1] == versions[-1]
    assert nodes[-1].startswith("STOPPED since 2023-11-14")
    assert json.loads(say("nodes", "list", str(stopped), "--json"))[0]["name"] == "n7"


def test_orders_about_nodes_say_that_they_need_a_running_coordinator(stopped: Path) -> None:
    with pytest.raises(Unreachable, match="then repeat the order"):
        say("nodes", "pause", str(stopped), "n7")


def test_a_coordinator_that_leads_and_is_silent_is_another_trouble(stopped: Path) -> None:
    folder = stopped.parent / "round"
    with only_coordinator(folder), pytest.raises(Unreachable, match="but does not answer"):
        say("status", str(stopped))
    os.utime(folder / LOCK, (STOPPED_MS / 1000, STOPPED_MS / 1000))


def test_a_round_that_never_was_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("")
    with pytest.raises(ConfigInvalid, match="There is no round") as refused:
        say("status", str(file), "--set", f"round.directory={tmp_path}")
    assert "a relative round.directory counts from the current folder" in refused.value.hint


def test_looking_changes_nothing_and_leading_is_seen(tmp_path: Path) -> None:
    with only_coordinator(tmp_path):
        touch(tmp_path)
        assert led_until_ms(tmp_path) is None
    since = led_until_ms(tmp_path)
    assert since
    assert led_until_ms(tmp_path) == since


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:8700", "http://127.0.0.1:8700"),
        ("0.0.0.0:8700", "http://127.0.0.1:8700"),
        ("[::]:8700", "http://[::1]:8700"),
        ("10.0.0.5:99", "http://10.0.0.5:99"),
    ],
)
def test_who_listens_everywhere_is_found_here(listen: str, url: str) -> None:
    assert asking.local_url(load(None, [f"round.listen={listen}", *SETTINGS])) == url


@pytest.mark.parametrize(
    ("public", "with_token", "without"),
    [("https://swarm.example/", 2, 2), ("http://swarm.example", 1, 2), ("", 1, 1)],
)
def test_the_token_leaves_the_machine_over_https_only(
    tmp_path: Path, public: str, with_token: int, without: int
) -> None:
    config = load(None, [f"round.public_url={public}", f"round.directory={tmp_path}"])
    assert len(list(asking._urls(config, as_operator=False))) == without - 1, "the round is on another machine"
    (tmp_path / "operator.token").write_text("a" * 64)
    assert len(list(asking._urls(config, as_operator=True))) == with_token
    assert len(list(asking._urls(config, as_operator=False))) == without


def test_finish_asks_in_a_round_that_was_launched_without_a_learner_by_a_setting(tmp_path: Path) -> None:
    """The file does not say it; to finish a round is final."""
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}"\n')
    (tmp_path / "resolved.json").write_text(load(file, ["learner.external=true"]).model_dump_json())
    done = CliRunner().invoke(app, ["finish", str(file)], input="n\n")
    assert (done.exit_code, "End the round?" in done.output) == (1, True)
