"""Weights that a trainer publishes as files: quietly, since a training does that thousands of times."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from echo_swarm.weights import files_to_send
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
