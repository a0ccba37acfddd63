"""The engine's supervisor: whatever the child does, the agent gets groups or a named error, then a working child."""

import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import trio

from protocol.errors import EngineFailed
from protocol.rollout import pack_tokens, unpack_tokens
from swarm_node.engine.client import EngineClient, default_command, open_engine
from swarm_node.engine.messages import Request

pytestmark = pytest.mark.trio

FAKE = Path(__file__).with_name("fake_child.py")
DEADLINE_S = 120.0


def fake(fault: str) -> list[str]:
    return [sys.executable, str(FAKE), fault]


def request(name: str, *, max_new_tokens: int, samples: int = 2) -> Request:
    return Request(
        request_id=name,
        prompt=pack_tokens([19, 20, 31]),
        seed=1,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
    )


async def sample(engine: EngineClient, *requests: Request, seen: list[str], kill: bool = False) -> None:
    """Note the names of the groups as they come, and perhaps shoot the child after the first."""
    async with aclosing(engine.generate(requests)) as groups:
        async for group in groups:
            seen.append(group.request_id)
            if kill and engine.pid is not None:
                os.kill(engine.pid, signal.SIGKILL)


async def test_load_generate_and_measure(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(default_command(1)) as engine:
            loaded = await engine.load(policy)
            assert loaded.rebuilt
            assert loaded.parameters > 10_000
            async with aclosing(engine.generate([request("a", max_new_tokens=6, samples=3)])) as groups:
                (group,) = [group async for group in groups]
            assert len(group.samples) == 3
            assert all(1 <= len(unpack_tokens(sample.tokens)) <= 6 for sample in group.samples)
            assert await engine.measure_throughput(rows=4, new_tokens=4) > 0
            assert engine.starts == 1

            with pytest.raises(EngineFailed, match="positions"):
                await sample(engine, request("too long", max_new_tokens=30_000), seen=[])
            assert engine.starts == 1, "a failure that the child reports costs no child"
            pid = engine.pid
        assert pid is not None
        assert not psutil.pid_exists(pid)


async def test_kill_9_in_mid_generation_is_named_and_the_next_command_finds_a_new_child(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(default_command(1)) as engine:
            await engine.load(policy)
            seen: list[str] = []
            endless = request("long", max_new_tokens=500, samples=64)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await sample(engine, request("short", max_new_tokens=1), endless, seen=seen, kill=True)
            assert seen == ["short"]
            await sample(engine, request("again", max_new_tokens=1), seen=seen)  # the policy is loaded again
            assert seen == ["short", "again"]
            assert engine.starts == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "did not answer within 0.5 s"),
        ("dies", "SIGKILL"),
        ("prints", "announces a frame"),
        ("answers something else", "where GroupDone is due"),
    ],
)
async def test_a_child_that_misbehaves_is_replaced(fault: str, message: str) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake(fault), answer_timeout_s=0.5) as engine:
            for attempt in (1, 2):
                seen: list[str] = []
                with pytest.raises(EngineFailed, match=message):
                    await sample(engine, request("first", max_new_tokens=1), seen=seen)
                assert seen == ["first"]
                assert engine.pid is None
                assert engine.starts == attempt


async def test_a_generation_left_early_does_not_answer_the_next_command() -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("behaves")) as engine:
            await engine.load(Path())
            async with aclosing(engine.generate([request("first", max_new_tokens=1)])) as groups:
                async for _ in groups:
                    break
            assert await engine.measure_throughput() == 200.0


async def test_a_cancelled_generation_leaves_no_child_behind() -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("hangs")) as engine:
            await engine.load(Path())
            pid = engine.pid
            assert pid is not None
            with trio.move_on_after(0.2) as scope:
                await sample(engine, request("first", max_new_tokens=1), seen=[])
            assert scope.cancelled_caught
            assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("command", "message"),
    [(fake("dies at once"), "exit code 3"), (["/nowhere/swarm-node", "engine"], "does not start")],
)
async def test_an_engine_that_does_not_start_says_so(command: list[str], message: str) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(command) as engine:
            with pytest.raises(EngineFailed, match=message):
                await engine.load(Path())
