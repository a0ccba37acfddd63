"""Settings of torch for graphics cards, which change what a card computes or how long it takes.

- Nothing is set for a processor, whose results no setting here would change.
- The settings are those of the whole process; they are made before the first product on a card.
"""

import os

import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: one of the two sizes with which cuBLAS adds in the same order each time."""


def compute_in_full(device: torch.device) -> None:
    """Compute float32 products in float32, and attention without cuDNN.

    - Containers of NVIDIA allow TF32 by a variable: its products have ten bits, and miss a canary in float32.
    - On Hopper and Blackwell torch prefers cuDNN's attention, which makes a plan for each new shape in 0.4 s. Here each
      step of decoding and each piece of a batch has a new shape.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.enable_cudnn_sdp(False)


def compute_repeatably(device: torch.device, *, strictly: bool = True) -> None:
    """Compute the same bits from the same inputs each time, or fail; unless `strictly`, try to.

    By default a card adds in any order where several values go to one place: shared prompts, attention's gradients.
    Attention has a fixed order only if every operation must have one, which is not known of ROCm's.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True, warn_only=not strictly or bool(torch.version.hip))
        torch.utils.deterministic.fill_uninitialized_memory = False  # what is never read need not be filled


def repeats() -> bool:
    """Return True if this process computes repeatably on cards."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def repeat_heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values [R, kv_heads, K, D] with a copy for each head of `query` [R, heads, Q, D].

    Up to torch 2.13, a card's attention with shared heads and a mask, or in float32, has all scores in memory.
    """
    rows, kv_heads, places, size = states.shape
    each = query.shape[1] // kv_heads
    return states[:, :, None].expand(rows, kv_heads, each, places, size).reshape(rows, kv_heads * each, places, size)
