"""The engine's supervisor: whatever the child does, the agent gets groups or a named error, then a working child."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from protocol import limits
from protocol.errors import EngineFailed
from protocol.work.lease import Prefix
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_node.allowance import settings
from swarm_node.commands.options import EngineChoice, EngineName
from swarm_node.engine import memory
from swarm_node.engine.choose import ENGINES, EngineOptions, for_policy
from swarm_node.engine.client import EngineClient, open_engine
from swarm_node.engine.messages import GroupDone, GroupFailed, SampleRequest

pytestmark = pytest.mark.trio

FAKE = Path(__file__).with_name("fake_child.py")
DEADLINE_S = 120.0


def fake(fault: str) -> list[str]:
    return [sys.executable, str(FAKE), fault]


def request(name: str, *, max_new_tokens: int = 1, samples: int = 2, version: int = 1) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        version=version,
        prompt=pack_tokens([19, 20, 31]),
        seed=1,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
    )


ENDLESS = request("endless", max_new_tokens=500, samples=64)


async def ends(engine: EngineClient) -> list[str]:
    """The requests that still end, in order; one that failed with its message."""
    seen = []
    while group := await engine.finished():
        said = f"{group.request_id}: {group.message}" if isinstance(group, GroupFailed) else group.request_id
        seen.append(said)
    return seen


async def test_load_generate_measure_and_cancel(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(ENGINES["torch"].command(EngineOptions())) as engine:
            loaded = await engine.load(policy, 1)
            assert loaded.rebuilt
            assert loaded.parameters > 10_000
            await engine.submit([request("a", max_new_tokens=6, samples=3)])
            group = await engine.finished()
            assert isinstance(group, GroupDone)
            assert len(group.samples) == 3
            assert all(1 <= len(unpack_tokens(sample.tokens)) <= 6 for sample in group.samples)
            assert await engine.finished() is None
            measured = await engine.measured()
            assert measured.first_tokens == 3
            assert measured.prefill_s > 0

            await engine.submit([request("too long", max_new_tokens=30_000), request("old", version=2), request("b")])
            first, second, third = await ends(engine)
            assert first.startswith("too long: A prompt of 3 tokens and 30000 new ones pass")
            assert second == "old: A request for version 2, while version 1 is loaded."
            assert third == "b"

            async with trio.open_nursery() as nursery:
                await engine.submit([ENDLESS])
                nursery.start_soon(ends, engine)
                await trio.testing.wait_all_tasks_blocked()
                await engine.cancel(["endless", "unknown"])
            with pytest.raises(EngineFailed, match="cannot be loaded"):
                await engine.load(policy / "absent", 2)
            assert (await engine.load(policy, 2)).rebuilt
            assert engine.starts == 1, "what fails or is cancelled costs no child"
            pid = engine.pid
        assert pid is not None
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("name", ["llama", "torch"])
@pytest.mark.parametrize(("turns_mib", "all_again"), [(0, True), (1, False)])
async def test_the_owner_bounds_the_memory_for_finished_turns(
    name: str, turns_mib: int, all_again: bool, policy: Path, tmp_path: Path
) -> None:
    """The limit goes from limits.toml to the child: without that memory a next turn computes its whole text again."""
    settings.write(tmp_path, settings.changed(tmp_path, {"turns_mib": turns_mib}))
    options = EngineChoice(engine=EngineName(name)).within(settings.read(tmp_path))
    first = request("first", max_new_tokens=64).model_copy(update={"turn_tokens_max": 4})
    with trio.fail_after(DEADLINE_S):
        async with open_engine(ENGINES[name].command(options._replace(threads=1))) as engine:
            await engine.load(policy, 1)
            await engine.submit([first])
            answered = await engine.finished()
            assert isinstance(answered, GroupDone)
            await engine.measured()
            read = [one.tokens + pack_tokens([21, 23]) for one in answered.samples]
            prefixes = tuple(Prefix(tokens=tokens, finish="") for tokens in read)
            await engine.submit([first.model_copy(update={"request_id": "next", "prefixes": prefixes})])
            assert isinstance(await engine.finished(), GroupDone)
            whole = sum(3 + len(tokens) // 4 for tokens in read)
            assert (await engine.measured()).prompt_tokens == (whole if all_again else 3 * len(read))


@pytest.mark.parametrize("name", ["llama", "torch"])
async def test_kill_9_in_mid_generation_is_named_and_the_next_request_finds_a_new_child(
    name: str, policy: Path
) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(ENGINES[name].command(EngineOptions())) as engine:
            await engine.load(policy, 1)
            await engine.submit([request("short"), ENDLESS])
            assert await engine.finished()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await ends(engine)
            assert await engine.finished() is None, "nobody answers what died with the child"
            await engine.submit([request("again")])  # the policy is loaded again
            assert await ends(engine) == ["again"]
            assert engine.starts == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups of a terminal")
async def test_ctrl_c_at_the_terminal_does_not_reach_the_child_whose_end_the_agent_decides() -> None:
    """A terminal signals all processes of its foreground group."""
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("hangs")) as engine:
            await engine.submit([ENDLESS])
            assert engine.pid is not None
            assert os.getpgid(engine.pid) != os.getpgrp()


async def test_requests_that_died_with_the_child_are_not_forgotten_when_more_are_submitted() -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("hangs")) as engine:
            await engine.submit([ENDLESS])
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            dead = os.WEXITED | os.WNOWAIT  # and nobody has noticed
            await trio.to_thread.run_sync(os.waitid, os.P_PID, engine.pid, dead)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await engine.submit([request("more")])
            await engine.submit([request("first")])
            assert await ends(engine) == ["first"]


async def test_a_policy_of_another_architecture_finds_the_engine_that_knows_it(
    policy: Path, windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with trio.fail_after(DEADLINE_S):
        async with open_engine(partial(for_policy, "auto", EngineOptions(dtype="bfloat16"))) as engine:
            with pytest.raises(EngineFailed, match="No policy is loaded"):
                await engine.submit([request("early")])
            assert (await engine.load(policy, 1)).numerics == "llama/bf16/cpu"
            assert (await engine.load(windowed, 2)).numerics == "torch/bf16/cpu"
            assert "starting engine torch: torch is installed; " in caplog.text
            assert "; not llama: it cannot load the policy (The llama engine does not support" in caplog.text
            await engine.submit([request("a", version=2)])
            assert await ends(engine) == ["a"]


async def test_an_engine_that_reports_progress_may_take_longer_than_an_answer_may(policy: Path) -> None:
    """A text of 32,000 tokens takes more than the 300 s after which a silent engine is stopped."""
    command = [sys.executable, str(FAKE), "is slow"]
    with trio.fail_after(DEADLINE_S):
        async with open_engine(command, answer_timeout_s=3.0) as engine:
            await engine.load(policy, 1)
            await engine.submit([request("first"), request("second")])
            assert await ends(engine) == ["first", "second"]
            assert engine.starts == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "did not answer within 3 s"),
        ("dies", "SIGKILL"),
        ("prints", "announces a frame"),
        ("answers something else", "loaded where the end of a request is due"),
        ("answers twice", "group_done where the end of a request is due"),
    ],
)
async def test_a_child_that_misbehaves_is_replaced(fault: str, message: str) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake(fault), answer_timeout_s=3.0) as engine:
            for attempt in (1, 2):
                await engine.submit([request("first"), request("second")])
                group = await engine.finished()
                assert group is not None
                assert group.request_id == "first"
                with pytest.raises(EngineFailed, match=message):
                    await engine.finished()
                assert engine.pid is None
                assert engine.starts == attempt


async def test_a_call_that_is_given_up_half_way_costs_the_child(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("hangs")) as engine:
            await engine.load(policy, 1)
            pid = engine.pid
            assert pid is not None
            await engine.submit([request("first"), request("second")])
            with trio.move_on_after(0.2) as scope:
                await ends(engine)
            assert scope.cancelled_caught
            assert not psutil.pid_exists(pid)


async def test_a_cancel_that_finds_the_child_dead_ends_whoever_waits_for_a_group_by_name() -> None:
    """The child is gone, but somebody else holds its output open: only the one who writes can notice."""
    caught: list[str] = []

    async def wait(engine: EngineClient) -> None:
        try:
            await ends(engine)
        except EngineFailed as error:
            caught.append(error.code)

    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("leaves its output open")) as engine, trio.open_nursery() as nursery:
            await engine.submit([request("first"), ENDLESS])
            assert await engine.finished()
            nursery.start_soon(wait, engine)
            await trio.testing.wait_all_tasks_blocked()
            while True:
                try:
                    await engine.cancel(["endless"])
                    await trio.lowlevel.checkpoint()
                except EngineFailed as error:
                    caught.append(error.code)
                    break
    assert caught == ["engine_failed", "engine_failed"]


async def test_a_wait_that_is_interrupted_in_the_middle_of_an_answer_loses_nothing() -> None:
    """A request that comes meanwhile is submitted, and the child lives on."""
    interrupted = trio.Event()
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("sends half an answer")) as engine, trio.open_nursery() as nursery:
            await engine.load(Path(), 1)
            await engine.submit([request("first"), request("second")])
            assert await engine.finished(interrupted)

            async def interrupt() -> None:
                while not engine._received:
                    await trio.lowlevel.checkpoint()
                interrupted.set()

            nursery.start_soon(interrupt)
            assert await engine.finished(interrupted) is None
            assert await engine.finished(interrupted) is None, "as long as nobody clears it"
            await engine.submit([request("third")])
            assert await ends(engine) == ["second", "third"]
            assert engine.starts == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [(fake("dies at once"), "exit code 3"), (["/nowhere/swarm-node", "engine"], "does not start")],
)
async def test_an_engine_that_does_not_start_says_so(command: list[str], message: str) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(command) as engine:
            with pytest.raises(EngineFailed, match=message):
                await engine.load(Path(), 1)


@pytest.mark.parametrize("while_asked", [True, False], ids=["while it answers", "while nobody waits"])
async def test_a_child_that_takes_too_much_memory_is_stopped_and_named(while_asked: bool) -> None:
    """The watch looks whether or not the agent waits for an answer; the agent's own memory stays as it was."""
    before = memory.resident_bytes(os.getpid()) or 0
    with trio.fail_after(DEADLINE_S):
        async with open_engine(fake("grows")) as engine:
            await engine.load(Path(), 1)
            engine._allowed_bytes = 300 * limits.MIB
            await engine.submit([request("first"), request("second")])
            if not while_asked:
                assert engine.pid is not None
                dead = os.WEXITED | os.WNOWAIT
                await trio.to_thread.run_sync(os.waitid, os.P_PID, engine.pid, dead)
            assert await engine.finished() is not None
            with pytest.raises(EngineFailed, match=r"took \d+ MB of memory, and 315 MB are allowed"):
                await engine.finished()
            assert (await engine.load(Path(), 2)).parameters == 1, "the next version finds a new child"
            assert engine.starts == 2
    assert (memory.resident_bytes(os.getpid()) or 0) - before < 64 * limits.MIB


