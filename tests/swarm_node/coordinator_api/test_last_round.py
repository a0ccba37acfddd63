"""The round that a home joined last: stored whole, read back, and meant by commands without a join string."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import ConfigInvalid, SwarmError, Unreachable
from protocol.people.names import nickname
from swarm_node.base.disk import DiskFailed
from swarm_node.cli import app
from swarm_node.commands.next_step import find_next_step
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import parse, round_folder
from swarm_node.keys import identity
from swarm_node.work import records

FIRST = parse(f"http://127.0.0.1:9#{'a' * 64}")
CLOSED = parse(f"http://127.0.0.1:10#{'c' * 64}")
SECOND = parse(f"https://swarm.example.org/round#{'b' * 64}")


def test_a_join_string_is_written_as_it_was_read() -> None:
    assert str(SECOND) == f"https://swarm.example.org/round#{'b' * 64}"


def test_brackets_without_an_address_are_no_join_string() -> None:
    with pytest.raises(ConfigInvalid, match="not a join string"):
        parse(f"http://[#{'a' * 64}")


def test_the_last_round_replaces_the_one_before_and_is_readable_by_its_user_only(tmp_path: Path) -> None:
    assert last_round.find_last(tmp_path) is None
    last_round.record_joined(tmp_path, [FIRST], "rig1@heron")
    last_round.record_joined(tmp_path, [SECOND], "")
    assert last_round.find_last(tmp_path) == (SECOND, "", True, ())
    assert last_round.chosen("", tmp_path) == SECOND
    assert last_round.chosen(str(FIRST), tmp_path) == FIRST
    assert (tmp_path / last_round.FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [last_round.FILE]


def test_several_rounds_are_remembered_in_their_order(tmp_path: Path) -> None:
    last_round.record_joined(tmp_path, [SECOND, FIRST], "rig1")
    assert last_round.find_last(tmp_path) == (SECOND, "rig1", True, (FIRST,))
    assert last_round.all_chosen("", tmp_path) == [SECOND, FIRST]
    assert last_round.all_chosen(str(FIRST), tmp_path) == [FIRST]
    assert last_round.chosen("", tmp_path) == SECOND
    assert last_round.find_by_url(tmp_path, [FIRST.url]) == FIRST


@pytest.mark.parametrize("text", ["http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:9/"])
def test_the_address_of_a_joined_round_means_that_round(tmp_path: Path, text: str) -> None:
    last_round.record_joined(tmp_path, [SECOND, FIRST], "")
    assert last_round.chosen(text, tmp_path) == FIRST


def test_the_address_of_another_round_needs_the_fingerprint_and_the_hint_shows_where(tmp_path: Path) -> None:
    last_round.record_joined(tmp_path, [SECOND], "")
    with pytest.raises(ConfigInvalid, match=r"^'rounds\.example\.org' is not a join string, and") as refused:
        last_round.chosen("rounds.example.org", tmp_path)
    assert "http://rounds.example.org#FINGERPRINT" in refused.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"join_string": 3}', '{"join_string": "x", "name": ""}', '"ab"'])
def test_an_unreadable_record_is_named_and_does_not_prevent_joining(tmp_path: Path, text: str) -> None:
    (tmp_path / last_round.FILE).write_text(text)
    with pytest.raises(ConfigInvalid, match=last_round.FILE):
        last_round.chosen("", tmp_path)
    assert last_round.chosen(str(FIRST), tmp_path) == FIRST
    assert last_round.name_of(tmp_path) == ""


def test_a_disk_that_takes_no_file_does_not_end_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last_round.record_joined(tmp_path / "missing", [FIRST], "")
    assert "not remembered" in caplog.text


@pytest.mark.parametrize(
    ("given", "split"),
    [
        (("", ""), ("", "")),
        (("4f5a", ""), ("", "4f5a")),
        ((str(FIRST), ""), (str(FIRST), "")),
        ((str(FIRST), "4f5a"), (str(FIRST), "4f5a")),
        (("127.0.0.1:9", "4f5a"), ("127.0.0.1:9", "4f5a")),
        (("text:https://me", ""), ("", "text:https://me")),
    ],
)
def test_a_join_string_before_another_argument_may_be_left_out(given: tuple[str, str], split: tuple[str, str]) -> None:
    assert last_round.with_round(*given) == split


def test_two_arguments_need_a_round_first(tmp_path: Path) -> None:
    refused = failure("ledger", "check", "4f5a", "more", home=tmp_path)
    assert "'4f5a' is not a join string, and this node" in str(refused)


ADDRESS = "evm:0x52908400098527886E0F7030069857D2E4169EE7"


def failure(*words: str, home: Path) -> SwarmError:
    found = CliRunner().invoke(app, [*words, "--home", str(home)])
    assert isinstance(found.exception, SwarmError), (found.output, found.exception)
    return found.exception


COMMANDS = pytest.mark.parametrize(
    "words",
    [
        ("earnings",),
        ("why",),
        ("why", "4" * 32),
        ("appeal", "4" * 32),
        ("ledger", "verify"),
        ("ledger", "payouts"),
        ("ledger", "witness"),
    ],
    ids=" ".join,
)


@COMMANDS
def test_a_command_without_a_join_string_asks_the_round_that_was_joined_last(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    identity.load_or_create(tmp_path / identity.FILE)
    last_round.record_joined(tmp_path, [FIRST], "")
    error = failure(*words, home=tmp_path)
    assert isinstance(error, Unreachable)
    assert FIRST.url in str(error)


@pytest.mark.parametrize("words", [("verify",), ("payouts",), ("witness",)], ids=" ".join)
def test_commands_about_the_ledger_name_each_joined_round(tmp_path: Path, words: tuple[str, ...]) -> None:
    identity.load_or_create(tmp_path / identity.FILE)
    last_round.record_joined(tmp_path, [FIRST, CLOSED], "")
    found = CliRunner().invoke(app, ["ledger", *words, "--home", str(tmp_path)])
    assert found.exit_code == 1
    for join in (FIRST, CLOSED):
        assert f"\n{join.url}: " in f"\n{found.stderr}"


def test_an_appeal_goes_to_the_round_that_gave_the_lease(tmp_path: Path) -> None:
    identity.load_or_create(tmp_path / identity.FILE)
    last_round.record_joined(tmp_path, [FIRST, CLOSED, SECOND], "")
    folder = round_folder(tmp_path, CLOSED)
    folder.mkdir(parents=True)
    (folder / records.FILE).write_text(f"\n{'4' * 32} {'d' * 64}")
    assert CLOSED.url in str(failure("appeal", "4" * 32, home=tmp_path))


@pytest.mark.parametrize("words", [("ledger", "verify", "--save", "files"), ("audit-learner", "--update", "1")])
def test_a_command_about_one_round_asks_which_of_several(tmp_path: Path, words: tuple[str, ...]) -> None:
    if words[0] == "audit-learner":
        pytest.importorskip("torch")
    last_round.record_joined(tmp_path, [FIRST, SECOND], "")
    error = failure(*words, home=tmp_path)
    assert f"has joined 2 rounds ({FIRST.url}, {SECOND.url})" in str(error)


@COMMANDS
def test_without_a_last_round_a_command_says_what_to_give(tmp_path: Path, words: tuple[str, ...]) -> None:
    error = failure(*words, home=tmp_path)
    assert "has not joined a round yet" in str(error)
    assert "Give the address or the join string of a round" in str(error.hint)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("appeal",), "needs a lease"),
        (("keys", "address"), "needs a payout address"),
        (("ledger", "check"), "needs a proof file"),
        (("ledger", "check", "/missing"), "/missing cannot be read (No such file or directory)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_missing_argument_is_named(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    last_round.record_joined(tmp_path, [FIRST], "")
    assert said in str(failure(*words, home=tmp_path))


@pytest.mark.parametrize("command", ["join", "mirror"])
def test_a_member_without_a_join_string_starts_in_the_last_round(tmp_path: Path, command: str) -> None:
    """The agent's lock is a folder, so that it ends where it would start."""
    last_round.record_joined(tmp_path, [FIRST], "rig1@heron")
    (tmp_path / "agent.lock").mkdir()
    engine = ("--engine", "torch") if command == "join" else ()
    assert isinstance(failure(command, "--quiet", *engine, home=tmp_path), DiskFailed)


