"""The torch engine against a plain forward pass, and against the definition of seed-bound sampling."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protocol.errors import EngineFailed
from protocol.rollout import Sample, pack_tokens, unpack_tokens
from protocol.sampling import pick, uniforms
from swarm_node.engine.messages import GroupDone, Request
from swarm_node.engine.torch_engine import ROWS_MAX, TorchEngine
from tests.tiny_policy import make_tiny_policy

END = 2
PROMPTS = ([19], [19, 20, 31], [19, 20, 13, 21, 22, 31], list(range(10, 30)))
"""Of unequal length, so that all but one are padded."""


def request(prompt: Sequence[int], seed: int = 7, **changes: Any) -> Request:
    fields: dict[str, Any] = {"request_id": f"seed {seed}", "samples": 5, "max_new_tokens": 12, "temperature": 1.0}
    return Request(prompt=pack_tokens(list(prompt)), seed=seed, **(fields | changes))


def sample(engine: TorchEngine, *requests: Request) -> dict[str, tuple[Sample, ...]]:
    groups: list[GroupDone] = []
    engine.generate(requests, groups.append)
    assert sorted(group.request_id for group in groups) == sorted(wanted.request_id for wanted in requests)
    return {group.request_id: group.samples for group in groups}


def reference(policy: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """What a plain forward pass says about each completion token: [T, V] log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores: torch.Tensor = torch.log_softmax(logits / temperature, dim=-1)
    return scores


@pytest.fixture(scope="module")
def engine(policy: Path) -> TorchEngine:
    engine = TorchEngine()
    engine.load(policy)
    return engine


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    policy: Path, engine: TorchEngine, temperature: float
) -> None:
    requests = [request(prompt, seed, temperature=temperature) for seed, prompt in enumerate(PROMPTS)]
    for seed, (prompt, group) in enumerate(zip(PROMPTS, sample(engine, *requests).values(), strict=True)):
        for number, drawn in enumerate(group):
            tokens = unpack_tokens(drawn.tokens).tolist()
            scores = reference(policy, prompt, tokens, temperature)
            expected = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert np.abs(np.frombuffer(drawn.logprobs, "<f4") - expected.numpy()).max() < 1e-4
            chances = uniforms(seed, number, len(tokens))
            assert tokens == [pick(row.exp().numpy(), u) for row, u in zip(scores, chances, strict=True)]


def test_a_lease_gives_the_same_tokens_in_any_company(engine: TorchEngine) -> None:
    requests = [request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    together = sample(engine, *requests)
    for alone in requests:
        assert [drawn.tokens for drawn in sample(engine, alone)[alone.request_id]] == [
            drawn.tokens for drawn in together[alone.request_id]
        ]


def test_samples_and_seeds_differ(engine: TorchEngine) -> None:
    groups = sample(engine, request(PROMPTS[1], 1), request(PROMPTS[1], 2))
    assert len({drawn.tokens for group in groups.values() for drawn in group}) == 10


def test_a_completion_ends_with_its_end_token_or_at_its_limit(engine: TorchEngine) -> None:
    (drawn,) = sample(engine, request(PROMPTS[1], samples=32, max_new_tokens=60)).values()
    assert {one.finish for one in drawn} == {"stop", "length"}
    for one in drawn:
        tokens = unpack_tokens(one.tokens).tolist()
        assert len(one.logprobs) == len(one.tokens)
        assert END not in tokens[:-1]
        assert (tokens[-1] == END) == (one.finish == "stop")
        assert one.finish == "stop" or len(tokens) == 60


def test_requests_keep_their_own_limit_and_finish_on_their_own(engine: TorchEngine) -> None:
    finished: list[str] = []
    wanted = [request(PROMPTS[0], request_id=str(limit), max_new_tokens=limit) for limit in (9, 2, 1)]
    engine.generate(wanted, lambda group: finished.append(group.request_id))
    assert finished == ["1", "2", "9"]


def test_every_group_tells_how_long_ago_the_first_token_of_all_was_drawn(engine: TorchEngine) -> None:
    done: list[GroupDone] = []
    started = time.monotonic()
    engine.generate([request(PROMPTS[0], max_new_tokens=limit) for limit in (9, 2, 1)], done.append)
    ages = [group.first_token_ago_s for group in done]
    assert 0 < ages[0] < ages[1] < ages[2] < time.monotonic() - started


@pytest.mark.parametrize("groups", [1, ROWS_MAX // 64, ROWS_MAX // 64 + 1])  # one wave, a full one, one more
def test_more_rows_than_fit_are_sampled_in_waves(engine: TorchEngine, groups: int) -> None:
    drawn = sample(engine, *(request(PROMPTS[0], seed, samples=64, max_new_tokens=1) for seed in range(groups)))
    assert len(drawn) == groups


def test_every_end_token_of_the_policy_ends_a_completion(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    everything = list(range(320))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": everything}))
    engine = TorchEngine()
    engine.load(folder)
    (group,) = sample(engine, request(PROMPTS[1])).values()
    assert {(len(one.tokens), one.finish) for one in group} == {(4, "stop")}


def test_a_new_version_is_swapped_in_place_and_samples_as_if_built_anew(policy: Path, tmp_path: Path) -> None:
    other = make_tiny_policy(tmp_path / "other", seed=2)
    swapped, fresh = TorchEngine(), TorchEngine()
    assert swapped.load(policy).rebuilt
    assert not swapped.load(other).rebuilt
    fresh.load(other)
    assert sample(swapped, request(PROMPTS[2])) == sample(fresh, request(PROMPTS[2]))


def test_a_folder_that_is_no_policy_is_refused_and_the_next_one_loads(policy: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(policy, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    engine = TorchEngine()
    for bad in (tmp_path / "absent", broken):
        with pytest.raises(EngineFailed, match="cannot be loaded"):
            engine.load(bad)
    with pytest.raises(EngineFailed, match="No policy is loaded"):
        engine.generate([request(PROMPTS[0])], print)
    assert engine.load(policy).rebuilt
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        engine.load(broken)  # the same configuration: the swap fails in the middle
    assert engine.load(policy).rebuilt


def test_weights_that_are_not_numbers_are_named(policy: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(policy, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    engine = TorchEngine()
    engine.load(damaged)
    with pytest.raises(EngineFailed, match="not numbers"):
        sample(engine, request(PROMPTS[0]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(request([320]), "vocabulary"), (request([5], max_new_tokens=512), "positions")],
)
def test_what_the_policy_cannot_do_is_refused(engine: TorchEngine, wrong: Request, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        sample(engine, wrong)


def test_throughput_counts_every_row(engine: TorchEngine) -> None:
    measured = engine.measure(rows=16, new_tokens=3)
    assert measured.tokens == 48
    assert measured.seconds > 0
