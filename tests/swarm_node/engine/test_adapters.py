"""A version that is an adapter beside its base is the merged policy, in every engine, however it was come by."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import EngineFailed
from protocol.policy import adapter
from protocol.policy.canary import FIRST_JUDGED
from swarm_node.engine.engine import Engine
from swarm_node.engine.policy_files import tensor_files
from swarm_node.engine.torch import weights
from swarm_node.engine.torch.engine import TorchEngine
from tests.adapted_policy import make_adapted, make_merged
from tests.swarm_node.engine.asking import PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make


def said(engine: Engine, version: int) -> list[tuple[bytes, bytes]]:
    """Return what the engine samples, to the last bit."""
    requests = [asked(prompt, seed, version=version) for seed, prompt in enumerate(PROMPTS)]
    return [(one.tokens, one.logprobs) for group in sample(engine, *requests).values() for one in group]


def test_an_adapter_beside_its_base_samples_as_the_merged_policy(pair: tuple[Make, Path], tmp_path: Path) -> None:
    make, policy = pair
    adapted = make_adapted(policy, tmp_path / "adapted", seed=1)
    merged = make_merged(adapted, tmp_path / "merged")
    built, swapped, reference = make(), make(), make()
    swapped.load(policy, 1)
    assert not swapped.load(adapted, 2).rebuilt or "foreign" in str(policy), "the canary passed, in place"
    built.load(adapted, 2)
    reference.load(merged, 2)
    expected = said(reference, 2)
    assert said(built, 2) == said(swapped, 2)
    for (tokens, logprobs), (merged_tokens, merged_logprobs) in zip(said(built, 2), expected, strict=True):
        assert tokens == merged_tokens
        assert np.abs(np.frombuffer(logprobs, "<f4") - np.frombuffer(merged_logprobs, "<f4")).max() < 1e-5
    reference.load(policy, 1)
    assert said(reference, 1) != expected


def test_a_policy_that_passed_its_canary_is_not_scored_again_while_its_files_are_the_same(
    policy: Path, tmp_path: Path
) -> None:
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    engine = TorchEngine()
    for version, folder in enumerate(folders):
        engine.load(folder, version)
    file = folders[0] / "canary.json"
    before = file.stat()
    file.write_text(file.read_text().replace("-0.", "-9.").replace("-1.", "-9.").replace("-5.", "-9."))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a change that no file system makes by itself
    assert not engine.load(folders[0], 2).rebuilt, "it was not read again"
    os.utime(file)
    engine.load(folders[1], 3)
    with pytest.raises(EngineFailed, match="canary"):
        engine.load(folders[0], 4)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(EngineFailed, match="canary"):
        engine.load(folders[0], 5)  # the model is built anew


def falsify(folder: Path, judged: slice) -> None:
    """Change the canary's values of some judged tokens."""
    file = folder / "canary.json"
    value = json.loads(file.read_text())
    for numbers in (value["logprobs"], value["bfloat16"], value["float16"]):
        for place in range(FIRST_JUDGED - 1, len(numbers))[judged]:
            numbers[place] -= 9.0
    file.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("dtype", "first", "judged", "passes"),
    [
        ("float32", "whole", slice(0, 8), False),
        ("float32", "whole", slice(8, None), True),
        ("float32", "none", slice(8, None), False),
        ("bfloat16", "whole", slice(8, None), False),
    ],
)
def test_after_a_compared_swap_in_float32_one_prefix_of_the_canary_is_scored(
    policy: Path, tmp_path: Path, dtype: str, first: str, judged: slice, passes: bool
) -> None:
    """The whole canary is scored by a model that reproduced none yet, and in a precision with noise."""
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    if first == "none":
        (folders[0] / "canary.json").unlink()
    falsify(folders[1], judged)
    engine = TorchEngine(dtype=dtype)
    engine.load(folders[0], 1)
    if passes:
        assert not engine.load(folders[1], 2).rebuilt
    else:
        with pytest.raises(EngineFailed, match="does not give its canary"):
            engine.load(folders[1], 2)
    with pytest.raises(EngineFailed, match="does not give its canary"):
        TorchEngine(dtype=dtype).load(folders[1], 3)


def cut(folder: Path, tokens: int) -> None:
    """Keep the first tokens of a canary."""
    file = folder / "canary.json"
    value = json.loads(file.read_text())
    kept = {name: value[name][: tokens - 1] for name in ("logprobs", "bfloat16", "float16")}
    file.write_text(json.dumps({"tokens": value["tokens"][:tokens]} | kept))


