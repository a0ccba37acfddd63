"""Rounds of episodes for tests of engines: Sokoban, and an example with tools, played by a policy without skill.

- Whole tool calls are tokens of the policy's vocabulary, so that one without training calls tools in most turns.
- What is read of a round: the groups whose episodes are over, and the replay of a claim by the operator's command.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.transactions.turns import AcceptedTurn, chain
from protocol.policy.codec import PolicyCodec
from protocol.work.rollout import unpack_tokens
from tests.processes.programs import script, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"

MAKE_POLICY = """
import sys
from pathlib import Path
from coordinator.environments.games.sokoban import Sokoban
from coordinator.learner.embedded import EmbeddedShape, make_policy
folder, *calls = sys.argv[1:]
shape = EmbeddedShape(hidden=64, layers=2, heads=2, intermediate=96)
make_policy(Path(folder), seed=1, shape=shape, words=(*Sokoban().words, *calls))
"""

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class PlayedTask:
    """A task of several turns, and what only its environment writes into an episode."""

    settings: dict[str, Any]
    answer: str


TASKS = {
    "sokoban": PlayedTask({"name": "sokoban", "parameters.pulls": 4, "parameters.turns": 3}, "######\n"),
    "tools": PlayedTask({"name": str(EXAMPLE)}, "<tool>7\n"),
}


def playing_policy(folder: Path) -> Path:
    """Make an untrained policy, in a process of its own; its heads are the smallest that vLLM takes on a CPU."""
    calls = [_call("price", fruit=fruit) for fruit in ("apple", "pear", "plum", "melon", "fig", "lime")]
    calls += [_call("calculate", a=7, operation=operation, b=b) for operation in "+-*" for b in range(64)]
    subprocess.run([sys.executable, "-P", "-c", MAKE_POLICY, str(folder), *calls], check=True, capture_output=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def settings_of(task: PlayedTask, policy: Path) -> Settings:
    """The settings of a round that goes on for as long as a test looks."""
    return {
        "task": task.settings,
        "model": {"path": str(policy)},
        "episode": {"turn_tokens_max": 8},
        "sampling": {"samples_per_group": 8, "max_new_tokens": 320},
        "reward": {"timeout_s": 600.0, "processes": 1},
        **NOBODY_LEARNS,
    }


def played_groups(coordinator: Coordinator, node_id: str, least: int, *, within_s: float) -> list[list[AcceptedTurn]]:
    """The turns of groups with at least two turns, all taken by this node, once there are so many."""

    def look() -> list[list[AcceptedTurn]]:
        with coordinator.copy_of_store() as connection:
            ended = sa.text("SELECT lease_id FROM rollouts WHERE state = 'buffered' AND node_id = :node")
            leases = connection.execute(ended, {"node": node_id}).scalars().all()
            groups = [chain(connection, lease_id) for lease_id in leases]
        found = [turns for turns in groups if len(turns) > 1 and {turn.node_id for turn in turns} == {node_id}]
        return found if len(found) >= least else []

    return until(f"{least} groups to be played to their ends", look, within_s=within_s)


def episodes_of(groups: list[list[AcceptedTurn]], policy: Path) -> list[str]:
    """The texts of the episodes, up to their last turns."""
    codec = PolicyCodec((policy / "tokenizer.json").read_text())
    prefixes = [prefix for turns in groups for prefix in turns[-1].lease.prefixes]
    return [codec.decode(unpack_tokens(prefix.tokens).tolist()) for prefix in prefixes]


def replay(coordinator: Coordinator, claim: str) -> dict[str, Any]:
    """Return what the operator's command finds about a claim."""
    command = [script("swarm-coordinator"), "audit", "replay", str(coordinator.config_file), claim, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