def test_a_home_in_use_is_refused_before_any_round_is_asked(tmp_path: Path) -> None:
    with identity.only_agent(tmp_path):
        found = CliRunner().invoke(app, ["join", str(FIRST), "--engine", "torch", "--home", str(tmp_path)])
    assert str(found.exception).startswith(f"Another agent is running in {tmp_path}.")
    assert "Demand" not in found.output
    assert not (tmp_path / identity.FILE).exists(), "nothing was done before"


@pytest.mark.parametrize("target", ["http://127.0.0.1:9#0123", "ftp://127.0.0.1"])
def test_a_broken_join_string_is_refused_before_the_machine_is_examined(tmp_path: Path, target: str) -> None:
    error = failure("join", target, "--engine", "llama", "--dtype", "exact", home=tmp_path)
    assert "join string" in str(error)


def test_members_get_the_given_name_then_the_last_one_then_a_nickname(tmp_path: Path) -> None:
    from swarm_node.commands.join import build_member
    from swarm_node.commands.options import ReachOptions

    def named(name: str | None) -> tuple[str, str]:
        settings = build_member(str(FIRST), tmp_path, name, ReachOptions(), {})
        return settings.name, settings.given_name

    generated = nickname(identity.load_or_create(tmp_path / identity.FILE).key.node_id)
    assert named(None) == (generated, "")
    assert named("rig1@heron") == ("rig1@heron", "rig1@heron")
    last_round.record_joined(tmp_path, [FIRST], "rig1@heron")
    assert named(None) == ("rig1@heron", "rig1@heron")
    assert named("") == (generated, "")


