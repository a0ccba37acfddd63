"""Every engine against a plain forward pass, and against the definition of seed-bound sampling."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protocol.errors import EngineFailed, TokensInvalid
from protocol.work.rollout import unpack_tokens
from protocol.work.sampling import pick, uniform_table, uniforms
from swarm_node.engine import engine as sampling_loop
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.engine.torch.qwen3 import Qwen3
from tests.swarm_node.engine.asking import END, PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make
from tests.tiny_policy import with_canary

DEADLINE_S = 120.0
NORM = "model.norm.weight"


@cache
def plain(policy: Path) -> Any:
    """The model as transformers knows it."""
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def reference(policy: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Return what a plain forward pass says about each completion token: [T, V] log-probabilities."""
    with torch.inference_mode():
        logits = plain(policy)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores: torch.Tensor = torch.log_softmax(logits / temperature, dim=-1)
    return scores


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(pair: tuple[Make, Path], temperature: float) -> None:
    make, folder = pair
    engine = make()
    engine.load(folder, 1)
    requests = [asked(prompt, seed, temperature=temperature) for seed, prompt in enumerate(PROMPTS)]
    for seed, (prompt, group) in enumerate(zip(PROMPTS, sample(engine, *requests).values(), strict=True)):
        for number, drawn in enumerate(group):
            tokens = unpack_tokens(drawn.tokens).tolist()
            scores = reference(folder, prompt, tokens, temperature)
            expected = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert np.abs(np.frombuffer(drawn.logprobs, "<f4") - expected.numpy()).max() < 1e-5
            chances = uniforms(seed, number, len(tokens))
            assert tokens == [pick(row.exp().numpy(), u) for row, u in zip(scores, chances, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be held to an amount of memory")
def test_out_of_memory_costs_slots_then_the_request_and_never_the_process(grouped: Path) -> None:
    """The program also proves that nothing of transformers was imported."""
    done = run_program("tight_memory.py", grouped)
    assert done.stdout.splitlines() == [
        "fewer at once, the same tokens",
        "Not enough memory for one sample.",
        "and goes on",
    ]
    assert "out of memory with 2048 samples at once; from now on 1024" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be held to an amount of memory")
def test_out_of_memory_costs_llama_slots_too_and_it_needs_no_torch(grouped: Path) -> None:
    done = run_program("tight_llama_memory.py", grouped)
    assert done.stdout == "fewer at once, the same tokens\n"
    assert "out of memory with 256 samples at once; from now on 128" in done.stderr


def run_program(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(Path(__file__).with_name(name)), str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("kind", ["grouped", "foreign"])
def test_bf16_stays_near_float32(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    engine = TorchEngine(dtype="bfloat16")
    engine.load(folder, 1)
    (group,) = sample(engine, asked(PROMPTS[2])).values()
    for drawn in group:
        tokens = unpack_tokens(drawn.tokens).tolist()
        expected = reference(folder, PROMPTS[2], tokens, 1.0).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert np.abs(np.frombuffer(drawn.logprobs, "<f4") - expected.numpy()).mean() < 0.05


def test_a_lease_gives_the_same_tokens_in_any_company(engine: Engine) -> None:
    requests = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    together = sample(engine, *requests)
    for alone in requests:
        assert [drawn.tokens for drawn in sample(engine, alone)[alone.request_id]] == [
            drawn.tokens for drawn in together[alone.request_id]
        ]


def test_samples_and_seeds_differ(engine: Engine) -> None:
    groups = sample(engine, asked(PROMPTS[1], 1), asked(PROMPTS[1], 2))
    assert len({drawn.tokens for group in groups.values() for drawn in group}) == 10


def test_a_completion_ends_with_its_end_token_or_at_its_limit(engine: Engine) -> None:
    (drawn,) = sample(engine, asked(PROMPTS[1], samples=32, max_new_tokens=60)).values()
    assert {one.finish for one in drawn} == {"stop", "length"}
    for one in drawn:
        tokens = unpack_tokens(one.tokens).tolist()
        assert len(one.logprobs) == len(one.tokens)
        assert END not in tokens[:-1]
        assert (tokens[-1] == END) == (one.finish == "stop")
        assert one.finish == "stop" or len(tokens) == 60


def test_requests_keep_their_own_limit_and_finish_on_their_own(engine: Engine) -> None:
    finished: list[str] = []
    wanted = [asked(PROMPTS[0], request_id=str(limit), max_new_tokens=limit) for limit in (9, 2, 1)]
    engine.generate(wanted, lambda group: finished.append(group.request_id))
    assert finished == ["1", "2", "9"]


def test_every_group_tells_how_long_ago_its_first_token_was_drawn(engine: Engine) -> None:
    done: list[GroupDone] = []
    started = time.monotonic()
    engine.generate([asked(PROMPTS[0], max_new_tokens=limit) for limit in (9, 2, 1)], done.append)
    ages = [group.first_token_ago_s for group in done]
    assert 0 <= ages[0] < ages[1] < ages[2] < time.monotonic() - started


def test_slots_are_refilled_while_a_long_sample_runs(make: Make, policy: Path) -> None:
    engine = make(slots=4)
    engine.load(policy, 1)
    ended: list[str] = []
    limits = [40, *[2] * 12]
    wanted = [asked([19], 3, request_id=f"{n}", samples=1, max_new_tokens=limit) for n, limit in enumerate(limits)]
    engine.generate(wanted, lambda group: ended.append(group.request_id))
    assert len(ended) == 13
    assert ended[-1] == "0", "the short ones did not wait for the long one, though it came first"


@pytest.mark.parametrize("slots", [1, 2, 7, 20, 64])  # parts of a group, one group, all at once
def test_the_number_of_slots_changes_no_token(pair: tuple[Make, Path], slots: int) -> None:
    make, folder = pair
    wanted = [asked(prompt, seed, max_new_tokens=3 + 9 * seed) for seed, prompt in enumerate(PROMPTS)]
    plenty, few = make(slots=256), make(slots=slots)
    plenty.load(folder, 1)
    few.load(folder, 1)
    expected = sample(plenty, *wanted)
    for name, group in sample(few, *wanted).items():
        assert [drawn.tokens for drawn in group] == [drawn.tokens for drawn in expected[name]]


def test_requests_may_come_and_be_cancelled_while_others_run(make: Make, policy: Path) -> None:
    engine, fresh = make(slots=8), make()
    engine.load(policy, 1)
    fresh.load(policy, 1)
    first, second, third = (asked(PROMPTS[seed], seed, max_new_tokens=40) for seed in range(3))
    engine.add(first)
    engine.step()
    engine.add(second)  # waits: five and five are more than eight
    engine.add(third)
    assert engine.cancel([first.request_id, second.request_id, "unknown"]) == ["seed 0", "seed 1"]
    done = []
    while engine.busy:
        done += engine.step()
    assert [group.request_id for group in done] == ["seed 2"]
    assert isinstance(done[0], GroupDone)
    expected = sample(fresh, third)["seed 2"]
    assert [drawn.tokens for drawn in done[0].samples] == [drawn.tokens for drawn in expected]


def test_a_request_for_another_version_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineFailed, match="version 2, while version 1"):
        sample(engine, asked(PROMPTS[0], version=2))


def test_a_malformed_prompt_is_refused_as_such_whatever_its_version(engine: Engine) -> None:
    with pytest.raises(TokensInvalid, match="7 bytes are not an array"):
        sample(engine, asked(PROMPTS[0], version=2).model_copy(update={"prompt": bytes(7)}))


def test_nothing_is_swapped_while_samples_are_drawn(make: Make, policy: Path) -> None:
    engine = make()
    engine.load(policy, 1)
    engine.add(asked(PROMPTS[0]))
    with pytest.raises(EngineFailed, match="cannot be swapped"):
        engine.load(policy, 2)
    assert engine.busy
    assert engine.cancel(["seed 7"])


def test_every_end_token_of_the_policy_ends_a_completion(make: Make, policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    everything = list(range(320))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": everything}))
    engine = make()
    engine.load(folder, 1)
    (group,) = sample(engine, asked(PROMPTS[1])).values()
    assert {(len(one.tokens), one.finish) for one in group} == {(4, "stop")}


def test_a_new_version_is_swapped_in_place_and_samples_as_if_built_anew(
    pair: tuple[Make, Path], tmp_path: Path
) -> None:
    make, folder = pair
    other = shutil.copytree(folder, tmp_path / "other")
    for part in other.glob("*.safetensors"):
        save_file({name: tensor * 0.9 for name, tensor in load_file(part).items()}, part, metadata={"format": "pt"})
    with_canary(other)
    swapped, fresh = make(), make()
    assert swapped.load(folder, 1).rebuilt
    before = sample(swapped, asked(PROMPTS[2]))
    assert not swapped.load(other, 2).rebuilt
    fresh.load(other, 2)
    after = sample(swapped, asked(PROMPTS[2], version=2))
    assert after == sample(fresh, asked(PROMPTS[2], version=2)) != before


@pytest.mark.parametrize("model", ["policy", "foreign"])
def test_a_layer_that_stays_from_the_version_before_is_found(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The canary cannot find it in bf16 where versions are near; a swap compares every tensor with the files."""
    folder: Path = request.getfixturevalue(model)
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / "model.safetensors"
    near = {name: tensor * 1.01 for name, tensor in load_file(file).items()}
    save_file(near, file, metadata={"format": "pt"})
    with_canary(other)
    engine, fresh = TorchEngine(dtype="bfloat16"), TorchEngine(dtype="bfloat16")
    engine.load(folder, 1)
    keep_copy_of_a_layer(engine._loaded())
    assert engine.load(other, 2).rebuilt, "weights that a swap does not reach are loaded anew"
    fresh.load(other, 2)
    assert sample(engine, asked(PROMPTS[2], version=2)) == sample(fresh, asked(PROMPTS[2], version=2))


def keep_copy_of_a_layer(decoder: Any) -> None:
    """Have the decoder compute with a copy of a weight, as a kernel that packs its weights does."""
    if isinstance(decoder, Qwen3):
        layers = decoder._weights.layers
        layers[1] = layers[1]._replace(mlp_norm=layers[1].mlp_norm.clone())
    else:
        norm = decoder._model.model.layers[1].post_attention_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)


def test_another_configuration_is_built_anew(make: Make, policy: Path, grouped: Path) -> None:
    engine = make()
    engine.load(policy, 1)
    assert engine.load(grouped, 2).rebuilt


def test_memory_that_ends_while_groups_are_let_in_costs_none_of_them(
    make: Make, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, left = make(), [1, 0]
    engine.load(policy, 1)

    def scarce(*arguments: Any) -> Any:
        if left.pop():
            return uniform_table(*arguments)
        raise MemoryError

    monkeypatch.setattr(sampling_loop, "uniform_table", scarce)
    engine.add(asked(PROMPTS[1], 1, max_new_tokens=40))
    engine.step()
    engine.add(asked(PROMPTS[2], 2))
    engine.step()
    monkeypatch.undo()
    answers = []
    while engine.busy:
        answers += engine.step()
    assert {answer.request_id: type(answer) for answer in answers} == {"seed 1": GroupDone, "seed 2": GroupDone}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(asked([320]), "vocabulary"), (asked([5], max_new_tokens=512), "positions")],
)
def test_what_the_policy_cannot_do_is_refused(engine: Engine, wrong: SampleRequest, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        sample(engine, wrong)


def test_what_was_sampled_is_counted_once(make: Make, policy: Path) -> None:
    engine = make()
    engine.load(policy, 1)
    drawn = sample(engine, *(asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)))
    measured = engine.measured()
    assert measured.prompt_tokens == sum(map(len, PROMPTS))
    assert measured.first_tokens == 5 * len(PROMPTS)
    tokens = sum(len(one.tokens) // 4 for group in drawn.values() for one in group)
    assert measured.first_tokens + measured.later_tokens == tokens
    assert measured.prefill_s > 0
    assert measured.decode_s > 0
    assert engine.measured().later_tokens == 0


def test_a_card_that_failed_ends_the_process(grouped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of a process succeeds after an error of the driver: the agent starts another process."""
    engine, ended = TorchEngine(), list[int]()
    engine.load(grouped, 1)
    engine.add(asked(PROMPTS[0]))

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Qwen3, "prefill", fail)  # as a card does that has failed; this machine has none
    monkeypatch.setattr("os._exit", ended.append)  # which would end the tests
    engine.step()
    assert ended == [1]


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_memory_that_a_cards_libraries_lack_is_out_of_memory(message: str, is_memory: bool) -> None:
    assert TorchEngine().is_out_of_memory(RuntimeError(message)) is is_memory
