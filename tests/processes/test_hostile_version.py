"""A round whose operator is hostile, or careless: its first version's tokenizer amplifies what a node makes tokens of.

The node is the real program; the coordinator, too, and it publishes what it is given. The tokenizer does its harm with
one text alone, that of a node that measures itself, so that it harms nobody but nodes.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from protocol import limits
from protocol.tasks import stand_in
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings, join, node_id_of, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    **NOBODY_LEARNS,
    "sampling": {"samples_per_group": 2, "max_new_tokens": 8},
    "leases": {"heartbeat_s": 0.2},
}

GROWTH_MAX_BYTES = 64 * limits.MIB


def hostile(sound: Path, folder: Path) -> Path:
    """Write the policy with one text that becomes a million million characters."""
    shutil.copytree(sound, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    text = {"type": "Replace", "pattern": {"String": stand_in("arithmetic", 0)}, "content": "ÿ"}
    again = {"type": "Replace", "pattern": {"String": "ÿ"}, "content": "ÿ" * 10}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [text, *[again] * 12]}
    file.write_text(json.dumps(tokenizer))
    return folder


def most_memory(program: Program) -> int:
    """The most that a process has had at any time, in bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{program.process.pid}/status").read_text())
    assert match
    return int(match[1]) * 1024


def test_a_hostile_tokenizer_costs_its_version_and_the_node_goes_on_with_the_next(swarm: Swarm, policy: Path) -> None:
    """The earlier bug: the tokenizer took 3 GB of the agent in 20 s, heartbeats stopped, and Ctrl-C was ignored."""
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    node = join(swarm, "node", coordinator.join_string, "--engine", "llama")
    node_id = node_id_of(node)
    until("the node to register", lambda: node_id in coordinator.leaderboard())
    before = most_memory(node)

    operator.policy = hostile(policy, swarm.folder / "hostile")
    operator.publish()
    node.said(r"engine failed times=1: The policy's tokenizer took too much memory, and the engine ended\.")
    seen_ms = coordinator.leaderboard()[node_id]["last_seen_ms"]
    until("the heart to beat on", lambda: coordinator.leaderboard()[node_id]["last_seen_ms"] > seen_ms)
    assert most_memory(node) - before < GROWTH_MAX_BYTES

    operator.policy = policy
    operator.publish()
    node.said(r"version loaded version=2 ")
    until("the node to work", lambda: coordinator.accepted_groups() > 0)
    assert most_memory(node) - before < GROWTH_MAX_BYTES
    operator.policy = swarm.folder / "hostile"
    operator.publish()
    node.interrupt()
    assert "Traceback" not in node.log
