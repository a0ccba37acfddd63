"""docs/recording.md, a terminal session of an operator and of a node's owner, as it really goes: `make recording`.

- Every command is the shipped one, on a terminal of its own; what it prints is what stands there. Of a view that is
  drawn again and again the log and the last picture are kept.
- Only the scratch folder and the ports are named otherwise, so that two recordings differ in what matters.
"""

import re
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.processes.conftest import tiny_policy
from tests.processes.programs import Program, Swarm, script, until
from tests.processes.rounds import Coordinator
from tests.tidy.repository import ROOT

TARGET = ROOT / "docs" / "recording.md"
COLUMNS, LINES = 100, 40
PANEL = re.compile(r"╭─ .*?╰─+╯", re.DOTALL)
STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")

HEAD = """# A session, as text

Made by `make recording` from real commands on a round with one node. Lines that begin with `$` are typed; amounts are
in credits, the default unit, and the policy is a tiny one that knows nothing.
"""

SETTINGS: dict[str, dict[str, Any]] = {
    "round": {"max_updates": 1000},
    "sampling": {"max_new_tokens": 4, "samples_per_group": 16},
    "staleness": {"max_updates": 20, "publish_every": 2},
    "learner": {"groups_per_update": 8, "learning_rate": 1e-3, "weight_decay": 0.1},
    "objective": {"beta": 0.01},  # where nothing is rewarded, decay and the pull back from it move the weights
}


class Session:
    """The typed commands and their output."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.parts = [HEAD]

    def heading(self, title: str, said: str) -> None:
        self.parts.append(f"\n## {title}\n\n{said}\n")

    def type(self, *words: str) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            ["script", "-qefc", self._line(words), "/dev/null"], capture_output=True, text=True, check=False
        )
        self.show(words, done.stdout)

    def begin(self, name: str, *words: str) -> Program:
        """Start a command that stays."""
        return self._swarm.start(name, "script", "-qefc", self._line(words), "/dev/null")

    def show(self, words: tuple[str, ...], output: str) -> None:
        text = STEERING.sub("", output).strip("\n")
        panels = PANEL.findall(text)
        kept = PANEL.sub("", text).strip("\n") if panels else text
        lines = [line.rstrip() for line in [*kept.splitlines(), *(panels[-1].splitlines() if panels else [])]]
        typed = shlex.join(words).replace("'", '"')
        told = "\n".join(line for line in lines if line)
        self.parts.append(f"\n```\n$ {typed}\n{told}\n```\n")

    def _line(self, words: tuple[str, ...]) -> str:
        size = ["env", f"COLUMNS={COLUMNS}", f"LINES={LINES}", "TERM=xterm-256color"]
        return shlex.join([*size, script(words[0]), *words[1:]])

    def text(self, *known: tuple[str, str]) -> str:
        """All of it, without this machine."""
        text = "".join(self.parts)
        for secret, shown in known:
            text = text.replace(secret, shown)
        return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8700", text)


def record(folder: Path) -> str:
    """The whole session."""
    swarm = Swarm(folder)
    session = Session(swarm)
    try:
        _play(swarm, session, folder)
    finally:
        swarm.close()
    return session.text((str(folder), "~/echo"), (str(ROOT), "~/echo-swarm"), (str(Path.home()), "~"))


def _play(swarm: Swarm, session: Session, folder: Path) -> None:
    policy = tiny_policy(folder / "policy")
    coordinator = Coordinator(swarm, SETTINGS | {"model": {"path": str(policy)}}).start(learner=True)
    file, join, home = str(coordinator.config_file), coordinator.join_string, str(folder / "node")
    coordinator.reaches("version", 1)
    session.heading("A volunteer looks before joining", "Nothing is kept and no model is fetched.")
    session.type("swarm-node", "doctor", join, "--home", home, "--no-engines")
    session.heading(
        "The node at work",
        "The log, and below it a view that is drawn anew every second; `swarm-node status` prints the same.",
    )
    words = ("swarm-node", "join", join, "--home", home, "--name", "rig1@heron")
    node = session.begin("node", *words)
    coordinator.reaches("update", 6)
    until("the node's view", lambda: PANEL.findall(STEERING.sub("", node.output)))
    session.show(words, node.output)
    session.heading("Its owner, in another terminal", "Chunks are passed on while it rests.")
    for command in ("pause", "resume"):
        session.type("swarm-node", command, "--home", home)
    coordinator.reaches("update", int(coordinator.status()["update"]) + 4)
    session.heading("The operator", "One screen; its first line says whether the learner waits, and why.")
    session.type("swarm-coordinator", "status", file)
    session.type("swarm-coordinator", "nodes", "list", file)
    before = str(int(coordinator.status()["version"]) - 8)
    session.type("swarm-coordinator", "policy", "rollback", file, before, "--reason", "to show how it goes")
    coordinator.reaches("update", int(coordinator.status()["update"]) + 4)
    session.type("swarm-coordinator", "policy", "list", file, "--last", "3")
    session.heading("The end", "What is earned stays with the node's key.")
    session.type("swarm-node", "leave", "--home", home)
    node.process.wait(timeout=60)
    session.type("swarm-node", "status", "--home", home)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        TARGET.write_text(record(Path(scratch) / "echo"))
