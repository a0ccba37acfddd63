"""Trouble that must not go unnoticed, or cost the node: swaps that are silently wrong, memory that ends, kill -9."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from protocol.errors import EngineFailed
from swarm_node.engine.client import open_engine
from swarm_node.engine.messages import GroupDone
from swarm_node.engine.vllm import command as vllm_command
from tests.swarm_node.engine.asking import asked

SABOTAGE = Path(__file__).with_name("sabotage.py")
DEADLINE_S = 1200.0


def test_stale_copies_of_weights_are_found_out_and_memory_that_ends_costs_no_sample(
    python: str, policy: Path, other: Path
) -> None:
    command = [python, "-P", str(SABOTAGE), str(policy), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stale, nothing_there, memory = done.stdout.splitlines()[-3:]
    assert "does not give its canary" in stale
    assert "cannot be loaded" in nothing_there
    assert memory == "fewer at once, the same tokens"


@pytest.mark.trio
async def test_kill_9_costs_the_requests_and_the_next_finds_a_new_child_in_bf16(python: str, policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(vllm_command.command(python, threads=1, dtype="bfloat16")) as engine:
            await engine.load(policy, 1)
            await engine.submit([asked([19], max_new_tokens=500)])
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await engine.finished()
            await engine.submit([asked([19], 8)])
            assert isinstance(await engine.finished(), GroupDone)
            assert engine.starts == 2