BROKEN_VLLM = """#!/bin/sh
case "$*" in
  *vllm.probe*) echo '{"version": "0.11.0", "device": "cpu"}';;
  *) echo started >> "$0.starts"; exit 7;;
esac
"""


async def test_a_policy_that_the_best_engine_cannot_load_falls_back_to_the_next_and_that_is_remembered(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    await trio.Path(python).write_text(BROKEN_VLLM)
    await trio.Path(python).chmod(0o755)
    starts = trio.Path(f"{python}.starts")
    caplog.set_level("INFO")
    with trio.fail_after(DEADLINE_S):
        async with open_engine(partial(for_policy, "auto", EngineOptions(vllm_python=str(python)))) as engine:
            assert (await engine.load(policy, 1)).numerics == "torch/fp32/cpu"
            assert engine.name == "torch"
            assert "; not vllm: it cannot load the policy (The engine ended with exit code 7.)" in caplog.text
            await engine.submit([request("a")])
            assert await ends(engine) == ["a"]
            await engine.load(policy, 2)
            assert await starts.read_text() == "started\n", "what failed once is not tried at every version"
        async with open_engine(partial(for_policy, "vllm", EngineOptions(vllm_python=str(python)))) as engine:
            with pytest.raises(EngineFailed, match="exit code 7"):
                await engine.load(policy, 1)


async def test_a_policy_that_no_engine_can_load_makes_none_unfit(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_engine(partial(for_policy, "auto", EngineOptions())) as engine:
            with pytest.raises(EngineFailed, match="cannot be loaded"):
                await engine.load(policy / "absent", 1)
            assert (await engine.load(policy, 2)).numerics == "torch/fp32/cpu"
            assert engine._unfit == {}
