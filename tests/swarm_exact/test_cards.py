"""Settings for graphics cards, as far as a machine without one can show them."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm_exact.cards import lack_of_code, reason_to_refuse, repeat_heads

PROGRAM = """
import os
import torch
from swarm_exact import cards

def show():
    print(
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_deterministic_debug_mode(),
    )

for device, strictly in (("cpu", True), ("cuda", False), ("cuda:1", True)):
    cards.compute_in_full(torch.device(device))
    print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    with cards.computing_repeatably(torch.device(device), strictly=strictly):
        show()
show()
torch.use_deterministic_algorithms(True, warn_only=True)
with cards.computing_repeatably(torch.device("cuda")):
    show()
show()
print(torch.utils.deterministic.fill_uninitialized_memory)
"""


@pytest.mark.processes
def test_a_card_computes_in_full_precision_and_repeatably_whatever_its_container_allows() -> None:
    """Containers of NVIDIA allow TF32 by this variable. Nothing is set for a processor; an update restores what was."""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "None",
        "high True True 0",
        ":4096:8",
        "highest False False 1",
        ":4096:8",
        "highest False False 2",
        "highest False False 0",
        "highest False False 2",
        "highest False False 1",
        "True",
    ]


CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("name", "capability", "older"),
    [("NVIDIA GeForce GTX 1080", (6, 1), True), ("Tesla V100-SXM2-32GB", (7, 0), True), ("Thor", (11, 0), False)],
)
def test_a_card_without_code_in_this_build_is_refused(name: str, capability: tuple[int, int], older: bool) -> None:
    reason = lack_of_code(name, capability, CUDA_13)
    assert name in reason
    assert ("CUDA 12.6" in reason) is older


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)])
def test_a_card_runs_code_of_its_generation_and_code_that_is_compiled_for_it(capability: tuple[int, int]) -> None:
    assert lack_of_code("a card", capability, CUDA_13) == ""


def test_code_for_one_card_only_is_not_counted() -> None:
    assert lack_of_code("a card", (9, 0), ("sm_80", "sm_90a")) != ""
    assert lack_of_code("a card", (9, 0), ()) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card refuses none")
def test_a_machine_without_a_card_says_why() -> None:
    assert reason_to_refuse(torch.device("cpu")) == ""
    assert reason_to_refuse(torch.device("cuda")) != ""


def test_repeated_heads_attend_like_shared_ones() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 7, 16, generator=random) for heads in (6, 2, 2))
    mask = torch.rand(3, 1, 7, 7, generator=random) < 0.7
    mask |= torch.eye(7, dtype=torch.bool)
    shared = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    apart = scaled_dot_product_attention(query, repeat_heads(key, query), repeat_heads(value, query), attn_mask=mask)
    torch.testing.assert_close(apart, shared)
