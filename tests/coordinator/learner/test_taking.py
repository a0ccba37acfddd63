"""A learner that goes on from another version: the weights are that version's, and nothing of the old way is left."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils.logging import enable_progress_bar

from coordinator.learner import offering
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.errors import ConfigInvalid
from protocol.policy import adapter, canary
from tests.adapted_policy import SETTINGS as ADAPTERS
from tests.adapted_policy import make_adapted
from tests.coordinator.learner.groups import UNEQUAL
from tests.tiny_policy import make_tiny_policy

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1)
WEIGHTS = "model.safetensors"


def published(policy: TrainedPolicy, folder: Path) -> Path:
    policy.writer.save_hub(folder)
    return folder


def test_after_taking_a_version_the_policy_is_that_version_at_the_update_that_was_reached(
    policy_folder: Path, tmp_path: Path
) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    wanted = published(policy, tmp_path / "wanted")
    policy.train_step(UNEQUAL)
    policy.continue_from(wanted)
    assert policy.update == 2
    taken = published(policy, tmp_path / "taken")
    assert (taken / WEIGHTS).read_bytes() == (wanted / WEIGHTS).read_bytes()
    assert (taken / canary.FILE_NAME).read_bytes() == (wanted / canary.FILE_NAME).read_bytes()


def test_even_a_policy_that_is_no_number_any_more_learns_again_as_a_new_one_would(
    policy_folder: Path, tmp_path: Path
) -> None:
    wanted = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "wanted")
    broken, fresh = TrainedPolicy(policy_folder, SETTINGS), TrainedPolicy(policy_folder, SETTINGS)
    broken.train_step(UNEQUAL)
    with torch.no_grad():
        for weight in broken.model.parameters():
            weight.fill_(torch.nan)
    for state in broken._optimizer.state.values():
        state["exp_avg"].fill_(torch.nan)
    broken.continue_from(wanted)
    broken.train_step(UNEQUAL)
    fresh.update = 1
    fresh.train_step(UNEQUAL)
    for here, there in zip(broken.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(here, there)


def rate(policy: TrainedPolicy) -> float:
    """Return the rate of the next update."""
    return policy.train_step(UNEQUAL).metrics["learner/learning_rate"]


def test_after_taking_a_version_the_rate_rises_anew_and_falls_as_it_would_have(
    policy_folder: Path, tmp_path: Path
) -> None:
    """Another process continues in the middle of the second rise."""
    settings = replace(SETTINGS, warmup_updates=4, schedule="linear", max_updates=10)
    policy = TrainedPolicy(policy_folder, settings)
    wanted = published(policy, tmp_path / "wanted")
    found = [rate(policy) for _ in range(5)]
    policy.continue_from(wanted)
    found += [rate(policy) for _ in range(2)]
    policy.save(tmp_path / "checkpoints")
    again = TrainedPolicy(policy_folder, settings)
    again.restore(tmp_path / "checkpoints" / "000000007")
    found += [rate(again) for _ in range(3)]
    rises = [0.25, 0.5, 0.75, 1.0, 1.0] * 2
    assert found == pytest.approx([1e-2 * rise * (1 - update / 10) for update, rise in enumerate(rises)])


def test_what_was_taken_survives_a_checkpoint(policy_folder: Path, tmp_path: Path) -> None:
    wanted = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "wanted")
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    policy.continue_from(wanted)
    policy.save(tmp_path / "checkpoints", taken=7)
    again = TrainedPolicy(policy_folder, SETTINGS)
    assert again.restore(tmp_path / "checkpoints" / "000000001")["taken"] == 7
    policy.train_step(UNEQUAL)
    again.train_step(UNEQUAL)
    for here, there in zip(policy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("alpha", [8.0, 16.0])
def test_an_adapter_is_taken_beside_the_same_base(policy_folder: Path, tmp_path: Path, alpha: float) -> None:
    wanted = make_adapted(policy_folder, tmp_path / "wanted", seed=3)
    policy = TrainedPolicy(policy_folder, replace(ADAPTERS, lora_alpha=alpha))
    policy.train_step(UNEQUAL)
    policy.continue_from(wanted)
    policy.writer.save_base(tmp_path / "taken")
    policy.writer.save_adapter(tmp_path / "taken", "a base")
    ours, theirs = load_file(tmp_path / "taken" / adapter.WEIGHTS), load_file(wanted / adapter.WEIGHTS)
    share = 8.0 / alpha
    assert all(torch.equal(ours[name], theirs[name] * (share if "lora_B" in name else 1)) for name in theirs)
    said, wanted_said = (json.loads((folder / canary.FILE_NAME).read_text()) for folder in (tmp_path / "taken", wanted))
    assert said["logprobs"] == pytest.approx(wanted_said["logprobs"], abs=1e-5)


def test_a_folder_of_others_becomes_a_version_with_its_own_canary(policy_folder: Path, tmp_path: Path) -> None:
    current = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "current")
    other = make_tiny_policy(tmp_path / "other", seed=2)
    (other / "README.md").write_text("a card")
    offering.prepare(other, current, tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {path.name for path in current.iterdir()}
    ours, theirs = load_file(tmp_path / "made" / WEIGHTS), load_file(other / WEIGHTS)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    said = json.loads((tmp_path / "made" / canary.FILE_NAME).read_text())
    assert said == json.loads((other / canary.FILE_NAME).read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"current", "other", "made"}


def test_a_folder_is_prepared_without_a_progress_bar_of_transformers(
    policy_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command prints JSON with --json, and one line otherwise."""
    current = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "current")
    other = make_tiny_policy(tmp_path / "other", seed=2)
    enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates only a part of its functions
    capfd.readouterr()
    offering.prepare(other, current, tmp_path / "made")
    assert capfd.readouterr() == ("", "")


