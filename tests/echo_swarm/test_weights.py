"""Weights that a trainer publishes as files: quietly, since a training does that thousands of times.

Weights in the round's own form, and patches between versions of it: bit for bit what the coordinator would make.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from echo_swarm.weights import (
    LastSent,
    PublishedFile,
    digest_of,
    files_to_send,
    in_published_form,
    read_published,
    write_patch,
)
from protocol.errors import MalformedMessage
from protocol.policy import delta
from swarm_exact.merging import dithered
from tests.tiny_policy import make_tiny_policy


def test_a_model_is_written_without_a_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tiny_policy(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    capfd.readouterr()
    with files_to_send(model) as files:
        assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled(), "the trainer's own bars are drawn as before"


TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def described(*paths: Path) -> dict[str, PublishedFile]:
    """Files as `GET /v1/trainer/files` describes those of the newest version."""
    entries = []
    for path in paths:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entry = {"name": path.name, "digest": blake3(data).hexdigest(), "size_bytes": len(data)}
        entries.append(entry | {"header": data[8:end].decode()})
    return read_published({"files": json.loads(json.dumps(entries))})


def files_in(folder: Path) -> dict[Path, str]:
    return {path: digest_of(path) for path in sorted(folder.iterdir())}


def made_of(files: Mapping[Path, str], published: Mapping[str, PublishedFile], tmp_path: Path) -> dict[Path, str]:
    folder = tmp_path / "form"
    folder.mkdir()
    return in_published_form(files, published, folder)


def saved(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder / name


@pytest.mark.parametrize(("of", "to"), [pair for pair in product(TYPES, TYPES) if pair != ("F64", "F64")])
def test_numbers_are_cast_as_the_coordinator_casts_them(tmp_path: Path, of: str, to: str) -> None:
    """The way is by float32, as a learner's process loads and writes them; every kind of float is among the bits."""
    bits = np.random.default_rng(0).integers(0, 2**64, 4096, np.uint64)
    own = torch.from_numpy(bits.view(np.int64)).view(TYPES[of])
    own = own[~own.isnan()]
    special = torch.tensor([0.0, -0.0, 1.0, 65504.0, 65520.0, 3.39e38, 1e-45, 6e-8, float("inf")], dtype=torch.float64)
    own = torch.cat([own, special.to(TYPES[of])])
    low = to == "BF16" and of != "BF16"
    expected = dithered("a", own.float()) if low else own.float().to(TYPES[to])
    published = described(saved(tmp_path / "round", {"a": torch.zeros_like(expected)}))
    saved(tmp_path / "own", {"a": own})
    (path,) = made_of(files_in(tmp_path / "own"), published, tmp_path)
    found = load_file(path)["a"]
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(torch.uint8), expected[kept].view(torch.uint8))
    assert torch.equal(found.isnan(), expected.isnan())


def test_numbers_that_are_none_stay_none(tmp_path: Path) -> None:
    """The coordinator refuses them by name; a cast must not make them pass."""
    own = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    published = described(saved(tmp_path / "round", {"a": torch.zeros(3, dtype=torch.bfloat16)}))
    saved(tmp_path / "own", {"a": own})
    (path,) = made_of(files_in(tmp_path / "own"), published, tmp_path)
    assert load_file(path)["a"].isnan().all()


def test_shards_become_the_rounds_files_and_other_files_stay(tmp_path: Path) -> None:
    tensors = {name: torch.randn(8, 4) for name in "abc"}
    low = {name: dithered(name, tensor) for name, tensor in tensors.items()}
    whole = saved(tmp_path / "round", low)
    saved(tmp_path / "own", {"c": tensors["c"]}, "model-00001-of-00002.safetensors")
    saved(tmp_path / "own", {"a": tensors["a"], "b": tensors["b"]}, "model-00002-of-00002.safetensors")
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "own" / name).write_text("{}")
    made = made_of(files_in(tmp_path / "own"), described(whole), tmp_path)
    assert sorted(path.name for path in made) == ["config.json", "model.safetensors"]
    path = next(path for path in made if path.suffix == ".safetensors")
    assert path.read_bytes() == whole.read_bytes()
    assert made[path] == digest_of(whole)


