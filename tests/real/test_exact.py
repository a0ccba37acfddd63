"""SmolLM2 is sampled to the same bits in any batch and on any number of threads, and replayed to them."""

from pathlib import Path

import numpy as np
import torch

from coordinator.audit.exact_scorer import ExactScorer
from coordinator.rules.replay import Prefill, measure
from protocol.work.rollout import Completion, Sample, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

SAMPLES, LENGTH = 2, 2
"""Few: a real model that is computed exactly is slow."""


def requests() -> list[SampleRequest]:
    """Two prompts, of which one passes the first block of keys."""
    return [
        SampleRequest(
            request_id=str(size), version=1, seed=size, samples=SAMPLES, max_new_tokens=LENGTH, temperature=1.0,
            prompt=pack_tokens([1000 + 7 * place for place in range(size)]),
        )
        for size in (3, 66)
    ]  # fmt: skip  # one field after the other


def sampled(engine: TorchEngine, *asked: SampleRequest) -> dict[str, tuple[Sample, ...]]:
    done = list[GroupDone]()
    engine.generate(asked, done.append)
    return {group.request_id: group.samples for group in done}


def test_batches_and_threads_change_no_bit_and_the_replay_has_the_same(smollm2_folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine = TorchEngine(device="cpu", dtype="exact")
        engine.load(smollm2_folder, 1)
        together = sampled(engine, *requests())
        torch.set_num_threads(1)
        for request in requests():
            assert sampled(engine, request) == {request.request_id: together[request.request_id]}
        del engine
        scorer = ExactScorer(smollm2_folder)
        for request in requests():
            said = [
                Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish)
                for row in together[request.request_id]
            ]
            claim = Prefill(unpack_tokens(request.prompt), [row.tokens for row in said], request.seed, 1.0)
            measured = measure(said, scorer.score([claim])[0])
            assert not measured.errors.any()
            assert measured.claimed.tolist() == measured.dictated.tolist()
    finally:
        torch.set_num_threads(before)
