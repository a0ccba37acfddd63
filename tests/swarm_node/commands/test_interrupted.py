"""Ctrl-C while no agent runs: one sentence, and the exit code of shells."""

import pytest
import typer

from swarm_node.commands.join import interruptible


@interruptible
def interrupted() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_no_agent_runs_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        interrupted()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C. No agent is running.\n"
