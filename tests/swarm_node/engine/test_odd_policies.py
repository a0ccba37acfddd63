"""Policies that are damaged, foreign, or say odd things of themselves: computed rightly, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from protocol import limits
from protocol.errors import EngineFailed
from protocol.work.rollout import unpack_tokens
from swarm_exact import shape as model_shape
from swarm_node.engine.messages import GroupDone, GroupFailed
from swarm_node.engine.policy_files import has_experts
from swarm_node.engine.torch.engine import TorchEngine
from tests.architectures import zoo
from tests.swarm_node.engine.asking import PROMPTS, SIZES, asked, sample


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


@pytest.mark.parametrize("name", ["modeling_swarm.py", "pytorch_model.bin", "consolidated.00.pth", "kernel.so", "code"])
def test_a_folder_with_anything_but_numbers_and_text_is_refused(policy: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / name).write_bytes(b"import os")
    with pytest.raises(EngineFailed, match=f"{name} is neither"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize("value", [{"AutoModelForCausalLM": "modeling_swarm.Model"}, {}, None])
def test_a_configuration_that_names_code_is_refused(policy: Path, tmp_path: Path, value: object) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": value}))
    with pytest.raises(EngineFailed, match="auto_map"):
        TorchEngine().load(folder, 1)


def promising(folder: Path, **changes: object) -> Path:
    """A policy whose configuration says something else, and that is loaded unchecked."""
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "canary.json").unlink()
    return folder


@pytest.mark.parametrize("model", ["policy", "foreign"])
def test_kernels_that_a_configuration_names_are_neither_fetched_nor_run(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(model), tmp_path / "policy")
    promising(folder, attn_implementation="kernels-community/flash-attn2")
    with pytest.raises(EngineFailed, match="names code"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize("model", ["policy", "foreign"])
def test_layers_that_no_tensors_stand_behind_are_not_made(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Made first and compared then, they would fill the memory: a few bytes promise a hundred million."""
    folder = shutil.copytree(request.getfixturevalue(model), tmp_path / "policy")
    promising(folder, num_hidden_layers=1000, layer_types=None)
    with pytest.raises(EngineFailed, match="has 1000 layers"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size"])
def test_sizes_that_no_bytes_stand_behind_are_not_made(foreign: Path, tmp_path: Path, name: str) -> None:
    folder = promising(shutil.copytree(foreign, tmp_path / "policy"), **{name: 2**20})
    with pytest.raises(EngineFailed, match="parameters, but the tensors have"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize("config", [b"[" * 100_000, b" " * (limits.POLICY_CONFIG_MAX_BYTES + 1)], ids=["deep", "long"])
def test_a_configuration_without_end_ends_nobody(policy: Path, tmp_path: Path, config: bytes) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "config.json").write_bytes(config)
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        TorchEngine().load(folder, 1)


@pytest.mark.parametrize("canary", [b"", b"[]", b'{"tokens": [1, 2, 3], "logprobs": [1.0]}'])
def test_a_canary_that_is_none_is_refused(policy: Path, tmp_path: Path, canary: bytes) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "canary.json").write_bytes(canary)
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        TorchEngine().load(folder, 1)


def test_a_canary_beyond_the_vocabulary_is_refused_before_it_reaches_the_device(policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    values = [-1.0] * 4
    said = {"tokens": [1, 320, 3, 4, 5], "logprobs": values, "bfloat16": values, "float16": values}
    (folder / "canary.json").write_text(json.dumps(said))
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
    assert "NaN" in failed.message
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
        ({"model_type": "mistral"}, False),
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "mlp_bias": True}, False),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "qwen2", "use_sliding_window": True}, False),
    ],
)
def test_what_our_decoder_does_not_compute_goes_the_generic_way(
    policy: Path, changes: dict[str, Any], known: bool
) -> None:
    config = json.loads((policy / "config.json").read_bytes())
    assert model_shape.supports(config | changes) is known


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen2Config, LlamaConfig])
def test_what_a_configuration_leaves_out_is_what_transformers_takes_it_for(kind: Any) -> None:
    given = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    theirs: Any = kind(**given)
    ours = model_shape.ModelShape.from_config({"model_type": kind.model_type, **given})
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    expected = (head, theirs.num_key_value_heads, theirs.tie_word_embeddings)
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


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3"])
def test_a_policy_in_float16_is_sampled_in_float16(name: str, tmp_path: Path) -> None:
    engine = TorchEngine(dtype="float16")
    assert engine.load(zoo.make(name, tmp_path, dtype=torch.float16), 1).numerics == "torch/fp16/cpu"
    assert sample(engine, asked(PROMPTS[1]))


def test_an_architecture_that_cannot_be_sampled_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="mamba2 is not supported"):
        TorchEngine().load(zoo.make("Mamba 2", tmp_path), 1)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-NeoX and Pythia", "DeepSeek-V3"])
def test_a_version_whose_files_hold_weights_otherwise_is_written_over_the_one_before(name: str, tmp_path: Path) -> None:
    """Buffers, too: a router's correction that stayed from the version before would send tokens to other experts."""
    first, second = (zoo.make(name, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    engine, fresh = TorchEngine(), TorchEngine()
    engine.load(first, 1)
    assert not engine.load(second, 2).rebuilt
    fresh.load(second, 2)
    wanted = asked(PROMPTS[1], version=2)
    assert sample(engine, wanted) == sample(fresh, wanted)


def test_a_mixture_of_experts_is_known_by_its_configuration() -> None:
    """vLLM loads each version of one anew, since it permutes the weights of experts once they are loaded."""
    names = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
    for name, (kind, changes) in zoo.ARCHITECTURES.items():
        config = {"model_type": kind, **changes}
        nested = {"model_type": kind, "text_config": changes}
        assert has_experts(config) == has_experts(nested) == bool(names & changes.keys()), name
    assert not has_experts({"num_experts": None, "text_config": None})
    assert not has_experts({"num_local_experts": 1})
