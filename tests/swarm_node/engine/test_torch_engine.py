"""The torch engine against a plain forward pass, and against the definition of seed-bound sampling."""

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
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from protocol.errors import EngineFailed
from protocol.rollout import Sample, pack_tokens, unpack_tokens
from protocol.sampling import pick, uniform_table, uniforms
from swarm_node.engine import qwen3, torch_engine
from swarm_node.engine.messages import GroupDone, GroupFailed, Request
from swarm_node.engine.torch_engine import TorchEngine
from tests.tiny_policy import make_other_policy, with_canary

END = 2
DEADLINE_S = 120.0
PROMPTS = ([19], [19, 20, 31], [19, 20, 13, 21, 22, 31], list(range(10, 30)))
"""Of unequal length, so that all but one are padded."""
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40_960, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip  # one word after the other


def asked(prompt: Sequence[int], seed: int = 7, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": f"seed {seed}",
        "version": 1,
        "samples": 5,
        "max_new_tokens": 12,
        "temperature": 1.0,
    }
    return Request(prompt=pack_tokens(list(prompt)), seed=seed, **(fields | changes))


def sample(engine: TorchEngine, *requests: Request) -> dict[str, tuple[Sample, ...]]:
    groups: list[GroupDone] = []
    engine.generate(requests, groups.append)
    assert sorted(group.request_id for group in groups) == sorted(wanted.request_id for wanted in requests)
    return {group.request_id: group.samples for group in groups}


