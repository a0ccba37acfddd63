"""A round's policy as a GGUF file: llama.cpp loads it by itself, and says what the model says."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cpp import Llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from tests.coordinator.learner.groups import UNEQUAL

NATS_MEAN = {"float32": 1e-4, "auto": 5e-2}
"""Bounds as `tests.real.test_llama` asks of the engine; auto is bf16. q8_0 is not asked: that bound, 0.08, is for
tokens that the model drew, and on this text it was 0.081 off.
"""

TEXT = "The capital of France is Paris. It's 1234 km away, isn't it?\n\nDef f(x): return 3.14"


@pytest.fixture(scope="module")
def round_file(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round whose learner has made an update that every weight shows."""
    home = tmp_path_factory.mktemp("export")
    shutil.copytree(smollm2_folder, home / "round" / "learner" / "start")
    policy = TrainedPolicy(home / "round" / "learner" / "start", TrainSettings(learning_rate=1e-5))
    policy.train_step(UNEQUAL)
    policy.save(home / "round" / "learner" / "checkpoints")
    (home / "round.toml").write_text(f'[round]\ndirectory = "{home}/round"\n')
    return home / "round.toml"


def export(*words: str) -> str:
    result = CliRunner().invoke(app, ["export", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(round_file: Path) -> Path:
    made = round_file.parent / "folder"
    export(str(round_file), str(made))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_llama_cpp_says_what_transformers_says(round_file: Path, folder: Path, dtype: str) -> None:
    file = round_file.parent / f"{dtype}.gguf"
    export(str(round_file), str(file), "--format", "gguf", "--dtype", dtype)
    assert [path.name for path in round_file.parent.glob(".*")] == [], "nothing is left beside it"
    llama = Llama(str(file), n_ctx=256, logits_all=True, type_k=0, type_v=0, verbose=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode(TEXT)
    assert llama.tokenize(TEXT.encode(), add_bos=False) == tokens
    assert llama.token_eos() == tokenizer.eos_token_id
    assert llama.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    llama.eval(tokens)
    said = torch.tensor(np.array(llama.scores[: len(tokens)])).log_softmax(-1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    after = torch.tensor(tokens[1:])[:, None]
    assert (said[:-1].gather(1, after) - wanted[:-1].gather(1, after)).abs().mean() < NATS_MEAN[dtype]
