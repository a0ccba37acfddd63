"""Questions and answers that the tests of an engine use."""

from collections.abc import Sequence
from typing import Any

from protocol.work.rollout import Sample, pack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest

END = 2
PROMPTS = ([19], [19, 20, 31], [19, 20, 13, 21, 22, 31], list(range(10, 30)))
"""Prompts of unequal length, so that all but one are padded."""
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40_960, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip  # one word after the other


def asked(prompt: Sequence[int], seed: int = 7, **changes: Any) -> SampleRequest:
    fields: dict[str, Any] = {
        "request_id": f"seed {seed}",
        "version": 1,
        "samples": 5,
        "max_new_tokens": 12,
        "temperature": 1.0,
    }
    return SampleRequest(prompt=pack_tokens(list(prompt)), seed=seed, **(fields | changes))


def sample(engine: Engine, *requests: SampleRequest) -> dict[str, tuple[Sample, ...]]:
    groups: list[GroupDone] = []
    engine.generate(requests, groups.append)
    assert sorted(group.request_id for group in groups) == sorted(wanted.request_id for wanted in requests)
    return {group.request_id: group.samples for group in groups}
