"""Starting policies: folders of any family, in any number of files, and the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from coordinator.config import ModelSection, parse
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.start import configuration_file, place, require_here, require_text, text_reader, warnings
from coordinator.model.loading import load_model
from coordinator.service.round import Round
from protocol.errors import ConfigInvalid
from protocol.policy import canary
from tests.architectures import zoo
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
    policy = TrainedPolicy(tmp_path / "start", TrainSettings(learning_rate=1e-3))
    policy.train_step(UNEQUAL)
    policy.writer.save_hub(tmp_path / "version")
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
        TrainedPolicy(folder, TrainSettings(learning_rate=1e-3))


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
        ("nowhere", "does not exist"),
    ],
)
def test_a_policy_that_is_not_there_is_named(hub_cache: Path, tmp_path: Path, path: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        place(ModelSection(path=path), tmp_path / "start", seed=0)


def test_a_name_on_the_hub_without_its_prefix_is_answered_with_the_prefix_also_where_memory_is_planned() -> None:
    with pytest.raises(ConfigInvalid, match="does not exist") as refused:
        configuration_file(ModelSection(path="Qwen/Qwen3-4B"))
    assert refused.value.hint.startswith("For a model on the hub, write hf://Qwen/Qwen3-4B.")


@pytest.mark.parametrize(
    ("missing", "said"), [("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no weights")]
)
def test_a_folder_that_lacks_something_is_refused(policy_folder: Path, tmp_path: Path, missing: str, said: str) -> None:
    shutil.copytree(policy_folder, tmp_path / "source")
    (tmp_path / "source" / missing).unlink()
    with pytest.raises(ConfigInvalid, match=said):
        place(ModelSection(path=str(tmp_path / "source")), tmp_path / "start", seed=0)


DAMAGES = {
    "empty": b"",
    "half of the file": None,
    "another JSON": b'{"version": "1.0"}',
    "no object": b"[1]",
    "no text": b"\xff\xfe{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tokenizer_is_refused_with_a_next_step(policy_folder: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "source")
    whole = (folder / "tokenizer.json").read_bytes()
    require_here(ModelSection(path=str(folder)))
    content = DAMAGES[damage]
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ConfigInvalid, match=r"tokenizer\.json of model\.path .* is damaged") as refused:
        require_here(ModelSection(path=str(folder)))
    assert refused.value.hint == "Download the model again, into that folder."
    config = parse({"round": {"directory": str(tmp_path / "round")}, "model": {"path": str(folder)}})
    with pytest.raises(ConfigInvalid, match=r"tokenizer\.json of model\.path .* is damaged"):
        Round(config)
    assert not (tmp_path / "round").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_damaged_settings_of_a_policy_are_refused_by_name(policy_folder: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "source")
    (folder / name).write_text('{"model_type": "lla')
    with pytest.raises(ConfigInvalid, match=rf"^{name} of model\.path .* is damaged"):
        require_here(ModelSection(path=str(folder)))


def test_a_damaged_download_of_the_hub_is_refused_and_its_cache_is_named(hub_cache: Path, tmp_path: Path) -> None:
    (snapshot,) = (hub_cache / "snapshots").iterdir()
    (snapshot / "tokenizer.json").write_text("{")
    config = parse({"round": {"directory": str(tmp_path / "round")}, "model": {"path": "hf://someone/tiny"}})
    with pytest.raises(ConfigInvalid, match=r"tokenizer\.json of model\.path hf://someone/tiny") as refused:
        require_text(config.model, text_reader(config))
    assert refused.value.hint == "Download the model again, after deleting the model from the hub's cache."


def test_an_architecture_that_nobody_can_sample_is_refused_before_a_key_is_made(tmp_path: Path) -> None:
    source = zoo.make("Mamba 2", tmp_path / "source")
    config = parse({"round": {"directory": str(tmp_path / "round")}, "model": {"path": str(source)}})
    with pytest.raises(ConfigInvalid, match="mamba2 is not supported"):
        Round(config)
    assert not (tmp_path / "round").exists()


def test_an_architecture_on_the_hub_is_judged_by_its_configuration_alone(hub_cache: Path, tmp_path: Path) -> None:
    (snapshot,) = (hub_cache / "snapshots").iterdir()
    (snapshot / "config.json").write_text('{"model_type": "mamba2"}')
    (snapshot / "model.safetensors").unlink()
    config = parse({"round": {"directory": str(tmp_path / "round")}, "model": {"path": "hf://someone/tiny"}})
    with pytest.raises(ConfigInvalid, match="mamba2 is not supported"):
        Round(config)
    assert not (tmp_path / "round").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized .mxfp4."),
        ({"is_encoder_decoder": True}, "has an encoder"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_by_name(
    policy_folder: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "source")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigInvalid, match=said):
        require_here(ModelSection(path=str(folder)))
    with pytest.raises(ConfigInvalid, match=said):
        TrainedPolicy(folder, TrainSettings(learning_rate=1e-3))


def test_a_policy_in_float16_is_trained_and_its_range_is_said_at_launch(policy_folder: Path, tmp_path: Path) -> None:
    source = zoo.make("Llama 3", tmp_path / "source", dtype=torch.float16)
    assert not warnings(ModelSection(path=str(policy_folder)))
    (line,) = warnings(ModelSection(path=str(source)))
    assert "65,504" in line
    policy = TrainedPolicy(source, TrainSettings(learning_rate=1e-3))
    policy.train_step(UNEQUAL)
    policy.writer.save_hub(tmp_path / "version")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "version").dtype == torch.float16
    with torch.no_grad():
        policy.model.model.norm.weight[0] = 70_000
    with pytest.raises(ConfigInvalid, match=r"model.norm.weight has grown beyond 65,504"):
        policy.writer.save_hub(tmp_path / "too large")


def test_a_policy_that_overflows_float16_alone_is_published_without_values_for_it(
    policy_folder: Path, tmp_path: Path
) -> None:
    policy = TrainedPolicy(policy_folder, TrainSettings(learning_rate=1e-3))
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1e6)
    policy.writer.save_hub(tmp_path / "version")
    scored = canary.Canary.from_value(json.loads((tmp_path / "version" / canary.FILE_NAME).read_bytes()))
    assert scored.float16 == ()
    assert len(scored.bfloat16) == len(scored.logprobs) == len(scored.tokens) - 1


def test_weights_without_finite_log_probabilities_are_refused_by_name(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, TrainSettings(learning_rate=1e-3))
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(3e38)
    with pytest.raises(ConfigInvalid, match="give NaN or infinite log-probabilities"):
        policy.writer.save_hub(tmp_path / "version")
