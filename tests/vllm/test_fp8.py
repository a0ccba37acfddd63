"""fp8 with vLLM: a class of its own, quantized at each load from what the round publishes."""

from pathlib import Path

import numpy as np

from protocol.work.rollout import Sample
from swarm_node.engine.messages import Loaded
from swarm_node.engine.vllm import command
from tests.swarm_node.engine.asking import PROMPTS, asked
from tests.vllm.child import Child


def logprobs(samples: tuple[Sample, ...]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.concatenate([np.frombuffer(sample.logprobs, "<f4") for sample in samples])


def test_fp8_is_a_class_of_its_own_which_repeats_its_tokens_and_loads_each_version_anew(
    python: str, policy: Path, other: Path, child: Child
) -> None:
    request = asked(PROMPTS[0], 1, max_new_tokens=12)
    with Child(command.command(python, threads=1, dtype=command.FP8)) as fp8:
        first = fp8.load(policy, 1)
        assert isinstance(first, Loaded)
        assert first.numerics == "vllm/fp8/cpu"
        once, again = (fp8.sample(request)[request.request_id] for _ in range(2))
        second = fp8.load(other, 2)
        assert second.rebuilt
        fp8.load(policy, 1)
        back = fp8.sample(request)[request.request_id]
    assert once == again == back
    child.load(policy, 1)
    wide = child.sample(request)[request.request_id]
    assert not np.array_equal(logprobs(once), logprobs(wide)), "the weights are rounded"