@cache
def plain(policy: Path) -> Any:
    """The model as transformers knows it."""
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def reference(policy: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """What a plain forward pass says about each completion token: [T, V] log-probabilities."""
    with torch.inference_mode():
        logits = plain(policy)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores: torch.Tensor = torch.log_softmax(logits / temperature, dim=-1)
    return scores


@pytest.fixture(scope="module")
def engine(policy: Path) -> TorchEngine:
    engine = TorchEngine()
    engine.load(policy, 1)
    return engine


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with grouped queries, a head of its own, bf16 weights and several files."""
    folder = tmp_path_factory.mktemp("grouped")
    config = Qwen3Config(
        **SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    made = make_other_policy(folder, config, dtype=torch.bfloat16, part_size="20KB")
    assert len(list(made.glob("*.safetensors"))) > 1
    return made


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that only transformers knows."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    return make_other_policy(tmp_path_factory.mktemp("foreign"), config, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["policy", "grouped", "foreign"])
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    kind: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    engine = TorchEngine()
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
    program = [sys.executable, str(Path(__file__).with_name("tight_memory.py")), str(grouped)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fewer at once, the same tokens",
        "There is not enough memory for one sample.",
        "and goes on",
    ]
    assert "out of memory with 2048 samples at once; from now on 1024" in done.stderr


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


def test_a_lease_gives_the_same_tokens_in_any_company(engine: TorchEngine) -> None:
    requests = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    together = sample(engine, *requests)
    for alone in requests:
        assert [drawn.tokens for drawn in sample(engine, alone)[alone.request_id]] == [
            drawn.tokens for drawn in together[alone.request_id]
        ]


def test_samples_and_seeds_differ(engine: TorchEngine) -> None:
    groups = sample(engine, asked(PROMPTS[1], 1), asked(PROMPTS[1], 2))
    assert len({drawn.tokens for group in groups.values() for drawn in group}) == 10


def test_a_completion_ends_with_its_end_token_or_at_its_limit(engine: TorchEngine) -> None:
    (drawn,) = sample(engine, asked(PROMPTS[1], samples=32, max_new_tokens=60)).values()
    assert {one.finish for one in drawn} == {"stop", "length"}
    for one in drawn:
        tokens = unpack_tokens(one.tokens).tolist()
        assert len(one.logprobs) == len(one.tokens)
        assert END not in tokens[:-1]
        assert (tokens[-1] == END) == (one.finish == "stop")
        assert one.finish == "stop" or len(tokens) == 60


def test_requests_keep_their_own_limit_and_finish_on_their_own(engine: TorchEngine) -> None:
    finished: list[str] = []
    wanted = [asked(PROMPTS[0], request_id=str(limit), max_new_tokens=limit) for limit in (9, 2, 1)]
    engine.generate(wanted, lambda group: finished.append(group.request_id))
    assert finished == ["1", "2", "9"]


def test_every_group_tells_how_long_ago_its_first_token_was_drawn(engine: TorchEngine) -> None:
    done: list[GroupDone] = []
    started = time.monotonic()
    engine.generate([asked(PROMPTS[0], max_new_tokens=limit) for limit in (9, 2, 1)], done.append)
    ages = [group.first_token_ago_s for group in done]
    assert 0 <= ages[0] < ages[1] < ages[2] < time.monotonic() - started


def test_slots_are_refilled_while_a_long_sample_runs(policy: Path) -> None:
    engine = TorchEngine(slots=4)
    engine.load(policy, 1)
    ended: list[str] = []
    limits = [40, *[2] * 12]
    wanted = [asked([19], 3, request_id=f"{n}", samples=1, max_new_tokens=limit) for n, limit in enumerate(limits)]
    engine.generate(wanted, lambda group: ended.append(group.request_id))
    assert len(ended) == 13
    assert ended[-1] == "0", "the short ones did not wait for the long one, though it came first"


@pytest.mark.parametrize("slots", [1, 2, 7, 20, 64])  # parts of a group, one group, all at once
@pytest.mark.parametrize("kind", ["policy", "foreign"])
def test_the_number_of_slots_changes_no_token(kind: str, slots: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    wanted = [asked(prompt, seed, max_new_tokens=3 + 9 * seed) for seed, prompt in enumerate(PROMPTS)]
    plenty, few = TorchEngine(slots=256), TorchEngine(slots=slots)
    plenty.load(folder, 1)
    few.load(folder, 1)
    expected = sample(plenty, *wanted)
    for name, group in sample(few, *wanted).items():
        assert [drawn.tokens for drawn in group] == [drawn.tokens for drawn in expected[name]]


def test_requests_may_come_and_be_cancelled_while_others_run(policy: Path) -> None:
    engine, fresh = TorchEngine(slots=8), TorchEngine()
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


def test_a_request_for_another_version_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(EngineFailed, match="version 2, while version 1"):
        sample(engine, asked(PROMPTS[0], version=2))


def test_nothing_is_swapped_while_samples_are_drawn(policy: Path) -> None:
    engine = TorchEngine()
    engine.load(policy, 1)
    engine.add(asked(PROMPTS[0]))
    with pytest.raises(EngineFailed, match="cannot be swapped"):
        engine.load(policy, 2)
    assert engine.busy
    assert engine.cancel(["seed 7"])


def test_every_end_token_of_the_policy_ends_a_completion(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    everything = list(range(320))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": everything}))
    engine = TorchEngine()
    engine.load(folder, 1)
    (group,) = sample(engine, asked(PROMPTS[1])).values()
    assert {(len(one.tokens), one.finish) for one in group} == {(4, "stop")}


@pytest.mark.parametrize("kind", ["policy", "grouped", "foreign"])
def test_a_new_version_is_swapped_in_place_and_samples_as_if_built_anew(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    other = shutil.copytree(folder, tmp_path / "other")
    for part in other.glob("*.safetensors"):
        save_file({name: tensor * 0.9 for name, tensor in load_file(part).items()}, part, metadata={"format": "pt"})
    with_canary(other)
    swapped, fresh = TorchEngine(), TorchEngine()
    assert swapped.load(folder, 1).rebuilt
    before = sample(swapped, asked(PROMPTS[2]))
    assert not swapped.load(other, 2).rebuilt
    fresh.load(other, 2)
    after = sample(swapped, asked(PROMPTS[2], version=2))
    assert after == sample(fresh, asked(PROMPTS[2], version=2)) != before


def test_another_configuration_is_built_anew(policy: Path, grouped: Path) -> None:
    engine = TorchEngine()
    engine.load(policy, 1)
    assert engine.load(grouped, 2).rebuilt


def damaged(folder: Path, how: str) -> None:
    """Damage the weights of a policy folder, of the same configuration."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    match how:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1000])
            return
        case "garbage":
            file.write_bytes(b"\xff" * 5000)
            return
        case "gone":
            file.unlink()
            return
        case "a tensor too few":
            del tensors["model.norm.weight"]
        case "a tensor too many":
            tensors["model.extra.weight"] = torch.ones(3)
        case "another shape":  # of the last tensor: those before it must not have been copied
            tensors["model.norm.weight"] = torch.ones(31)
        case "twice":
            save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "more.safetensors")
        case "not a number":
            tensors["model.norm.weight"][0] = float("nan")
        case "queries for keys":
            for kind, other in (("q", "k"), ("k", "q")):
                name = "model.layers.1.self_attn.{}_proj.weight"
                tensors[name.format(kind)] = load_file(file)[name.format(other)]
        case "one layer of another version":
            tensors["model.layers.0.mlp.down_proj.weight"] *= 1.1
    save_file(tensors, file, metadata={"format": "pt"})


