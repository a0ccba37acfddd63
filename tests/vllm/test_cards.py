"""Several ranks that hold one policy together, as joined graphics cards do: here two processes on the CPU.

gloo and shared memory are in the place of NCCL; all else is what runs on cards.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from swarm_node.engine.messages import LoadVersion
from swarm_node.engine.vllm import command
from tests.adapted_policy import make_adapted, make_merged
from tests.processes.programs import PATIENCE_S, until
from tests.swarm_node.engine.asking import PROMPTS, asked
from tests.swarm_node.engine.test_continuing import prefixes
from tests.vllm.child import Child
from tests.vllm.test_engine import NATS, assert_same, of_torch

STARTS_WITHIN_S = 1800.0
SHARED = Path("/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Remove the files through which ranks exchange their parts on a CPU: a rank that is killed leaves them."""
    before = set(SHARED.glob("vllm_dist_*"))
    yield
    for file in set(SHARED.glob("vllm_dist_*")) - before:
        file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def pair(python: str) -> Iterator[Child]:
    """An engine with two ranks, whose processes end with its input."""
    with Child(command.command(python, threads=1, dtype="float32", cards=2)) as child:
        yield child
        started = workers(child.pid)
    assert_end(started)


def assert_end(processes: list[psutil.Process]) -> None:
    """Wait for the end of processes; kill those that stay."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for each in alive:
        each.kill()
    assert not alive


def workers(pid: int) -> list[psutil.Process]:
    """Return the processes of the ranks, under the name with which they start or the one that vLLM gives them."""
    names, found = re.compile("spawn_main|VLLM::Worker"), list[psutil.Process]()
    for each in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # vLLM asks a process of its own about the model
            found += [each] * bool(names.search(" ".join(each.cmdline())))
    return found


@pytest.mark.parametrize("kind", ["policy", "grouped"])
def test_two_ranks_draw_the_tokens_and_logprobs_of_one(pair: Child, kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    loaded = pair.load(folder)
    assert loaded.numerics == "vllm/fp32/cpu"
    requests = [
        asked(prompt, seed, temperature=temperature, own_temperature=own)
        for seed, (prompt, temperature, own) in enumerate(
            zip(PROMPTS, (1.0, 0.6, 1.0, 1.4), (None, None, 0.0, 0.3), strict=True)
        )
    ]
    expected = of_torch(folder, *requests)
    assert_same(pair.sample(*requests), expected)
    assert len(workers(pair.pid)) == 2


def test_each_rank_swaps_its_part_in_place_and_the_canary_is_scored(
    pair: Child, policy: Path, other: Path, tmp_path: Path
) -> None:
    first = pair.load(policy)
    before = {each.pid for each in workers(pair.pid)}
    second = pair.load(other, 2)
    assert (second.rebuilt, second.parameters) == (False, first.parameters)
    requests = [asked(prompt, seed, version=2) for seed, prompt in enumerate(PROMPTS)]
    assert_same(pair.sample(*requests), of_torch(other, *requests))
    adapted = make_adapted(policy, tmp_path / "adapted", seed=1)
    assert not pair.load(adapted, 3).rebuilt
    requests = [asked(prompt, seed, version=3) for seed, prompt in enumerate(PROMPTS)]
    assert_same(pair.sample(*requests), of_torch(make_merged(adapted, tmp_path / "merged"), *requests))
    assert {each.pid for each in workers(pair.pid)} == before


def test_two_ranks_continue_what_another_node_began(pair: Child, policy: Path) -> None:
    pair.load(policy)
    wanted = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    alone = of_torch(policy, *wanted)
    begun = {name: prefixes(group, lambda n, _count: 3 * n) for name, group in alone.items()}
    heirs = [one.model_copy(update={"prefixes": begun[one.request_id]}) for one in wanted]
    for name, group in pair.sample(*heirs).items():
        for prefix, rest, whole in zip(begun[name], group, alone[name], strict=True):
            assert (prefix.tokens + rest.tokens, rest.finish) == (whole.tokens, whole.finish)
            logprobs, expected = (np.frombuffer(each.logprobs, "<f4") for each in (rest, whole))
            np.testing.assert_allclose(logprobs, expected[len(prefix.tokens) // 4 :], atol=NATS)


def test_no_worker_outlives_a_child_that_is_killed_while_it_loads(python: str, policy: Path) -> None:
    """vLLM itself ends its workers only from the end of their load on."""
    child = Child(command.command(python, threads=1, dtype="float32", cards=2))
    child.tell(LoadVersion(folder=str(policy), version=1))
    until("two workers", lambda: len(workers(child.pid)) == 2, within_s=STARTS_WITHIN_S)
    started = workers(child.pid)
    child.kill()
    assert_end(started)
