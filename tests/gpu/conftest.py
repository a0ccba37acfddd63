"""The device, and small policies of each decoder of the torch engine.

- With CUDA the tests compare it with the CPU. Without, they compare the CPU with itself: that shows only that the tests
  are sound, and is part of `make test`.
- What the tests import must stay small: see requirements.txt beside this file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from swarm_exact import cards
from tests.tiny_policy import make_other_policy

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGURATIONS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
}
"""Two that the engine has a decoder of its own for, and one that transformers decodes."""


def pytest_report_header() -> list[str]:
    """Print what every report of a failure needs: the build of torch, and each card with its driver's view of it."""
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}"]
    lines += [f"code for {' '.join(torch.cuda.get_arch_list())}"] if torch.cuda.is_available() else []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        lines.append(
            f"card {number}: {card.name}, compute capability {card.major}.{card.minor}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free, bf16 {torch.cuda.is_bf16_supported(including_emulation=False)}"
        )
    reason = cards.reason_to_refuse(torch.device("cuda"))
    return [*lines, f"no card is tested, the processor is compared with itself: {reason}" if reason else "on the card"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread of the CPU: threads that wait for each other on a busy machine lose much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> str:
    """Return cuda where there is a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", params=CONFIGURATIONS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy of each family, published with its canary."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_other_policy(folder, CONFIGURATIONS[request.param], dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the policy of one family."""
    return make_other_policy(tmp_path_factory.mktemp("qwen3"), CONFIGURATIONS["qwen3"], dtype=torch.bfloat16)
