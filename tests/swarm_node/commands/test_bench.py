"""`swarm-node bench`: what it measures, and what it refuses to measure."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol import limits
from protocol.errors import ConfigInvalid
from swarm_node.cli import app
from swarm_node.commands import bench
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.engine import memory
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.messages import SamplingStats
from swarm_node.engine.throughput import Throughput
from tests.swarm_node.engine.hostile_tokenizers import make_hostile
from tests.tiny_policy import make_tiny_policy

DEADLINE_S = 120.0
MEMORY_MAX_BYTES = 250 * limits.MIB
"""The command has 130 MB when its libraries are imported."""


def test_a_policy_folder_is_measured(tmp_path: Path) -> None:
    folder = make_tiny_policy(tmp_path / "policy")
    program = ENGINES["torch"].command(EngineOptions())[0]
    options = ["--max-new-tokens", "3", "--samples", "2", "--groups", "2", "--batches", "2", "--json"]
    done = subprocess.run([program, "bench", str(folder), *options], capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 8 <= result["tokens"] <= 24, (
        "eight completions of one to three tokens; those of the first batch do not count"
    )
    assert min(result.values()) > 0


def test_a_total_above_its_parts_is_explained() -> None:
    said = bench.speed_text(Throughput(4103.0, 2279.0, 3648.0, 461))
    assert said.startswith("4,103 tokens per second, over 461 tokens. Prompts are read at 2,279 tokens per second.")
    assert said.endswith("The first token of a completion comes with its prompt, and counts in the total only.")
    assert "first token" not in bench.speed_text(Throughput(3000.0, 2279.0, 3648.0, 461))


def test_a_hostile_tokenizer_takes_the_memory_of_the_engine_and_not_of_the_command(tmp_path: Path) -> None:
    """The attack of nested replacements: six characters become a billion. It took 3 GB of this process in 12 s."""
    folder = make_hostile(tmp_path / "hostile", make_tiny_policy(tmp_path / "policy"), "normalizer Replace")
    program = ENGINES["llama"].command(EngineOptions())[0]
    largest = 0
    with subprocess.Popen(
        [program, "bench", str(folder), "--engine", "llama"], stderr=subprocess.PIPE, text=True
    ) as done:
        while done.poll() is None:
            largest = max(largest, memory.resident_bytes(done.pid) or 0)
            if largest > MEMORY_MAX_BYTES:
                done.kill()
            with suppress(subprocess.TimeoutExpired):
                done.wait(0.05)
        assert done.stderr is not None
        said = done.stderr.read().splitlines()[-1]
    assert largest < MEMORY_MAX_BYTES
    assert done.returncode == 1
    assert said.startswith("swarm-node: The policy's tokenizer took too much memory, and the engine ended.")


def test_rates_are_over_the_time_they_belong_to() -> None:
    measured = SamplingStats(prompt_tokens=30, first_tokens=10, prefill_s=2.0, later_tokens=50, decode_s=4.0)
    assert Throughput.of(measured) == Throughput(
        tokens_per_s=10.0, prompt_tokens_per_s=15.0, decoded_tokens_per_s=12.5, tokens=60
    )
    nothing = SamplingStats(prompt_tokens=0, first_tokens=0, prefill_s=0.0, later_tokens=0, decode_s=0.0)
    assert Throughput.of(nothing).tokens_per_s == 0.0


def test_a_round_that_this_home_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="holds no version of this round"):
        bench.newest_held_version(tmp_path, JoinString("http://127.0.0.1:1", "0" * 64))
    refused = CliRunner().invoke(app, ["bench", "http://127.0.0.1:1#short"])
    assert isinstance(refused.exception, ConfigInvalid)
