"""Temperatures of leases in every engine: greedy, low and high ones in one batch, against a plain forward pass."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol import limits
from protocol.policy.manifest import Sampler
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import pack_tokens, unpack_tokens
from protocol.work.sampling import pick, uniforms
from swarm_node.engine.llama.engine import NumpyLogits
from swarm_node.engine.messages import SampleRequest
from swarm_node.engine.torch.sampler import TorchLogits
from tests.swarm_node.engine.asking import PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make
from tests.swarm_node.engine.test_engines import reference

OWN = (None, 0.0, 0.3, 2.0)
"""The temperatures of the leases in a batch, one for each prompt."""
VERSIONS = 0.8


def expected(
    folder: Path, prompt: Sequence[int], tokens: list[int], chances: np.ndarray, own: float | None
) -> list[int]:
    """The tokens that the definition dictates after each beginning of a sample."""
    if own == 0:
        return [int(row.argmax()) for row in reference(folder, prompt, tokens, 1.0)]
    scores = reference(folder, prompt, tokens, VERSIONS if own is None else own)
    return [pick(row.exp().numpy(), chance) for row, chance in zip(scores, chances, strict=True)]


@pytest.mark.parametrize("slots", [3, 64])
def test_each_lease_of_a_batch_is_drawn_at_its_own_temperature(pair: tuple[Make, Path], slots: int) -> None:
    """Samples of different temperatures also take each other's places, as slots are few."""
    make, folder = pair
    engine = make(slots=slots)
    engine.load(folder, 1)
    requests = [
        asked(prompt, seed, temperature=VERSIONS, own_temperature=own)
        for seed, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True))
    ]
    found = sample(engine, *requests)
    for seed, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True)):
        for number, drawn in enumerate(found[f"seed {seed}"]):
            tokens = unpack_tokens(drawn.tokens).tolist()
            assert tokens == expected(folder, prompt, tokens, uniforms(seed, number, len(tokens)), own)
            scores = reference(folder, prompt, tokens, VERSIONS).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert np.abs(np.frombuffer(drawn.logprobs, "<f4") - scores.numpy()).max() < 1e-5
    assert len({drawn.tokens for drawn in found["seed 1"]}) == 1, "the samples of a greedy group are equal"
    assert len({drawn.tokens for drawn in found["seed 0"]}) > 1


def test_a_group_at_the_versions_temperature_does_not_depend_on_its_company(make: Make, policy: Path) -> None:
    engine = make()
    engine.load(policy, 1)
    beside = asked(PROMPTS[1], 1, own_temperature=0.0)
    alone, together = sample(engine, asked(PROMPTS[0], 0)), sample(engine, asked(PROMPTS[0], 0), beside)
    assert [drawn.tokens for drawn in together["seed 0"]] == [drawn.tokens for drawn in alone["seed 0"]]


@pytest.mark.parametrize("own", [0.0, 0.5])
def test_a_continuation_keeps_the_temperature(make: Make, policy: Path, own: float) -> None:
    engine = make()
    engine.load(policy, 1)
    request = asked(PROMPTS[2], own_temperature=own)
    (whole,) = sample(engine, request).values()
    begun = tuple(Prefix(tokens=one.tokens[: 4 * (1 + number)], finish="") for number, one in enumerate(whole))
    assert all(len(one.tokens) > len(prefix.tokens) for one, prefix in zip(whole, begun, strict=True))
    (rest,) = sample(engine, request.model_copy(update={"prefixes": begun})).values()
    joined = [prefix.tokens + one.tokens for prefix, one in zip(begun, rest, strict=True)]
    assert joined == [one.tokens for one in whole]


@pytest.mark.parametrize("own", [None, 0.0, 1.5])
def test_a_request_has_the_temperature_of_its_lease(own: float | None) -> None:
    lease = Lease(
        lease_id="0" * 32,
        version=1,
        seed=1,
        samples=4,
        prompt=pack_tokens([19]),
        price_micros_per_mtok=1,
        expires_ms=0,
        temperature=own,
    )
    request = SampleRequest.from_lease(lease, Sampler(temperature=0.7, max_new_tokens=5), report_every_s=0.0)
    assert (request.temperature, request.own_temperature) == (0.7, own)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_of_equal_logits_the_first_token_is_the_greedy_one(kind: str) -> None:
    logits = np.zeros((2, 700), np.float32)
    logits[0, [31, 600]] = logits[1, [32, 601]] = 5.0
    rows = TorchLogits(torch.from_numpy(logits)) if kind == "torch" else NumpyLogits(logits)
    assert rows.draw([1.0, 1.0], [0.9, 0.9], [0.0, 0.0])[0] == [31, 32]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_token_that_the_versions_temperature_never_gives_has_the_lowest_logprob(kind: str) -> None:
    logits = np.zeros((1, 2), np.float32)
    logits[0, 0] = 30.0  # 300 nats at temperature 0.1
    rows = TorchLogits(torch.from_numpy(logits)) if kind == "torch" else NumpyLogits(logits)
    assert rows.draw([0.1], [1 - 2**-53], [2.0]) == ([1], [limits.LOGPROB_MIN])


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("own", [0.0, limits.TEMPERATURE_MIN])
def test_large_logits_do_not_overflow_and_broken_ones_give_nan(kind: str, own: float) -> None:
    logits = np.array([[1e4, 0.0, -1e4], [np.inf, 0.0, 0.0], [np.nan, 0.0, 0.0]], np.float32)
    rows = TorchLogits(torch.from_numpy(logits)) if kind == "torch" else NumpyLogits(logits)
    tokens, logprobs = rows.draw([1.0] * 3, [0.5] * 3, [own] * 3)
    assert (tokens[0], logprobs[0]) == (0, 0.0)
    assert np.isnan(logprobs[1:]).all()