def test_one_file_becomes_the_rounds_shards_with_an_index(tmp_path: Path) -> None:
    tensors = {name: torch.randn(8, 4) for name in "ab"}
    shards = [saved(tmp_path / "round", {name: tensors[name]}, f"model-{name}.safetensors") for name in "ab"]
    saved(tmp_path / "own", tensors)
    made = made_of(files_in(tmp_path / "own"), described(*shards), tmp_path)
    by_name = {path.name: path for path in made}
    assert [by_name[shard.name].read_bytes() for shard in shards] == [shard.read_bytes() for shard in shards]
    index = json.loads(by_name["model.safetensors.index.json"].read_text())
    assert index["weight_map"] == {"a": "model-a.safetensors", "b": "model-b.safetensors"}


@pytest.mark.parametrize(
    "own",
    [
        {"a": torch.zeros(8)},
        {"a": torch.zeros(8), "b": torch.zeros(2, 4)},
        {"a": torch.zeros(8), "b": torch.zeros(8), "c": torch.zeros(1)},
        {"a": torch.zeros(8), "b": torch.zeros(8, dtype=torch.int8)},
    ],
    ids=["one missing", "another shape", "one more", "no float"],
)
def test_weights_of_another_policy_are_sent_as_they_are(tmp_path: Path, own: dict[str, torch.Tensor]) -> None:
    published = described(saved(tmp_path / "round", {"a": torch.zeros(8), "b": torch.zeros(8)}))
    saved(tmp_path / "own", own)
    files = files_in(tmp_path / "own")
    assert made_of(files, published, tmp_path) == files


@pytest.mark.parametrize("data", [b"", b"not a file of tensors", b"\xff" * 16])
def test_a_broken_file_is_sent_as_it_is(tmp_path: Path, data: bytes) -> None:
    published = described(saved(tmp_path / "round", {"a": torch.zeros(8)}))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.safetensors").write_bytes(data)
    files = files_in(tmp_path / "own")
    assert made_of(files, published, tmp_path) == files


def test_a_patch_leads_to_the_file_and_one_that_saves_nothing_is_not_made(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()}
    base = saved(tmp_path / "one", tensors)
    tensors["a"][7] += 0.5
    new = saved(tmp_path / "two", tensors)
    target = tmp_path / "patch"
    assert write_patch(base, digest_of(base), new, target)
    patched = b"".join(delta.apply(base.read_bytes(), target.read_bytes(), base_digest=digest_of(base)))
    assert patched == new.read_bytes()
    assert target.stat().st_size < 300
    other = saved(tmp_path / "three", {"a": torch.randint(0, 2**15, (4096,), dtype=torch.int16).view(torch.bfloat16)})
    assert not write_patch(base, digest_of(base), other, target)
    (tmp_path / "text").write_bytes(b"no tensors")
    assert not write_patch(base, digest_of(base), tmp_path / "text", target)


@pytest.mark.parametrize(
    "change",
    [
        *({"name": "../model.safetensors"}, {"name": "/a/model.safetensors"}, {"name": ""}, {"name": "a\x00"}),
        *({"digest": "0" * 63}, {"header": "\ud800"}, {"header": None}, {"size_bytes": -1}),
    ],
)
def test_a_coordinator_names_no_file_outside_the_folder(change: dict[str, object]) -> None:
    """The files of the newest version are written under the coordinator's names, with headers of its choice."""
    entry: dict[str, object] = {"name": "model.safetensors", "digest": "0" * 64, "header": "{}", "size_bytes": 10}
    assert read_published({"files": [entry]})
    with pytest.raises(MalformedMessage):
        read_published({"files": [entry | change]})


def test_a_coordinator_that_lists_a_tensor_in_many_files_does_not_fill_the_disk(tmp_path: Path) -> None:
    path = saved(tmp_path / "own", {"a": torch.zeros(1000)})
    [file] = described(path).values()
    many = {f"{number}.safetensors": replace(file, name=f"{number}.safetensors") for number in range(9)}
    assert made_of(files_in(tmp_path / "own"), many, tmp_path) == files_in(tmp_path / "own")


def test_only_the_files_that_were_sent_last_are_kept(tmp_path: Path) -> None:
    last, kept = LastSent(), list[Path]()
    for number in range(2):
        folder = last.make_folder()
        kept.append(saved(folder, {"a": torch.full((8,), float(number))}))
        last.replace(folder, files_in(folder) | {tmp_path / "config.json": "0" * 64})
    assert last.file(digest_of(kept[1])) == kept[1]
    assert not kept[0].exists()
    assert last.file("0" * 64) is None, "a file of the trainer's own may change"
    last.close()
    assert not kept[1].exists()
