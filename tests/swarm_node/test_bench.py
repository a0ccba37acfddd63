"""`swarm-node bench`: what it measures, and what it refuses to measure."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import ConfigInvalid
from swarm_node import bench
from swarm_node.cli import app
from swarm_node.engine.choose import ENGINES, Options
from swarm_node.engine.messages import Measured
from swarm_node.join_string import JoinString
from swarm_node.throughput import Throughput
from tests.tiny_policy import make_tiny_policy

DEADLINE_S = 120.0


def test_a_policy_folder_is_measured(tmp_path: Path) -> None:
    folder = make_tiny_policy(tmp_path / "policy")
    program = ENGINES["torch"].command(Options())[0]
    options = ["--max-new-tokens", "3", "--samples", "2", "--groups", "2", "--batches", "2", "--json"]
    done = subprocess.run([program, "bench", str(folder), *options], capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 8 <= result["tokens"] <= 24, (
        "eight completions of one to three tokens; those of the first batch do not count"
    )
    assert min(result.values()) > 0


def test_rates_are_over_the_time_they_belong_to() -> None:
    measured = Measured(prompt_tokens=30, first_tokens=10, prefill_s=2.0, later_tokens=50, decode_s=4.0)
    assert Throughput.of(measured) == Throughput(
        tokens_per_s=10.0, prompt_tokens_per_s=15.0, decoded_tokens_per_s=12.5, tokens=60
    )
    nothing = Measured(prompt_tokens=0, first_tokens=0, prefill_s=0.0, later_tokens=0, decode_s=0.0)
    assert Throughput.of(nothing).tokens_per_s == 0.0


def test_a_round_that_this_home_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="holds no version of this round"):
        bench.held(tmp_path, JoinString("http://127.0.0.1:1", "0" * 64))
    refused = CliRunner().invoke(app, ["bench", "http://127.0.0.1:1#short"])
    assert isinstance(refused.exception, ConfigInvalid)
