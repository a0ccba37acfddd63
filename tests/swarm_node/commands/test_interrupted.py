"""Ctrl-C before the agent has started: one sentence, and the exit code of shells."""

import pytest
import typer

from swarm_node.commands.join import interruptible


@interruptible
def interrupted() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_the_agent_started_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        interrupted()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C before the node joined the round.\n"
