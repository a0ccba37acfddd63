"""A round on this machine for a bench: a coordinator, a version of a policy with random weights, and nodes.

- Nobody learns: nothing but the nodes' work is measured.
- The programs are the shipped ones, of this checkout or of another one, and run where `command` puts them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import ROOT
from coordinator.learner.client import CoordinatorClient
from tests.processes.programs import free_address, script

MAKE_POLICY = """
import sys
from pathlib import Path
from coordinator.learner.embedded import make_policy
make_policy(Path(sys.argv[1]), seed=1)
"""

PATIENCE_S = 180.0
"""The limit until a program says what is awaited: it imports much, and the machine may have other work."""

LOOK_S = 0.1
END_S = 30.0


def make_policy(folder: Path) -> Path:
    """Write the policy, in a process of its own: it imports torch."""
    subprocess.run([sys.executable, "-P", "-c", MAKE_POLICY, str(folder)], check=True, capture_output=True)
    return folder


@dataclass
class BenchRound:
    """A running round; `close` ends its programs."""

    folder: Path
    policy: Path
    settings: Mapping[str, object]
    """Settings such as `task.name`; the round adds its folder and addresses."""
    code: Path = ROOT
    host: str = "127.0.0.1"
    command: Callable[[str, Sequence[str]], Sequence[str]] = field(default=lambda party, words: words)
    """Returns the command line with which a party, `coordinator` or `node`, runs a program."""
    call: Callable[[str, Callable[[], None]], None] = field(default=lambda party, work: work())
    """Calls a function in a party's place."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.config = self.folder / "round.toml"
        self._programs: list[subprocess.Popen[bytes]] = []
        self.join_string = self.address = ""

    def __enter__(self) -> "BenchRound":
        try:
            self._launch()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self, name: str, *options: str, program: Sequence[str] = ()) -> None:
        """Start a node; `program` replaces `swarm-node join`."""
        words = [*(program or (script("swarm-node"), "join")), self.join_string, "--home", str(self.folder / name)]
        self._start("node", name, [*words, "--name", name, "--threads", "1", "--engine", "torch", *options])

    def wait_for(self, what: str, is_there: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
        """Wait until something holds; fail if a program has ended."""
        deadline = time.monotonic() + within_s
        while not is_there():
            if any(program.poll() is not None for program in self._programs) or time.monotonic() > deadline:
                raise RuntimeError(f"No {what} came in {within_s:g} s.\n{self._last_words()}")
            time.sleep(LOOK_S)  # files and stores tell nobody when they change

    def close(self) -> None:
        """End all programs, as Ctrl-C does."""
        for program in reversed(self._programs):
            if program.poll() is None:
                program.send_signal(signal.SIGINT)
        for program in self._programs:
            try:
                program.wait(END_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def _launch(self) -> None:
        self.address = address = free_address() if self.host == "127.0.0.1" else f"{self.host}:8700"
        seeder = free_address() if self.host == "127.0.0.1" else f"{self.host}:8701"
        settings = {**self.settings, "round.listen": address, "round.seeder": seeder}
        self.config.write_text(_toml(settings | {"round.directory": str(self.folder / "round")}))
        command = [script("swarm-coordinator"), "launch", str(self.config), "--no-learner", "--no-auditor", "--plain"]
        self._start("coordinator", "coordinator", command)
        self.wait_for("join string", lambda: bool(self._said_join()))
        self.join_string = self._said_join()
        self.call("coordinator", lambda: self._publish(address))

    def _publish(self, address: str) -> None:
        client = CoordinatorClient(f"http://{address}", (self.folder / "round" / "operator.token").read_text())
        try:
            client.publish(1, 0, self.policy)
        finally:
            client.close()

    def _said_join(self) -> str:
        lines = (self.folder / "coordinator.log").read_text(errors="replace").splitlines()
        return next((line.split()[-1] for line in lines if "swarm-node join " in line), "")

    def _start(self, party: str, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(self.code), "HF_HUB_OFFLINE": "1"}
            line = self.command(party, command)
            started = subprocess.Popen(line, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._programs.append(started)

    def _last_words(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs)


def _toml(settings: Mapping[str, object]) -> str:
    """Return settings such as `task.name` as a file; the value of a table is written in one line."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