@pytest.mark.parametrize(("tokens", "passes"), [(3, False), (15, False), (16, True)])
def test_a_canary_that_judges_few_tokens_proves_nothing(
    policy: Path, tmp_path: Path, tokens: int, passes: bool
) -> None:
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    cut(folders[0], tokens)
    falsify(folders[1], slice(8, None))
    engine = TorchEngine()
    engine.load(folders[0], 1)
    if passes:
        assert not engine.load(folders[1], 2).rebuilt
    else:
        with pytest.raises(EngineFailed, match="does not give its canary"):
            engine.load(folders[1], 2)


@pytest.mark.parametrize("by", ["a failed swap", "another configuration"])
def test_a_model_that_is_built_anew_is_not_proven(policy: Path, tmp_path: Path, by: str) -> None:
    """The model that reproduced a whole canary is gone, and the next one starts from a folder without a canary."""
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    engine = TorchEngine()
    engine.load(folders[0], 1)
    if by == "a failed swap":
        falsify(folders[1], slice(0, 8))
        with pytest.raises(EngineFailed, match="does not give its canary"):
            engine.load(folders[1], 2)
    else:
        file = folders[1] / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-5}))
    (folders[1] / "canary.json").unlink()
    assert engine.load(folders[1], 3).rebuilt
    folders[2].joinpath("config.json").write_bytes(folders[1].joinpath("config.json").read_bytes())
    falsify(folders[2], slice(8, None))
    with pytest.raises(EngineFailed, match="does not give its canary"):
        engine.load(folders[2], 4)


def test_nothing_of_a_version_is_left_in_the_next(pair: tuple[Make, Path], tmp_path: Path) -> None:
    make, policy = pair
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    engine = make()
    engine.load(folders[0], 1)
    first = said(engine, 1)
    for version in range(2, 6):
        engine.load(folders[(version + 1) % 2], version)
    assert said(engine, 5) == first
    engine.load(policy, 6)
    fresh = make()
    fresh.load(policy, 6)
    assert said(engine, 6) == said(fresh, 6)


def describe(folder: Path, **changes: object) -> None:
    file = folder / adapter.CONFIG
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def matrices(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / adapter.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / adapter.WEIGHTS)


def transpose_first(tensors: dict[str, torch.Tensor]) -> None:
    name = min(tensors)
    tensors[name] = tensors[name].T.contiguous()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another scale": lambda folder: describe(folder, lora_alpha=64.0),
    "a scale nobody computes": lambda folder: describe(folder, use_rslora=True),
    "no description": lambda folder: (folder / adapter.CONFIG).unlink(),
    "no matrices": lambda folder: (folder / adapter.WEIGHTS).unlink(),
    "half a file": lambda folder: (folder / adapter.WEIGHTS).write_bytes(
        (folder / adapter.WEIGHTS).read_bytes()[:-100]
    ),
    "a matrix of no layer": lambda folder: matrices(folder, lambda found: found.update(x=torch.zeros(1))),
    "a matrix too few": lambda folder: matrices(folder, lambda found: found.pop(min(found))),
    "a matrix that does not fit": lambda folder: matrices(folder, transpose_first),
    "not numbers": lambda folder: matrices(folder, lambda found: found[max(found)].fill_(float("nan"))),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_refused_and_the_next_version_works(
    make: Make, policy: Path, tmp_path: Path, damage: str
) -> None:
    adapted = make_adapted(policy, tmp_path / "adapted", seed=1)
    broken = tmp_path / "broken"
    shutil.copytree(adapted, broken)
    DAMAGE[damage](broken)
    engine = make()
    engine.load(policy, 1)
    with pytest.raises(EngineFailed):
        engine.load(broken, 2)
    engine.load(adapted, 3)
    fresh = make()
    fresh.load(adapted, 3)
    assert said(engine, 3) == said(fresh, 3)


def test_weights_are_made_one_at_a_time(policy: Path, tmp_path: Path) -> None:
    """Looking at shapes makes none; nobody holds one that was made."""
    adapted = make_adapted(policy, tmp_path / "adapted", seed=1)
    with weights.mapped_tensors(adapted) as tensors:
        name = next(name for name in tensors if "q_proj" in name)
        assert tensors.shapes[name] == tensors[name].shape
        assert tensors[name].data_ptr() != tensors._base[name].data_ptr()
        assert all(value.data_ptr() == tensors._base[key].data_ptr() for key, value in tensors.items() if "norm" in key)


