"""A real model in an environment of verifiers: SmolLM2-135M opens safes for five updates of its adapters."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".venv-real" / "smollm2"
UPDATES = 5

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("vault") is None,
        reason="verifiers is not installed here; make test-environments has it",
    ),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not here; make test-real makes it"),
]

SETTINGS = {
    "task.name": "verifiers",
    "task.parameters": '{id="vault", args={task={tool=false}}, config={asks=1}}',
    "model.path": MODEL,
    "reward.network": "true",
    "reward.timeout_s": 120,
    "round.max_updates": UPDATES,
    "data.size": 12,
    "episode.turns_max": 2,
    "episode.turn_tokens_max": 12,
    "sampling.max_new_tokens": 80,
    "sampling.samples_per_group": 2,
    "learner.groups_per_update": 1,
    "learner.lora_rank": 4,
    "staleness.max_updates": UPDATES,
    "audit.tolerance": "torch/fp32/cpu",
}


def test_a_real_model_is_trained_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    (tmp_path / "round.toml").write_text("")
    options = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "coordinator", "demo", str(tmp_path / "round.toml"), "--nodes", "1", *options]
    done = subprocess.run(
        [*command, "--json", str(out), "--directory", str(tmp_path / "round")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(out.read_text())
    assert summary["outcome"].startswith(f"{UPDATES} updates")
    assert summary["rejected"] == {}
    assert summary["rollouts"]["accepted"] >= UPDATES * 2
