"""Leases for an engine, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.work.rollout import Completion, pack_tokens, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest

SAMPLES, NEW_TOKENS = 8, 24


@dataclass(frozen=True)
class Leased:
    """One group to sample."""

    prompt: tuple[int, ...]
    seed: int

    def request(self, version: int) -> SampleRequest:
        return SampleRequest(
            request_id=str(self.seed),
            version=version,
            prompt=pack_tokens(list(self.prompt)),
            seed=self.seed,
            samples=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
        )


def leased(count: int, first_seed: int = 0) -> list[Leased]:
    """Return leases whose prompts have unequal lengths."""
    random = np.random.default_rng(first_seed)
    return [
        Leased(tuple(random.integers(3, 320, 4 + 9 * number).tolist()), first_seed + number) for number in range(count)
    ]


def sampled(engine: Engine, leases: Sequence[Leased], version: int = 1) -> list[list[Completion]]:
    """Return the completions of each lease."""
    done: dict[str, GroupDone] = {}
    engine.generate([lease.request(version) for lease in leases], lambda group: done.update({group.request_id: group}))
    return [
        [
            Completion(unpack_tokens(sample.tokens), np.frombuffer(sample.logprobs, "<f4"), sample.finish)
            for sample in done[str(lease.seed)].samples
        ]
        for lease in leases
    ]


def share_alike(left: list[list[Completion]], right: list[list[Completion]]) -> float:
    """Return the share of completions with the same tokens."""
    pairs = [pair for groups in zip(left, right, strict=True) for pair in zip(*groups, strict=True)]
    alike = sum(1 for one, other in pairs if one.tokens.tolist() == other.tokens.tolist())
    return alike / len(pairs)
