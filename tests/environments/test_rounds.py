"""Whole rounds with each kind of environment: three nodes play, the tiny policy is trained for five updates."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.environments.serving import served
from tests.environments.test_nemo_gym_server import CounterServer, row
from tests.environments.test_openenv_server import LIBRARY, server
from tests.processes.conftest import tiny_policy

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("vault") is None or not LIBRARY.is_dir(),
        reason="the libraries are not installed here; make test-environments has them",
    ),
]

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)
HERE = Path(__file__).parent
UPDATES = 5
BASE = {
    "round.max_updates": UPDATES,
    "sampling.max_new_tokens": 256,
    "sampling.samples_per_group": 2,
    "episode.turns_max": 3,
    "episode.turn_tokens_max": 8,
    "learner.groups_per_update": 2,
    "staleness.max_updates": UPDATES,  # a slow machine makes groups old, which is no fault of an environment
    "data.size": 12,
    "leases.heartbeat_s": 0.2,
    "audit.tolerance": "torch/fp32/cpu",
    "reward.timeout_s": 120,
}


@contextmanager
def settings_of(kind: str, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a kind, while its server runs, if it has one."""
    task, file = HERE / "trl_task.py", folder / "train.jsonl"
    if kind == "nemo-gym":
        file.write_text("\n".join(json.dumps(row(number)) for number in range(12)))
        with served(CounterServer().app()) as url:
            yield {"url": url, "data": {"train": str(file)}}
    elif kind == "openenv":
        with server("words") as url:
            yield {"url": url, "text": "prompt", "prompt": "A game."}
    else:
        kinds: dict[str, dict[str, Any]] = {
            "trl": {"factory": f"{task}:Shop", "data": f"{task}:problems"},
            "reasoning-gym-tries": {"generator": "chain_sum", "tries": 3},
            "textarena": {"id": "GuessTheNumber-v0"},
            "verifiers": {"id": "vault", "args": {"prompted": False, "task": {"tool": False}}, "config": {"asks": 2}},
        }
        yield kinds[kind]


@pytest.mark.parametrize("kind", ["trl", "nemo-gym", "reasoning-gym-tries", "textarena", "verifiers", "openenv"])
def test_a_round_is_played_to_its_end(kind: str, tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "tiny")
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    with settings_of(kind, tmp_path) as parameters:
        task = f"[task]\nname = {json.dumps(kind)}\nparameters = {inline(parameters)}\n"
        (tmp_path / "round.toml").write_text(task)
        chosen = BASE | {"model.path": policy, "reward.network": "true"}
        options = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        out = tmp_path / "out.json"
        command = [sys.executable, "-m", "coordinator", "demo", str(tmp_path / "round.toml"), *options]
        done = subprocess.run(
            [*command, "--json", str(out), "--directory", str(tmp_path / "round")],
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(out.read_text())
    assert summary["outcome"].startswith(f"{UPDATES} updates")
    assert summary["rejected"] == {}
    assert summary["rollouts"]["accepted"] >= UPDATES * 2 * 2


def inline(value: Any) -> str:
    """Return a value as inline TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
