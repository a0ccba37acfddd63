"""Starting policies: folders of any family, in any number of files, and the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from coordinator.config import ModelSection
from coordinator.learner.loading import load_model
from coordinator.learner.policy import Policy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.start import place
from protocol.errors import ConfigInvalid
from tests.coordinator.learner.groups import UNEQUAL
from tests.tiny_policy import make_other_policy


def test_a_sharded_llama_starts_trains_and_is_published(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        eos_token_id=2,
    )
    source = tmp_path / "source"
    make_other_policy(source, config, dtype=torch.bfloat16, part_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    for name in ("modeling_own.py", "tokenizer_own.py"):
        (source / name).write_text("raise SystemExit")
    said = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**said, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}))
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    place(ModelSection(path=str(source)), tmp_path / "start", seed=0)
    assert not list((tmp_path / "start").glob("*.py"))
    assert not list((tmp_path / "start").glob("*.bin"))
    policy = Policy(tmp_path / "start", TrainSettings(learning_rate=1e-3))
    policy.train_step(UNEQUAL)
    policy.save_hub(tmp_path / "version")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "version").dtype == torch.bfloat16
    assert "auto_map" not in (tmp_path / "version" / "config.json").read_text()  # nodes refuse it


def test_weights_are_found_under_the_names_that_an_architecture_gives_them_in_its_files(tmp_path: Path) -> None:
    """GPT-NeoX stores its head as `embed_out`; a head that is not found would be random numbers."""
    config = GPTNeoXConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        tie_word_embeddings=False,
    )
    make_other_policy(tmp_path / "source", config, dtype=torch.float32)
    stored = load_file(tmp_path / "source" / "model.safetensors")
    model = load_model(tmp_path / "source", lambda _: None)
    assert torch.equal(model.get_output_embeddings().weight, stored["embed_out.weight"])


def test_a_policy_that_lacks_a_weight_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigInvalid, match=r"model\.norm\.weight is missing"):
        Policy(folder, TrainSettings(learning_rate=1e-3))


@pytest.fixture
def hub_cache(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that holds one repository at one commit, and no network."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(policy_folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return repository


def test_a_policy_of_the_hub_comes_from_its_cache(hub_cache: Path, policy_folder: Path, tmp_path: Path) -> None:
    place(ModelSection(path="hf://someone/tiny"), tmp_path / "start", seed=0)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "start" / name).read_bytes() == (policy_folder / name).read_bytes()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hf://someone/else", "cannot be downloaded"),
        ("hf://no name at all", "cannot be downloaded"),
        ("nowhere", "has no config.json"),
    ],
)
def test_a_policy_that_is_not_there_is_named(hub_cache: Path, tmp_path: Path, path: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        place(ModelSection(path=path), tmp_path / "start", seed=0)


@pytest.mark.parametrize(
    ("missing", "said"), [("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no weights")]
)
def test_a_folder_that_lacks_something_is_refused(policy_folder: Path, tmp_path: Path, missing: str, said: str) -> None:
    shutil.copytree(policy_folder, tmp_path / "source")
    (tmp_path / "source" / missing).unlink()
    with pytest.raises(ConfigInvalid, match=said):
        place(ModelSection(path=str(tmp_path / "source")), tmp_path / "start", seed=0)
