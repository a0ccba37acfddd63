"""The real swarm: coordinator and learner at the source, a node with its engine in each machine's place.

- The programs are the shipped ones but for the pace of engine and learner; links are capped by `bench.broadcast.net`.
- Nodes join before the learner starts, so that nothing but the first version is fetched by newcomers.
"""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from bench.anchor.books import Measured, measured
from bench.anchor.setting import AT_ONCE, TRAIN_S, Case, group_s, links, machines
from bench.broadcast.contender import PAYLOAD, SOURCE
from bench.broadcast.net import Net
from bench.broadcast.program import Line, Program, script
from coordinator.sim.machines import SimulatedNode

WARM_UP_POLICY = """
import sys
from pathlib import Path
import torch
from bench.learning.subjects import SUBJECTS
from bench.learning.training import start_of
torch.set_num_threads(1)
demo = next(subject for subject in SUBJECTS if subject.name == "arithmetic")
print(start_of(demo, 0, Path(sys.argv[1])))
"""
"""The program that warms up the policy, in a process of its own: what it imports is large."""

PATIENCE_S = 600.0
"""The limit until all have joined: eight programs and engines start at once, and the machine may have other work."""

LOOK_S = 0.5
"""The time between two looks into a store that other processes write."""

SLOWEST_UPDATE_S = 120.0
"""An update that takes longer than this will never end."""


def make_policy(folder: Path) -> Path:
    """The demo's policy after its warm start: it is right now and then, so that training changes every weight."""
    done = subprocess.run([sys.executable, "-P", "-c", WARM_UP_POLICY, str(folder)], check=True, stdout=subprocess.PIPE)
    return Path(done.stdout.decode().splitlines()[-1])


def play(case: Case, policy: Path, folder: Path) -> Measured:
    """Run one round from this policy to its end."""
    round_folder = folder / "round"
    folder.mkdir(parents=True)
    with Net(links()) as net, ExitStack() as running:
        address = net.address(SOURCE)
        config = folder / "round.toml"
        config.write_text(_toml(case.settings(round_folder, policy, address)))
        command = [script("swarm-coordinator"), "launch", str(config), "--no-learner", "--no-auditor"]
        coordinator = _started(running, net, SOURCE, command, folder)
        said = coordinator.heard("the join string", _joins, within_s=PATIENCE_S)
        nodes = [
            _started(running, net, node.name, _joining(node, said["text"].split()[-1], net, folder), folder)
            for node in machines()
        ]
        _wait_for_nodes(round_folder / "state.db", len(machines()), coordinator)
        command = [sys.executable, "-P", "-m", "bench.anchor.learner", str(round_folder), str(TRAIN_S)]
        learner = _started(running, net, SOURCE, command, folder, name="learner")
        learner.ended(within_s=PATIENCE_S + SLOWEST_UPDATE_S * case.updates)
        for node in nodes:
            if node.failed():
                raise RuntimeError(f"{node.party} did not hold out\n{node.last_words()}")
        logs = [folder / f"{node.party}.log" for node in nodes]
        weights = round_folder / "learner" / "publishing" / PAYLOAD
        return measured(round_folder / "state.db", weights.stat().st_size, logs)


def _joining(node: SimulatedNode, join_string: str, net: Net, folder: Path) -> list[str]:
    pace = f"--group-s {group_s(node)} --at-once {AT_ONCE}"
    options = ["--home", str(folder / "homes" / node.name), "--name", node.name, "--groups", str(AT_ONCE)]
    options += ["--listen", f"{net.address(node.name)}:4001", "--json"]
    return [sys.executable, "-P", "-m", "bench.anchor.node", pace, join_string, *options]


def _started(running: ExitStack, net: Net, party: str, command: list[str], folder: Path, *, name: str = "") -> Program:
    program = Program(net, party, command, folder / f"{name or party}.log")
    running.callback(program.end)
    return program


def _joins(line: Line) -> bool:
    """Return True for the line with the join string."""
    return "swarm-node join" in line.get("text", "")


def _wait_for_nodes(store: Path, count: int, coordinator: Program) -> None:
    """Wait until all nodes have registered."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            (registered,), *_ = connection.execute("SELECT count(*) FROM nodes")
        if registered == count:
            return
        time.sleep(LOOK_S)  # the store tells nobody of what changes
    raise TimeoutError(f"{count} nodes did not join\n{coordinator.last_words()}")


def _toml(sections: dict[str, dict[str, object]]) -> str:
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for name, keys in sections.items()
    )