def test_weights_in_several_files_are_one_policy(policy_folder: Path, tmp_path: Path) -> None:
    current = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "current")
    other = make_tiny_policy(tmp_path / "other", seed=2)
    tensors = load_file(other / WEIGHTS)
    (other / WEIGHTS).unlink()
    halves = [dict(list(tensors.items())[place::2]) for place in (0, 1)]
    where: dict[str, str] = {}
    for number, half in enumerate(halves, start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(half, other / name, {"format": "pt"})
        where |= dict.fromkeys(half, name)
    (other / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    offering.prepare(other, current, tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {path.name for path in current.iterdir()}


def test_a_configuration_is_compared_by_what_it_means(policy_folder: Path, tmp_path: Path) -> None:
    """The folder that a round began from has it in fewer words: what is not said is transformers' default."""
    start = tmp_path / "start"
    shutil.copytree(policy_folder, start)
    said = json.loads((start / "config.json").read_text())
    defaults = AutoConfig.for_model(said["model_type"]).to_dict()
    short = {name: value for name, value in said.items() if name == "model_type" or value != defaults.get(name)}
    theta = short.pop("rope_parameters", said["rope_parameters"])["rope_theta"]
    short |= {"rope_theta": theta, "torch_dtype": short.pop("dtype", "float32"), "transformers_version": "4.40.0"}
    (start / "config.json").write_text(json.dumps(short))
    current = published(TrainedPolicy(start, SETTINGS), tmp_path / "current")
    assert json.loads((current / "config.json").read_text()).keys() > short.keys() - {"rope_theta", "torch_dtype"}
    offering.prepare(start, current, tmp_path / "made")
    (start / "config.json").write_text(json.dumps(short | {"rope_theta": 2 * theta}))
    shutil.rmtree(tmp_path / "made")
    refused(start, current, "rope_parameters")


def refused(folder: Path, current: Path, words: str) -> None:
    made = current.with_name("made")
    with pytest.raises(ConfigInvalid, match=words):
        offering.prepare(folder, current, made)
    assert not made.exists()


def test_everything_that_is_not_this_policy_with_other_weights_is_refused_by_name(
    policy_folder: Path, tmp_path: Path
) -> None:
    current = published(TrainedPolicy(policy_folder, SETTINGS), tmp_path / "current")
    tensors = load_file(policy_folder / WEIGHTS)
    name = next(iter(tensors))

    def changed(**files: bytes | None) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(policy_folder, folder)
        for file, data in files.items():
            path = folder / {"config": "config.json", "tokenizer": "tokenizer.json"}.get(file, WEIGHTS)
            path.unlink() if data is None else path.write_bytes(data)
        return folder

    def with_tensors(**others: torch.Tensor | None) -> Path:
        folder = changed()
        save_file({key: value for key, value in (tensors | others).items() if value is not None}, folder / WEIGHTS)
        return folder

    refused(with_tensors(**{name: None}), current, "is missing; in this round's policy it has shape")
    refused(with_tensors(extra=torch.zeros(3)), current, r"extra has shape \[3\]; in this round's policy it is missing")
    refused(
        with_tensors(**{name: tensors[name][:-1].clone()}),
        current,
        r"has shape \[.*; in this round's policy it has shape \[",
    )
    refused(
        with_tensors(**{name: torch.full_like(tensors[name], torch.nan)}), current, "contains NaN or infinite values"
    )
    refused(
        with_tensors(**{name: torch.full_like(tensors[name], -torch.inf)}), current, "contains NaN or infinite values"
    )
    refused(changed(weights=(policy_folder / WEIGHTS).read_bytes()[:-1]), current, "not a complete safetensors file")
    refused(changed(weights=b""), current, "not a complete safetensors file")
    refused(changed(weights=None), current, "no weights as safetensors")
    refused(changed(config=None), current, "it has no config.json")
    refused(changed(config=b"[]"), current, "is not a JSON object")
    config = json.loads((policy_folder / "config.json").read_text())
    refused(changed(config=json.dumps(config | {"rms_norm_eps": 1.0}).encode()), current, "rms_norm_eps = 1.0")
    tokenizer = json.loads((policy_folder / "tokenizer.json").read_text())
    refused(changed(tokenizer=json.dumps(tokenizer | {"version": "9"}).encode()), current, "tokenizer.json of")
    refused(changed(tokenizer=b"{"), current, "damaged or unreadable")
    assert not list(tmp_path.glob("made*"))


def test_an_adapter_for_the_same_base_becomes_a_version_with_its_own_canary(
    policy_folder: Path, tmp_path: Path
) -> None:
    current = make_adapted(policy_folder, tmp_path / "current", seed=1)
    wanted = make_adapted(policy_folder, tmp_path / "wanted", seed=2)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in adapter.FILES:
        shutil.copy(wanted / name, alone / name)
    for folder in (alone, wanted):  # as peft writes it, and as a whole version
        offering.prepare(folder, current, tmp_path / "made")
        made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
        assert made == {path.name: path.read_bytes() for path in wanted.iterdir()}
        shutil.rmtree(tmp_path / "made")


def test_what_is_no_adapter_for_the_base_is_refused_and_told_what_would_be_one(
    policy_folder: Path, tmp_path: Path
) -> None:
    current = make_adapted(policy_folder, tmp_path / "current", seed=1)

    def changed(file: str, data: bytes) -> Path:
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        shutil.copytree(current, tmp_path / "changed")
        (tmp_path / "changed" / file).write_bytes(data)
        return tmp_path / "changed"

    def with_matrices(**others: torch.Tensor) -> Path:
        folder = changed(adapter.WEIGHTS, b"")
        save_file(tensors | others, folder / adapter.WEIGHTS)
        return folder

    tensors = load_file(current / adapter.WEIGHTS)
    name = next(iter(tensors))
    said = json.loads((current / adapter.CONFIG).read_text())
    refused(policy_folder, current, "has no adapter_config.json. Give an adapter for this round's base")
    refused(changed(adapter.CONFIG, json.dumps(said | {"use_dora": True}).encode()), current, "use_dora = True")
    refused(changed(adapter.CONFIG, b"{"), current, "cannot be used")
    refused(changed(adapter.WEIGHTS, b""), current, "not a complete safetensors file")
    refused(with_matrices(**{name: tensors[name][:-1].clone()}), current, "in this round's policy")
    refused(
        with_matrices(**{name: torch.full_like(tensors[name], torch.nan)}), current, "contains NaN or infinite values"
    )
    other = make_adapted(make_tiny_policy(tmp_path / "start", seed=2), tmp_path / "other", seed=1)
    refused(other, current, "differs from this round's base")
    assert {path.name for path in tmp_path.iterdir()} == {"current", "changed", "start", "other"}
