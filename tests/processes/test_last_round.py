"""Commands without a join string mean the round that accepted this node last, with the name that was given."""

import json
import subprocess
from pathlib import Path

import pytest

from swarm_node.coordinator_api.last_round import FILE
from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"sampling": {"samples_per_group": 2, "max_new_tokens": 8}, **NOBODY_LEARNS}


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home.parent), "SWARM_HOME": str(home), "PATH": "/usr/bin:/bin"}
    full = [script("swarm-node"), *words]
    return subprocess.run(full, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow
def test_an_owner_types_the_join_string_once(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    home = swarm.folder / "owner" / "home"
    assert "swarm-node join HOST" in command(home).stdout

    def start(*words: str) -> None:
        options = ("--home", str(home), "--threads", "1", "--json")
        node = swarm.start("node", script("swarm-node"), "join", *words, *options)
        node.said("registered")
        until("the round to be remembered", (home / FILE).exists)
        assert json.loads((home / FILE).read_text())["name"] == "rig1@heron"
        assert "Next:  swarm-node status" in command(home).stdout
        until("accepted work", lambda: int(json.loads(command(home, "status", "--json").stdout)["accepted"]) > 0)
        node.interrupt()

    start(coordinator.join_string, "--name", "rig1@heron")
    assert "Next:  swarm-node join\n" in command(home).stdout
    for words in (("why",), ("earnings", "--json"), ("ledger", "verify", "--json"), ("ledger", "receipts", "--json")):
        ran = command(home, *words)
        assert ran.returncode == 0, ran
    named = json.loads(command(home, "earnings", "--json").stdout)["nodes"]
    assert [row["name"] for row in named] == ["rig1@heron"]
    wrong = command(home, "earnings", f"{coordinator.join_string[:-64]}{'0' * 64}")
    assert wrong.returncode != 0
    start()
    assert_ledger_is_sound(coordinator)
