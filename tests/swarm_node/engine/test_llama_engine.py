"""Properties of the llama engine alone: conversion, precision, room that grows, and weights written in place."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from safetensors.torch import load_file, save_file

from protocol.errors import EngineFailed
from protocol.work.rollout import Sample
from swarm_node.engine.llama import ggml, weights
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.llama.ggml import Bytes, Type, Weight, encode
from swarm_node.engine.llama.recipes import recipe_of
from swarm_node.engine.torch.engine import TorchEngine
from tests.swarm_node.engine.asking import PROMPTS, asked, sample
from tests.tiny_policy import with_canary


def changed(folder: Path, to: Path, names: str = "") -> Path:
    """A sound version in which the tensors with this in their name are others."""
    other = shutil.copytree(folder, to)
    for part in other.glob("*.safetensors"):
        tensors = {name: tensor * 0.9 if names in name else tensor for name, tensor in load_file(part).items()}
        save_file(tensors, part, metadata={"format": "pt"})
    return with_canary(other)


def strayed(ours: tuple[Sample, ...], theirs: tuple[Sample, ...]) -> float:
    """The mean error of log-probabilities, over samples of the same tokens."""
    same = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.tokens == other.tokens]
    assert len(same) >= 2
    pairs = [[np.frombuffer(sample.logprobs, "<f4") for sample in pair] for pair in same]
    return float(np.mean([np.abs(one - other).mean() for one, other in pairs]))


@pytest.mark.parametrize("kind", ["policy", "grouped"])
def test_float32_gives_the_tokens_of_torch(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    torch, llama = TorchEngine(), LlamaEngine(dtype="float32")
    torch.load(folder, 1)
    assert llama.load(folder, 1).numerics == "llama/fp32/cpu"
    wanted = [asked(prompt, seed, max_new_tokens=40) for seed, prompt in enumerate(PROMPTS)]
    expected = sample(torch, *wanted)
    for name, group in sample(llama, *wanted).items():
        assert [one.tokens for one in group] == [one.tokens for one in expected[name]]
        assert strayed(group, expected[name]) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float16", 1e-6, 2e-3), ("bfloat16", 1e-5, 1e-2), ("q8_0", 1e-5, 3e-2)]
)
@pytest.mark.parametrize("kind", ["policy", "grouped"])
def test_each_precision_stays_as_near_to_float32_as_it_can(
    kind: str, dtype: str, least: float, most: float, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    torch, llama = TorchEngine(), LlamaEngine(dtype=dtype)
    torch.load(folder, 1)
    llama.load(folder, 1)
    wanted = asked(PROMPTS[2], samples=16, max_new_tokens=8)
    (expected,), (group,) = sample(torch, wanted).values(), sample(llama, wanted).values()
    assert least < strayed(group, expected) < most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("kind", ["policy", "grouped"])
def test_a_swap_in_any_precision_gives_what_a_fresh_load_gives(
    kind: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    other = changed(folder, tmp_path / "other")
    swapped, fresh = LlamaEngine(dtype=dtype), LlamaEngine(dtype=dtype)
    swapped.load(folder, 1)
    sample(swapped, asked(PROMPTS[3], max_new_tokens=30))  # so that an old cache is there
    assert not swapped.load(other, 2).rebuilt
    fresh.load(other, 2)
    wanted = asked(PROMPTS[3], version=2, max_new_tokens=30)
    assert sample(swapped, wanted) == sample(fresh, wanted)


def test_only_tensors_that_changed_are_written(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, written, write = changed(policy, tmp_path / "other", "layers.1.mlp"), list[int](), Weight.write

    def noting(weight: Weight, values: Bytes) -> None:
        written.append(values.nbytes)
        write(weight, values)

    engine = LlamaEngine(dtype="float16")
    engine.load(policy, 1)
    monkeypatch.setattr(Weight, "write", noting)
    engine.load(other, 2)
    assert written == [32 * 48 * 2] * 3


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # eight bits show only the grossest
def test_a_swap_that_leaves_old_weights_behind_is_caught_by_the_canary(
    dtype: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, writes, write = changed(policy, tmp_path / "other"), list[int](), Weight.write

    def forgetful(weight: Weight, values: Bytes) -> None:
        writes.append(1)
        if len(writes) > 1:
            write(weight, values)

    engine = LlamaEngine(dtype=dtype)
    engine.load(policy, 1)
    monkeypatch.setattr(Weight, "write", forgetful)
    with pytest.raises(EngineFailed, match="does not give its canary"):
        engine.load(other, 2)
    monkeypatch.undo()
    with pytest.raises(EngineFailed, match="No policy is loaded"):
        sample(engine, asked(PROMPTS[0], version=2))
    assert engine.load(other, 2).rebuilt, "what is in memory is not trusted again"


def test_weights_that_cannot_be_found_are_loaded_anew(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A llama.cpp whose tensors have another layout gives such weights."""
    monkeypatch.setattr(ggml, "_name", lambda _address: b"another")
    engine = LlamaEngine(dtype="float16")
    engine.load(policy, 1)
    assert engine.load(changed(policy, tmp_path / "other"), 2).rebuilt
    assert "cannot be swapped in place" in caplog.text