DAMAGES = (
    "truncated", "garbage", "gone", "a tensor too few", "a tensor too many", "another shape", "twice",
    "not a number", "queries for keys", "one layer of another version",
)  # fmt: skip  # one word after the other


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_version_is_never_sampled_from_and_a_sound_one_loads_after_it(
    policy: Path, tmp_path: Path, how: str
) -> None:
    bad = shutil.copytree(policy, tmp_path / "bad")
    damaged(bad, how)
    engine, fresh = TorchEngine(), TorchEngine()
    for before in (None, policy):  # as the first version, and as a swap
        if before:
            engine.load(before, 1)
        with pytest.raises(EngineFailed, match=r"cannot be loaded|does not give its canary"):
            engine.load(bad, 2)
        for version in (1, 2):
            with pytest.raises(EngineFailed, match="No policy is loaded"):
                engine.add(asked(PROMPTS[0], version=version))
    assert engine.load(policy, 1).rebuilt
    fresh.load(policy, 1)
    assert sample(engine, asked(PROMPTS[0])) == sample(fresh, asked(PROMPTS[0]))


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"{}", b'{"model_type": "qwen3"}', b'{"model_type": "nothing", "eos_token_id": 2}']
)
def test_a_folder_that_is_no_policy_is_refused(policy: Path, tmp_path: Path, config: bytes) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "config.json").write_bytes(config)
    for bad in (folder, tmp_path / "absent"):
        with pytest.raises(EngineFailed, match="cannot be loaded"):
            TorchEngine().load(bad, 1)


@pytest.mark.parametrize("canary", [b"", b"[]", b'{"tokens": [1, 2, 3], "logprobs": [1.0]}'])
def test_a_canary_that_is_none_is_refused(policy: Path, tmp_path: Path, canary: bytes) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "canary.json").write_bytes(canary)
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        TorchEngine().load(folder, 1)


def test_a_canary_beyond_the_vocabulary_is_refused_before_it_reaches_the_device(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "canary.json").write_text('{"tokens": [1, 320, 3], "logprobs": [-1.0, -1.0]}')
    with pytest.raises(EngineFailed, match="token 320, the vocabulary only 320"):
        TorchEngine().load(folder, 1)


def test_a_policy_without_a_canary_is_loaded(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "canary.json").unlink()
    assert TorchEngine().load(folder, 1).rebuilt


def test_a_group_whose_probabilities_are_no_numbers_fails_alone(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = float("nan")  # tied: also a logit, but that of one token
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "canary.json").unlink()
    engine = TorchEngine()
    engine.load(folder, 1)
    engine.add(asked([300, 5]))
    (failed,) = engine.step()
    assert isinstance(failed, GroupFailed)
    assert (failed.request_id, failed.code) == ("seed 7", "engine_failed")
    assert "no numbers" in failed.message
    assert not engine.busy