def beside(base: Path, adapted: Path, target: Path) -> Path:
    """Return the adapted version with the files of `base` under links, as a node keeps a base that versions share."""
    shutil.copytree(adapted, target)
    for file in tensor_files(base):
        (target / file.name).unlink()
        (target / file.name).hardlink_to(file)
    return target


def only(adapted: Path, part: str) -> Path:
    """Leave the adapter's matrices for modules of this name only."""
    matrices(adapted, lambda found: [found.pop(name) for name in list(found) if part not in name])
    (adapted / "canary.json").unlink()
    return adapted


def values_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: place.clone() for name, (place, _) in engine._loaded()._tensors._places.items()}  # type: ignore[attr-defined]  # of torch's decoders


@pytest.mark.parametrize("kind", ["grouped", "wide", "foreign", "llama", "biased"])
def test_a_version_with_the_same_base_costs_only_what_adapters_change(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    policy = request.getfixturevalue(kind)
    first = only(make_adapted(policy, tmp_path / "1", seed=1), "q_proj")
    second = beside(first, only(make_adapted(policy, tmp_path / "2", seed=2), "v_proj"), tmp_path / "beside")
    other = only(make_adapted(policy, tmp_path / "3", seed=2), "v_proj")
    engine, fresh = TorchEngine(), TorchEngine()
    engine.load(first, 1)
    norm = next(name for name in values_of(engine) if "norm" in name)
    with torch.inference_mode():
        engine._loaded()._tensors._places[norm][0].fill_(7.0)  # type: ignore[attr-defined]  # of torch's decoders
    assert not engine.load(second, 2).rebuilt
    fresh.load(second, 2)
    changed, expected = values_of(engine), values_of(fresh)
    assert bool((changed.pop(norm) == 7.0).all()), "the base was copied again"
    assert all(torch.equal(value, expected[name]) for name, value in changed.items()), "one adapter remains in part"
    engine.load(other, 3)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(engine).items()), "another file"


def test_a_base_that_takes_the_place_of_another_is_read(tmp_path: Path, policy: Path) -> None:
    """A file under the same name and of the same size, with another base."""
    folder = only(make_adapted(policy, tmp_path / "adapted", seed=1), "q_proj")
    engine, fresh = TorchEngine(), TorchEngine()
    engine.load(folder, 1)
    (file,) = tensor_files(folder)
    near = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(near, file, metadata={"format": "pt"})
    engine.load(folder, 2)
    fresh.load(folder, 2)
    assert said(engine, 2) == said(fresh, 2)


def test_a_base_that_is_written_into_the_same_file_is_read(tmp_path: Path, policy: Path) -> None:
    """The file keeps its number, as one that gets the number of a removed file."""
    folder = only(make_adapted(policy, tmp_path / "adapted", seed=1), "q_proj")
    engine, fresh = TorchEngine(), TorchEngine()
    engine.load(folder, 1)
    (file,) = tensor_files(folder)
    number = file.stat().st_ino
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, tmp_path / "near", {"format": "pt"})
    with file.open("r+b") as base:
        base.write((tmp_path / "near").read_bytes())
    assert file.stat().st_ino == number
    engine.load(folder, 2)
    fresh.load(folder, 2)
    assert said(engine, 2) == said(fresh, 2)


def test_a_swap_that_fails_half_way_leaves_no_tensor_of_it_in_the_next_version(tmp_path: Path, policy: Path) -> None:
    first = only(make_adapted(policy, tmp_path / "1", seed=1), "q_proj")
    second = beside(first, only(make_adapted(policy, tmp_path / "2", seed=2), "k_proj"), tmp_path / "2 beside")
    third = beside(first, only(make_adapted(policy, tmp_path / "3", seed=3), "v_proj"), tmp_path / "3 beside")
    with weights.mapped_tensors(first) as tensors:
        places = {name: (tensor.clone(), tensor.shape) for name, tensor in tensors.items()}
    model = weights.ModelTensors(places, frozenset())
    assert model.fill(first) == []
    name = [name for name in places if "k_proj.weight" in name][-1]
    place, shape = places[name]
    places[name] = torch.empty(3), shape  # a copy that fails
    with pytest.raises(RuntimeError):
        model.swap(second, used=lambda: {})
    places[name] = place, shape
    assert model.swap(third, used=lambda: places)
    with weights.mapped_tensors(third) as tensors:
        assert all(torch.equal(places[name][0], tensor) for name, tensor in tensors.items())
