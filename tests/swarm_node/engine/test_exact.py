"""Exact sampling: the same tokens and the same bits in every batch, slot, thread count and division of a text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import EngineFailed
from protocol.work.lease import Prefix
from protocol.work.rollout import Sample, pack_tokens, unpack_tokens
from swarm_node.engine.messages import SampleRequest
from swarm_node.engine.policy_files import read_config
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.engine.torch.exact import ExactDecoder
from tests.swarm_node.engine.asking import PROMPTS, asked, sample
from tests.tiny_policy import make_tiny_policy

LONG = [7 + number % 200 for number in range(90)]
"""A prompt that passes the first block of keys."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact(folder: Path, **how: Any) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype="exact", **how)
    engine.load(folder, 1)
    return engine


def requests(**changes: Any) -> list[SampleRequest]:
    return [asked(prompt, seed, **changes) for seed, prompt in enumerate([*PROMPTS, LONG])]


@pytest.fixture(scope="module")
def alone(policy: Path) -> dict[str, tuple[Sample, ...]]:
    """Each group sampled in an engine with nothing else, on one thread."""
    torch.set_num_threads(1)
    engine, answers = exact(policy), dict[str, tuple[Sample, ...]]()
    for request in requests():
        answers |= sample(engine, request)
    return answers


@pytest.mark.parametrize("slots", [5, 7, 256])
def test_batches_slots_and_threads_change_no_bit(
    policy: Path, alone: dict[str, tuple[Sample, ...]], threads: int, slots: int
) -> None:
    engine = exact(policy, slots=slots)
    assert sample(engine, *reversed(requests())) == alone
    assert sample(engine, *requests()) == alone  # in rows that others left


def test_the_samples_of_256_rows_have_the_bits_of_a_few(policy: Path) -> None:
    engine = exact(policy)
    groups = [asked(LONG, seed, samples=64, max_new_tokens=3) for seed in range(4)]
    many = sample(engine, *groups)
    for group in groups:
        few = sample(engine, group.model_copy(update={"samples": 3}))
        assert many[group.request_id][:3] == few[group.request_id]


def test_a_sample_that_is_continued_after_a_prefix_has_the_bits_of_one_that_was_not(
    policy: Path, alone: dict[str, tuple[Sample, ...]]
) -> None:
    engine = exact(policy)
    for request in requests():
        whole = alone[request.request_id]
        cut = [min(4, len(said.tokens) // 4 - 1) for said in whole]
        prefixes = tuple(
            Prefix(tokens=said.tokens[: 4 * length], finish="") for said, length in zip(whole, cut, strict=True)
        )
        rest = sample(engine, request.model_copy(update={"prefixes": prefixes}))[request.request_id]
        for said, continued, length in zip(whole, rest, cut, strict=True):
            assert said.tokens.endswith(continued.tokens)
            assert said.logprobs[4 * length :] == continued.logprobs[-(len(said.logprobs) - 4 * length) :]


@pytest.mark.parametrize("pieces", [1, 5, 64])
def test_a_prompt_that_is_read_in_pieces_has_the_bits_of_one_call(policy: Path, pieces: int) -> None:
    decoder = ExactDecoder(policy, read_config(policy), torch.device("cpu"))
    model, tokens = decoder._model, torch.tensor(LONG)
    places = torch.arange(len(LONG))
    states = []
    with torch.inference_mode():
        for lengths in ([len(LONG)], [pieces] * (len(LONG) // pieces) + [len(LONG) % pieces]):
            cache = model.cache()
            cache.grow(2, len(LONG), 0)
            parts = zip(*(torch.split(each, [*filter(None, lengths)]) for each in (tokens, places)), strict=True)
            states.append([model.extend(cache, part, torch.ones_like(part), place) for part, place in parts])
        assert torch.equal(torch.cat(states[0]), torch.cat(states[1]))


def test_turns_that_are_resumed_have_the_bits_of_a_new_start(policy: Path) -> None:
    kept, dropped = exact(policy), exact(policy, turns_max_bytes=0)
    request = asked(LONG, turn_tokens_max=4, max_new_tokens=40)
    for _ in range(3):
        first, second = (sample(engine, request)["seed 7"] for engine in (kept, dropped))
        assert first == second
        before = request.prefixes or (Prefix(tokens=b"", finish=""),) * len(first)
        prefixes = tuple(
            Prefix(tokens=prefix.tokens + said.tokens + pack_tokens([33, 34]), finish="")
            for prefix, said in zip(before, first, strict=True)
        )
        request = request.model_copy(update={"prefixes": prefixes})
    assert kept.measured().prompt_tokens < dropped.measured().prompt_tokens


def test_its_numbers_are_those_of_the_ordinary_engine(policy: Path, alone: dict[str, tuple[Sample, ...]]) -> None:
    engine = TorchEngine(device="cpu")
    engine.load(policy, 1)
    ordinary = sample(engine, *requests())
    for name, said in alone.items():
        for ours, theirs in zip(said, ordinary[name], strict=True):
            assert unpack_tokens(ours.tokens).tolist() == unpack_tokens(theirs.tokens).tolist()
            ours_logprobs, theirs_logprobs = (np.frombuffer(each.logprobs, "<f4") for each in (ours, theirs))
            np.testing.assert_allclose(ours_logprobs, theirs_logprobs, atol=1e-4)


def test_a_swapped_version_has_the_bits_of_one_that_was_loaded(policy: Path, tmp_path: Path) -> None:
    other = make_tiny_policy(tmp_path / "other", seed=2)
    engine = exact(policy)
    assert not engine.load(other, 1).rebuilt
    assert sample(engine, *requests()) == sample(exact(other), *requests())


def test_the_class_names_the_kind_of_machine_and_is_the_same_for_every_version(policy: Path, tmp_path: Path) -> None:
    other = make_tiny_policy(tmp_path / "other", seed=2)
    first, second = (
        ExactDecoder(folder, read_config(folder), torch.device("cpu")).numerics for folder in (policy, other)
    )
    assert first == second
    assert first.startswith("exact/fp32/cpu-")
    assert len(first.split("-")[1]) == 12


def test_a_model_that_only_transformers_computes_is_refused_by_name(policy: Path) -> None:
    engine = TorchEngine(device="cpu", dtype="exact")
    with pytest.raises(EngineFailed, match="cannot be sampled exactly"):
        engine._build(policy, read_config(policy) | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]})


def test_a_card_is_refused_with_the_next_step(policy: Path) -> None:
    engine = TorchEngine(device="cuda", dtype="exact")
    with pytest.raises(EngineFailed, match="CPU only, not on cuda") as refused:
        engine._build(policy, read_config(policy))
    assert "--device cpu" in refused.value.hint