def test_probabilities_that_are_no_numbers_leave_nothing_behind_in_the_slots(grouped: Path, tmp_path: Path) -> None:
    """A masked NaN is still one: who comes next into these slots must not meet it. With these seeds none draws 300."""
    folder, embedding = shutil.copytree(grouped, tmp_path / "policy"), "model.embed_tokens.weight"  # not tied
    part = folder / json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"][embedding]
    tensors = load_file(part)
    tensors[embedding][300] = float("nan")
    save_file(tensors, part, metadata={"format": "pt"})
    (folder / "canary.json").unlink()
    engine = TorchEngine()
    engine.load(folder, 1)
    bad = asked([300, *range(10, 30)], 1)
    last = asked([300, 5], 5, max_new_tokens=1)  # ends with the same draw
    good, long, short = asked(PROMPTS[1], 2, max_new_tokens=1), asked(range(10, 22), 6), asked([19], 8)
    for requests in ([bad], [good, bad, last], [long, short]):
        for wanted in requests:
            engine.add(wanted)
        answers = engine.step()
        while engine.busy:
            answers += engine.step()
        kinds = sorted((answer.request_id, isinstance(answer, GroupDone)) for answer in answers)
        assert kinds == sorted((one.request_id, one not in (bad, last)) for one in requests)


def test_memory_that_ends_while_groups_are_let_in_costs_none_of_them(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, left = TorchEngine(), [1, 0]
    engine.load(policy, 1)

    def scarce(*arguments: Any) -> Any:
        if left.pop():
            return uniform_table(*arguments)
        raise MemoryError

    monkeypatch.setattr(torch_engine, "uniform_table", scarce)
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
    ("changes", "known"),
    [
        ({}, True),
        ({"rope_scaling": {"rope_type": "default"}}, True),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, False),  # transformers lets it win over the new form
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, False),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, False),
        ({"partial_rotary_factor": 0.5}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"use_sliding_window": True}, False),
        ({"attention_bias": True}, False),
        ({"hidden_act": "gelu"}, False),
        ({"model_type": "qwen3_moe"}, False),
    ],
)
def test_what_our_decoder_does_not_compute_goes_the_generic_way(
    policy: Path, changes: dict[str, Any], known: bool
) -> None:
    config = json.loads((policy / "config.json").read_bytes())
    assert qwen3.supports(config | changes) is known


def test_what_a_configuration_leaves_out_is_what_transformers_takes_it_for() -> None:
    given = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    ours, theirs = qwen3.Shape.of(given), Qwen3Config(**given)
    expected = (theirs.head_dim, theirs.num_key_value_heads, theirs.tie_word_embeddings)
    assert (ours.head, ours.kv_heads, ours.tied) == expected
    assert (ours.epsilon, ours.rope_base) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])


def test_an_end_token_of_number_zero_ends_a_completion(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    engine = TorchEngine()
    engine.load(folder, 1)
    (group,) = sample(engine, asked(PROMPTS[1], samples=32, max_new_tokens=60)).values()
    ends = {(bool(unpack_tokens(one.tokens)[-1] == 0), one.finish) for one in group}
    assert ends == {(True, "stop"), (False, "length")}


def test_a_foreign_policy_that_lacks_a_tensor_is_refused_not_made_up(foreign: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(foreign, tmp_path / "policy")
    damaged(folder, "a tensor too few")
    (folder / "canary.json").unlink()
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(asked([320]), "vocabulary"), (asked([5], max_new_tokens=512), "positions")],
)
def test_what_the_policy_cannot_do_is_refused(engine: TorchEngine, wrong: Request, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        sample(engine, wrong)


def test_what_was_sampled_is_counted_once(policy: Path) -> None:
    engine = TorchEngine()
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
