"""The reason why an agent ended: noted for its owner, and never hidden by the disk that cannot take the note."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import DiskFull, OwnerBanned
from swarm_node.cli import app
from swarm_node.commands.next_step import is_running
from swarm_node.keys import identity
from swarm_node.owner import stopped


def test_what_ended_an_agent_is_known_until_the_next_one_starts(tmp_path: Path) -> None:
    stopped.record_end(tmp_path, OwnerBanned("Two hard faults.", hint="Appeal."))
    last = stopped.last(tmp_path)
    assert last is not None
    assert (last["code"], last["hint"]) == ("owner_banned", "Appeal.")
    stopped.forget(tmp_path)
    assert stopped.last(tmp_path) is None


def test_a_disk_that_takes_no_note_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error out of here would be printed in the place of the one that ended the agent."""

    def full(*_: object, **__: object) -> None:
        raise DiskFull("There is no room left.")

    monkeypatch.setattr(stopped, "write_durably", full)
    stopped.record_end(tmp_path, OwnerBanned("Two hard faults."))
    assert stopped.last(tmp_path) is None


def test_a_script_gets_json_while_an_agent_starts_or_ends_and_not_the_end_of_the_one_before(tmp_path: Path) -> None:
    identity.load_or_create(tmp_path / identity.FILE)
    stopped.record_end(tmp_path, OwnerBanned("Two hard faults."))
    asked = ["status", "--home", str(tmp_path), "--json"]
    with identity.only_agent(tmp_path):
        between = CliRunner().invoke(app, asked)
    assert between.exit_code == 1
    said = json.loads(between.stdout)
    assert (said["code"], said["stopped"]) == ("no_agent", None)
    assert json.loads(CliRunner().invoke(app, asked).stdout)["stopped"]["code"] == OwnerBanned.code


def test_a_home_where_an_agent_starts_or_ends_needs_no_other(tmp_path: Path) -> None:
    """`swarm-node` would propose `swarm-node join`, which is refused then."""
    identity.load_or_create(tmp_path / identity.FILE)
    assert not is_running(tmp_path)
    with identity.only_agent(tmp_path):
        assert is_running(tmp_path)
