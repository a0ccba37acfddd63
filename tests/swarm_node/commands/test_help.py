"""Help texts of `swarm-node`: whole sentences, and names of options and arguments that are true."""

import pytest
from typer.testing import CliRunner

from swarm_node.cli import app


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, (*words, "--help"), env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("group", [("keys",), ("keys", "owner"), ("ledger",), ("directory",)])
def test_the_list_of_a_group_cuts_no_sentence(group: tuple[str, ...]) -> None:
    listed = help_of(*group).partition("Commands:")[2]
    assert listed
    assert "..." not in listed


def test_arguments_and_exit_codes_are_what_they_are_called() -> None:
    assert "MINUTES" in help_of("snooze")
    assert "names the round" not in help_of("rounds")
    assert "also without a running agent" in help_of("limits")
    assert "no agent is running" in help_of("pause")


@pytest.mark.parametrize("command", [(), ("join",)])
def test_the_way_to_run_at_boot_and_to_update_is_named(command: tuple[str, ...]) -> None:
    assert "--service JOIN_STRING" in help_of(*command)
    assert "to update, run the installer again" in help_of(*command)