def test_a_policy_that_llama_cpp_computes_otherwise_is_refused_with_the_engine_that_does_not(windowed: Path) -> None:
    with pytest.raises(EngineFailed, match=r"does not support this policy \(mistral\): .* without windows") as refused:
        LlamaEngine(dtype="float16").load(windowed, 1)
    assert "--engine torch" in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "helium"}, "converts no policy of this architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
        ({"hidden_act": "gelu"}, "computes silu, and config.json names gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rotary positions of the kind longrope"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "truncate": False}}, "rounds the bounds"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ({"num_key_value_heads": 3}, "do not share 3 keys evenly"),
        ({"num_key_value_heads": 0}, "gives 0 as num_key_value_heads"),
        ({"rms_norm_eps": "nothing"}, "gives 'nothing' as rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "gives 0 as rope_theta"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(
    foreign: Path, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    folder = shutil.copytree(foreign, tmp_path / "policy")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineFailed, match=reason) as refused:
        LlamaEngine(dtype="float16").load(folder, 1)
    assert "does not support this policy" in refused.value.message


def test_a_tensor_that_llama_cpp_has_no_place_for_is_refused_by_name(foreign: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(foreign, tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.gate.scale"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=r"has no tensors for model\.layers\.0\.gate\.scale"):
        LlamaEngine(dtype="float16").load(folder, 1)


def test_rows_keep_what_they_have_when_the_room_grows(grouped: Path) -> None:
    """Longer than a row's first room, longer than a batch, and more rows than there were, while others run."""
    torch, llama = TorchEngine(), LlamaEngine(dtype="float32")
    wanted = [
        asked([19, 20, 31], 1, samples=3, max_new_tokens=60),
        asked([19, 20, 31] * 90, 2, samples=20, max_new_tokens=20),
        asked([20, 19] * 1050, 3, samples=1, max_new_tokens=3),
    ]
    texts = []
    for engine in (torch, llama):
        engine.load(grouped, 1)
        done = []
        for number, request in enumerate(wanted):
            engine.add(request)
            for _ in range(4 * number + 2):
                done += engine.step()
        while engine.busy:
            done += engine.step()
        texts.append({group.request_id: [one.tokens for one in group.samples] for group in done})  # type: ignore[union-attr]  # a failed group has no samples, and fails the test
    assert texts[0] == texts[1]


def test_the_file_has_each_tensor_under_the_name_and_in_the_type_that_llama_expects(
    grouped: Path, tmp_path: Path
) -> None:
    recipe, config = recipe_of(json.loads((grouped / "config.json").read_bytes()))
    given = weights.sources(grouped)
    wanted = weights.places(recipe, config, Type.Q8_0, given)
    weights.write_gguf(tmp_path / "policy.gguf", recipe, config, wanted, given)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "policy.gguf").tensors}
    assert found.keys() == {place.name for place in wanted}
    assert found["blk.0.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.F16, "48 are no two blocks of 32"
    assert found["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert found["output.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    exact = load_part(grouped, "lm_head.weight")
    assert np.abs(quants.dequantize(found["output.weight"].data, gguf.GGMLQuantizationType.Q8_0) - exact).max() < 1e-3


def load_part(folder: Path, name: str) -> np.ndarray:
    parts = (load_file(part) for part in folder.glob("*.safetensors"))
    found: np.ndarray = next(part[name] for part in parts if name in part).float().numpy()
    return found


@pytest.mark.parametrize("kind", list(Type))
def test_values_are_encoded_as_gguf_itself_encodes_them(kind: Type) -> None:
    values = np.random.default_rng(3).standard_normal((5, 96)).astype(np.float32)
    expected = quants.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    assert np.array_equal(encode(values, kind), expected.reshape(5, -1))
