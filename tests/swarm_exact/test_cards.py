"""Settings for graphics cards, as far as a machine without one can show them."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm_exact.cards import repeat_heads

PROGRAM = """
import torch
from swarm_exact import cards

for device, strictly in (("cpu", True), ("cuda", False), ("cuda:1", True)):
    cards.compute_in_full(torch.device(device))
    cards.compute_repeatably(torch.device(device), strictly=strictly)
    print(
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        cards.repeats(),
    )
"""


@pytest.mark.processes
def test_a_card_computes_in_full_precision_and_repeatably_whatever_its_container_allows() -> None:
    """Containers of NVIDIA allow TF32 by this variable. Nothing is set for a processor."""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "high True True 0 True False",
        "highest False False 1 False False",
        "highest False False 2 False True",
    ]


def test_repeated_heads_attend_like_shared_ones() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 7, 16, generator=random) for heads in (6, 2, 2))
    mask = torch.rand(3, 1, 7, 7, generator=random) < 0.7
    mask |= torch.eye(7, dtype=torch.bool)
    shared = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    apart = scaled_dot_product_attention(query, repeat_heads(key, query), repeat_heads(value, query), attn_mask=mask)
    torch.testing.assert_close(apart, shared)
