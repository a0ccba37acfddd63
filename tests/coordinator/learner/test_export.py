"""Policies out of a round: transformers loads them, and they say what the round's policy says."""

import logging
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import load
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.service.round import Round
from protocol.errors import ConfigInvalid, NotFound, SwarmError
from protocol.policy.chunks import digest
from protocol.work.learning import Publication, UploadedFile
from tests.coordinator.learner.groups import UNEQUAL


def export(*words: str) -> str:
    result = CliRunner().invoke(app, ["export", *words])
    if isinstance(result.exception, SwarmError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def round_file(policy_folder: Path, tmp_path: Path) -> Path:
    """A round whose learner has made two updates."""
    folder = tmp_path / "round" / "learner"
    shutil.copytree(policy_folder, folder / "start")
    policy = TrainedPolicy(folder / "start", TrainSettings(learning_rate=1e-2))
    for _ in range(2):
        policy.train_step(UNEQUAL)
    policy.save(folder / "checkpoints")
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
    return file


def test_an_exported_checkpoint_generates(round_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.learner.export")
    said = export(str(round_file), str(tmp_path / "out"))
    assert "after 2 updates" in said
    assert "checkpoint after update 2; this may take minutes" in caplog.text
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    made = model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert made.shape[1] > 4
    folder = round_file.parent / "round" / "learner"
    policy = TrainedPolicy(folder / "start", TrainSettings(learning_rate=1e-2))
    policy.restore(folder / "checkpoints" / "000000002")
    assert all(torch.equal(tensor, policy.model.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_learner_that_deletes_its_checkpoint_does_not_disturb(
    round_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running learner does so with every new checkpoint."""
    restore = TrainedPolicy.restore

    def deleted_before(self: TrainedPolicy, path: Path) -> dict[str, Any]:
        shutil.rmtree(round_file.parent / "round" / "learner" / "checkpoints" / "000000002")
        return restore(self, path)

    # The moment between the choice of a checkpoint and its reading, which no argument reaches.
    monkeypatch.setattr(TrainedPolicy, "restore", deleted_before)
    assert "after 2 updates" in export(str(round_file), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "round", "round.toml"]


def test_an_exported_version_is_what_nodes_had(policy_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
    round_ = Round(load(file, []))
    shutil.copytree(policy_folder, round_.publisher.uploads / "1")
    uploads = [UploadedFile(path=path.name, digest=digest(path.read_bytes())) for path in policy_folder.iterdir()]
    round_.publisher.publish(Publication(version=1, update=0, files=tuple(uploads)))
    round_.close()
    export(str(file), str(tmp_path / "out"), "--version", "1")
    for path in policy_folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(NotFound, match="not published"):
        export(str(file), str(tmp_path / "other"), "--version", "2")


def publish(round_: Round, policy_folder: Path, version: int, *, update: int) -> None:
    """Publish a policy whose generation settings name its version."""
    folder = round_.publisher.uploads / str(version)
    shutil.copytree(policy_folder, folder)
    (folder / "generation_config.json").write_text(f'{{"max_length": {version}}}')
    uploads = [UploadedFile(path=path.name, digest=digest(path.read_bytes())) for path in sorted(folder.iterdir())]
    round_.publisher.publish(Publication(version=version, update=update, files=tuple(uploads)))


@pytest.mark.parametrize("update", [1, 2])
def test_the_newest_policy_is_read_from_its_version_unless_the_checkpoint_is_newer(
    round_file: Path, policy_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, update: int
) -> None:
    """A checkpoint is six times as large as a version, and reading it needs the learner's memory."""
    caplog.set_level(logging.INFO, "coordinator.learner.export")
    round_ = Round(load(round_file, []))
    publish(round_, policy_folder, 1, update=update)
    round_.close()
    assert export(str(round_file), str(tmp_path / "out")).endswith("after 2 updates\n")
    assert ("checkpoint" in caplog.text) == (update == 1)
    assert ('"max_length": 1' in (tmp_path / "out" / "generation_config.json").read_text()) == (update == 2)


def test_a_round_with_another_trainer_exports_what_that_one_published_and_not_its_start(
    round_file: Path, policy_folder: Path, tmp_path: Path
) -> None:
    """The checkpoint of such a round is the policy that it began with, for ever."""
    with round_file.open("a") as more:
        more.write("[learner]\nexternal = true\n")
    round_ = Round(load(round_file, []))
    with pytest.raises(NotFound, match="No version is published yet"):
        export(str(round_file), str(tmp_path / "out"))
    publish(round_, policy_folder, 1, update=7)
    publish(round_, policy_folder, 2, update=14)
    round_.close()
    assert export(str(round_file), str(tmp_path / "out")) == f"{tmp_path / 'out'}: the policy after 14 updates\n"
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"max_length": 2}'


def test_an_export_that_is_ended_leaves_nothing_beside_its_target(
    round_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.export" / "policy").mkdir(parents=True)  # what a kill left
    before = signal.getsignal(signal.SIGTERM)

    def ended_here(self: TrainedPolicy, path: Path) -> dict[str, Any]:
        assert path.is_relative_to(tmp_path / ".out.export")
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the handler has ended the export")

    monkeypatch.setattr(TrainedPolicy, "restore", ended_here)  # the moment of the signal, which no argument reaches
    result = CliRunner().invoke(app, ["export", str(round_file), str(tmp_path / "out")])
    assert result.exit_code == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round", "round.toml"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_is_written_over(round_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigInvalid, match="exists already"):
        export(str(round_file), str(tmp_path / "out"))


def test_a_round_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "round.toml").write_text(f'[round]\ndirectory = "{tmp_path}/round"\n')
    with pytest.raises(SwarmError, match="no checkpoint"):
        export(str(tmp_path / "round.toml"), str(tmp_path / "out"))
    with pytest.raises(SwarmError, match="no round"):
        export(str(tmp_path / "round.toml"), str(tmp_path / "out"), "--version", "3")
    assert not (tmp_path / "out").exists()
