"""The program that writes a policy as a GGUF file: what it writes, what it refuses, and that nothing half is left."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from swarm_node.engine.llama.gguf_file import REFUSED
from swarm_node.engine.llama.model import quieten
from tests.swarm_node.engine.test_llama_vocabulary import RULES, make_tokenizer

TOKENS = [5, 17, 300, 42, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small policy of random weights, with a tokenizer of byte pairs."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=720,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers annotates half
    made.to(torch.float16).save_pretrained(tmp_path / "policy")
    return make_tokenizer(tmp_path / "policy", RULES["gpt-2"])


def run(folder: Path, file: Path, dtype: str = "auto", *, most_bytes: int = -1) -> tuple[int, dict[str, str]]:
    """Exit code and what it says; none of its files may be larger than so many bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = [sys.executable, "-P", "-m", "swarm_node.engine.llama.gguf_file", str(folder), str(file), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout or "{}")


def logits(file: Path) -> Any:
    quieten()
    llama = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    llama.eval(TOKENS)
    return torch.tensor(np.array(llama.scores[: len(TOKENS)]))


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-3), ("auto", 5e-3)])
def test_the_file_says_what_the_folder_says(folder: Path, tmp_path: Path, dtype: str, nats: float) -> None:
    assert run(folder, tmp_path / "out.gguf", dtype) == (0, {})
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (logits(tmp_path / "out.gguf").log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < nats


def test_an_architecture_that_is_not_converted_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert "mamba2" in said["message"]


def test_a_type_that_llama_cpp_lacks_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    code, said = run(folder, tmp_path / "out.gguf", "float64")
    assert (code, said["message"]) == (REFUSED, "A GGUF file has no weights in float64.")


def test_a_disk_that_is_full_leaves_no_part_of_a_file(folder: Path, tmp_path: Path) -> None:
    code, said = run(folder, tmp_path / "out.gguf", most_bytes=100_000)
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert said["message"].startswith("The GGUF file was not written:")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert name in said["message"]


def test_weights_that_were_cut_off_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _ = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])


def test_a_tensor_that_llama_cpp_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.extra.weight": torch.zeros(2, 2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, "extra" in said["message"]) == (REFUSED, True)
