"""Adapters that a learner publishes and exports: a base that never changes, and small files beside it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3Config, Qwen3MoeConfig

from coordinator.config import Config, load
from coordinator.learner import offering
from coordinator.learner.crew import Crew
from coordinator.learner.export import export
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.start import place
from coordinator.model.lora import Adapters
from coordinator.service.round import Round
from protocol.errors import ConfigInvalid, NotFound
from protocol.policy import adapter, canary
from protocol.policy.chunks import digest
from protocol.work.learning import Publication, UploadedFile
from tests.adapted_policy import SETTINGS, make_adapted, make_merged
from tests.coordinator.learner.groups import UNEQUAL

BASE = "model.safetensors"


@pytest.fixture
def config(policy_folder: Path, tmp_path: Path) -> Config:
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n[model]\npath = "{policy_folder}"\n')
    return load(
        file,
        ["learner.lora_rank=4", "learner.algorithm=echo2", "learner.learning_rate=0.01", "learner.warmup_updates=1"],
    )


def versions(config: Config, count: int) -> list[Path]:
    """The folders of so many versions, an update apart, as a learner that restarts each time makes them."""
    found = []
    for number in range(count):
        crew = Crew(config, Ranks())
        crew.train(UNEQUAL)
        crew.save()
        crew.publish(config.round.directory / str(number))
        found.append(config.round.directory / str(number))
    return found


def test_only_the_adapter_and_its_canary_change_from_version_to_version(config: Config) -> None:
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in versions(config, 2))
    assert one.keys() == other.keys() >= {BASE, *adapter.FILES}
    assert {name for name in one if one[name] != other[name]} == {adapter.WEIGHTS, canary.FILE_NAME}
    assert len(one[adapter.WEIGHTS]) < len(one[BASE])


def test_the_base_is_the_starting_policy_in_the_type_it_came_in(policy_folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(policy_folder, start)
    AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16).save_pretrained(start)
    made = make_adapted(start, tmp_path / "adapted", seed=1)
    before, base = load_file(start / BASE), load_file(made / BASE)
    assert before.keys() == base.keys()
    assert all(torch.equal(before[name], base[name]) for name in base)
    assert {part.dtype for part in load_file(made / adapter.WEIGHTS).values()} == {torch.bfloat16}


def test_the_canary_is_what_base_and_adapter_say_together(policy_folder: Path, tmp_path: Path) -> None:
    adapted = make_adapted(policy_folder, tmp_path / "adapted", seed=1)
    model = AutoModelForCausalLM.from_pretrained(make_merged(adapted, tmp_path / "merged"))
    said = json.loads((adapted / canary.FILE_NAME).read_text())
    words = torch.tensor([said["tokens"]])
    scores = model(words).logits[0, :-1].log_softmax(-1).gather(1, words[0, 1:, None])[:, 0]
    assert torch.allclose(scores, torch.tensor(said["logprobs"]), atol=1e-5)


def test_training_goes_on_as_if_nothing_had_been_published(policy_folder: Path, tmp_path: Path) -> None:
    quiet, publishing = TrainedPolicy(policy_folder, SETTINGS), TrainedPolicy(policy_folder, SETTINGS)
    for number in range(2):
        publishing.writer.save_adapter(tmp_path / str(number))
        assert quiet.train_step(UNEQUAL) == publishing.train_step(UNEQUAL)


def test_merged_weights_are_published_where_that_is_wanted(config: Config) -> None:
    plain = config.model_copy(update={"learner": config.learner.model_copy(update={"publish_adapters": False})})
    (folder,) = versions(plain, 1)
    assert not adapter.FILES & {path.name for path in folder.iterdir()}
    assert (folder / BASE).read_bytes() != (config.round.directory / "learner" / "start" / BASE).read_bytes()


def test_a_kill_while_the_base_is_written_leaves_none(config: Config) -> None:
    half = config.round.directory / "learner" / "base.new"
    half.mkdir(parents=True)
    (half / BASE).write_bytes(b"half")
    (half / "left over").touch()
    (folder,) = versions(config, 1)
    assert load_file(folder / BASE)
    assert not (folder / "left over").exists()


def test_a_checkpoint_is_exported_merged_or_as_its_adapter(config: Config, tmp_path: Path) -> None:
    (version,) = versions(config, 1)
    export(config, tmp_path / "merged")
    export(config, tmp_path / "adapter", adapter=True)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == adapter.FILES
    for name in adapter.FILES:
        assert (tmp_path / "adapter" / name).read_bytes() == (version / name).read_bytes()
    described = json.loads((tmp_path / "adapter" / adapter.CONFIG).read_text())
    assert described["base_model_name_or_path"] == Path(config.model.path).name, "versions are public"
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    nodes: Any = AutoModelForCausalLM.from_pretrained(make_merged(version, tmp_path / "nodes"))
    text = torch.tensor([[19, 20, 31, 21, 22, 2]])
    assert torch.allclose(merged(text).logits, nodes(text).logits, atol=1e-5)


def test_a_version_is_exported_merged_or_as_its_adapter(config: Config, tmp_path: Path) -> None:
    (version,) = versions(config, 1)
    round_ = Round(config)
    round_.publisher.uploads.mkdir(exist_ok=True)
    shutil.copytree(version, round_.publisher.uploads / "1")
    uploads = [UploadedFile(path=path.name, digest=digest(path.read_bytes())) for path in version.iterdir()]
    round_.publisher.publish(Publication(version=1, update=1, files=tuple(uploads)))
    round_.close()
    export(config, tmp_path / "merged", version=1)
    export(config, tmp_path / "adapter", version=1, adapter=True)
    expected = load_file(make_merged(version, tmp_path / "nodes") / BASE)
    found = load_file(tmp_path / "merged" / BASE)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not adapter.FILES & {path.name for path in (tmp_path / "merged").iterdir()}
    assert (tmp_path / "adapter" / adapter.WEIGHTS).read_bytes() == (version / adapter.WEIGHTS).read_bytes()


def test_an_adapter_of_a_round_without_one_is_not_found(config: Config, tmp_path: Path) -> None:
    plain = config.model_copy(update={"learner": config.learner.model_copy(update={"lora_rank": 0})})
    versions(plain, 1)
    with pytest.raises(NotFound, match="trains no adapter"):
        export(plain, tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


def test_a_round_does_not_start_on_an_adapter(config: Config, policy_folder: Path, tmp_path: Path) -> None:
    adapted = make_adapted(policy_folder, tmp_path / "adapted", seed=1)
    model = config.model.model_copy(update={"path": str(adapted)})
    with pytest.raises(ConfigInvalid, match="has an adapter"):
        place(model, tmp_path / "start", seed=0)


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}


def random_model(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers annotates half


@pytest.mark.parametrize("kind", [Qwen3Config, Phi3Config])
def test_all_matrices_of_common_families_are_adapted(kind: Any) -> None:
    assert Adapters(random_model(kind(**SHAPE)), 4, 8.0, coverage_min=1.0).coverage == 1.0


def test_a_mixture_whose_experts_cannot_be_adapted_is_refused_with_its_share() -> None:
    kind: Any = Qwen3MoeConfig  # whose head_dim transformers declares elsewhere
    config = kind(**SHAPE, head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    share = Adapters(random_model(config), 4, 8.0).coverage
    assert 0.1 < share < 0.35
    with pytest.raises(ConfigInvalid, match=rf"cover {share:.0%} of the qwen3_moe model's matrices.*requires 50%"):
        Adapters(random_model(config), 4, 8.0, coverage_min=0.5)


def test_layers_that_could_be_adapted_are_named() -> None:
    with pytest.raises(ConfigInvalid, match=r"Add some of down_proj, gate_proj, k_proj, o_proj, up_proj to"):
        Adapters(random_model(Qwen3Config(**SHAPE)), 4, 8.0, ("q_proj", "v_proj"), coverage_min=0.5)
    with pytest.raises(ConfigInvalid, match="no linear layer called nothing"):
        Adapters(random_model(Qwen3Config(**SHAPE)), 4, 8.0, ("nothing",))


def test_the_operators_targets_are_trained_published_and_taken(config: Config) -> None:
    learner = config.learner.model_copy(update={"lora_targets": ("q_proj", "v_proj"), "lora_coverage_min": 0.1})
    (folder,) = versions(config.model_copy(update={"learner": learner}), 1)
    names = {name.split(".")[-3] for name in load_file(folder / adapter.WEIGHTS)}
    assert names == {"q_proj", "v_proj"}
    assert set(json.loads((folder / adapter.CONFIG).read_text())["target_modules"]) == names
    offering.prepare(folder, folder, made := folder.with_name("made"))
    assert {path.name: path.read_bytes() for path in made.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_round_says_what_adapters_cover_and_refuses_too_little(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Crew(config, Ranks())
    assert "adapters cover 100.0 %" in caplog.text
    learner = config.learner.model_copy(update={"lora_targets": ("q_proj",)})
    with pytest.raises(ConfigInvalid, match=r"learner.lora_coverage_min"):
        Crew(config.model_copy(update={"learner": learner}), Ranks())
