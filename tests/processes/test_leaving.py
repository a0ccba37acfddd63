"""An owner who watches an agent on a terminal and has it leave: what is drawn, what goes back, and what is said."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings, operator_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not shutil.which("script"), reason="no program that makes terminals"),
]

GROUPS = 8
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 32, "max_new_tokens": 300},
    **NOBODY_LEARNS,
    "leases": {"groups_per_request": GROUPS, "newcomer_leases": GROUPS},
}
COLUMNS = 100
ERASED_LINE = "\x1b[2K"


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    return coordinator


def plain(text: str) -> str:
    """Return the text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_live_view_is_drawn_below_the_log_and_goes_when_the_agent_leaves(
    swarm: Swarm, coordinator: Coordinator
) -> None:
    home = swarm.folder / "home"
    join = [script("swarm-node"), "join", coordinator.join_string, "--home", str(home), "--name", "watched"]
    on_a_terminal = shlex.join(["env", f"COLUMNS={COLUMNS}", "LINES=40", "TERM=xterm-256color", *join])
    node = swarm.start("watched", "script", "-qefc", on_a_terminal, "/dev/null")
    until("the node to have leases", lambda: coordinator.open_leases() == GROUPS)
    until("the panel to say so", lambda: f"{GROUPS} groups" in plain(node.output))

    shown = plain(node.output)
    assert "node started" in shown, "log lines stand above it"
    assert "watched at http" in shown
    assert "Ctrl-C leaves" in shown
    drawn = shown[shown.index("node started") :]  # the lines before are printed once, and wrapped by the terminal
    assert [line for line in drawn.splitlines() if len(line) > COLUMNS] == []
    assert ERASED_LINE in node.output, "it is drawn in its place, not again and again"

    left = subprocess.run(
        [script("swarm-node"), "leave", "--home", str(home)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (left.returncode, left.stderr) == (0, "")
    assert "Stopping: unfinished work is returned to the coordinator." in left.stdout
    assert node.process.wait(timeout=PATIENCE_S) == 0
    assert coordinator.open_leases() == 0, "others may have them at once"
    ((node_id, row),) = coordinator.leaderboard().items()
    assert row["phase"] == "left", "the last heartbeat says so"
    assert set(coordinator.leases_of(node_id).values()) <= {"skipped", "accepted"}
    assert "Accepted" in plain(node.output).splitlines()[-1]