def test_a_page_that_was_turned_off_stays_off_until_it_is_turned_on(tmp_path: Path) -> None:
    """A mirror, which has no page, keeps the choice; so does a record of a release before it."""
    from swarm_node.commands.join import build_member
    from swarm_node.commands.options import ReachOptions

    def has_page(page: bool | None) -> bool:
        return build_member(str(FIRST), tmp_path, None, ReachOptions(), {}, page=page).page

    assert has_page(None)
    assert not has_page(False)
    last_round.record_joined(tmp_path, [FIRST], "", page=False)
    assert not has_page(None)
    assert has_page(True)
    (tmp_path / last_round.FILE).write_text(json.dumps({"join_string": str(FIRST), "name": ""}))
    assert has_page(None)


def test_the_program_alone_says_what_to_run_next(tmp_path: Path) -> None:
    step = find_next_step(tmp_path, "")
    assert (step.said, step.command) == (
        f"The node in {tmp_path} has not joined a round yet.",
        "swarm-node join HOST",
    )
    (tmp_path / last_round.FILE).write_text("{")
    assert find_next_step(tmp_path, "").command == "swarm-node join HOST"
    last_round.record_joined(tmp_path, [FIRST], "")
    step = find_next_step(tmp_path, "")
    assert (step.command, FIRST.url in step.said) == ("swarm-node join", True)
    said = CliRunner().invoke(app, [])
    assert said.exit_code == 0
    assert "Next:  swarm-node " in said.output
    assert "swarm-node --help" in said.output
    assert "Usage:" in CliRunner().invoke(app, ["--help"]).output


def test_the_next_step_names_all_rounds_of_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.commands.next_step.has_engine", lambda vllm_python: True)  # there may be none
    last_round.record_joined(tmp_path, [FIRST, SECOND], "")
    assert f"Its last rounds: {FIRST.url}, {SECOND.url}" in find_next_step(tmp_path, "").said
    last_round.record_joined(tmp_path, [FIRST], "")
    assert find_next_step(tmp_path, "").said.endswith(f"Its last round: {FIRST.url}")
