"""Settings of torch for graphics cards, which change what a card computes or how long it takes.

- Nothing is set for a processor, whose results no setting here would change.
- Settings that cost nothing are those of the whole process; they are made before the first product on a card.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from protocol.text.plain import counted, one_line

BUILT_FOR = re.compile(r"(sm|compute)_(\d{2,3})")
"""A kind of code in a build of torch; names with a letter, such as sm_90a, are for one card only."""

_filling: Any = torch.utils.deterministic
"""The module whose `fill_uninitialized_memory` is a property, which its annotations lack."""

CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: one of the two sizes with which cuBLAS adds in the same order each time."""


def reason_to_refuse(device: torch.device) -> str:
    """Return why torch cannot compute on this card; empty if it can, or if the device is no card of CUDA or ROCm."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            return f"torch finds {counted(count, 'card')}, and {device} is not among them"
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:  # without CUDA, torch fails an assertion
        return one_line(str(error))[:300].rstrip(".")
    return "" if torch.version.hip else lack_of_code(name, capability, torch.cuda.get_arch_list())


def lack_of_code(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> str:
    """Return why a build of torch has no code for an NVIDIA card; empty if it has, or if the build does not say.

    Code `sm_XY` runs on cards of the same generation X from Y on; `compute_XY` is compiled for any later card.
    """
    known = [(match[1], divmod(int(match[2]), 10)) for each in built_for if (match := BUILT_FOR.fullmatch(each))]
    fits = [built <= capability and (kind == "compute" or built[0] == capability[0]) for kind, built in known]
    if not known or any(fits):
        return ""
    older = " Builds for CUDA 12.6 have code for older cards." if capability < min(built for _, built in known) else ""
    return f"this build of torch has no code for {name} (compute capability {capability[0]}.{capability[1]}).{older}"


def compute_in_full(device: torch.device) -> None:
    """Compute float32 products in float32, and attention without cuDNN.

    - Containers of NVIDIA allow TF32 by a variable: its products have ten bits, and miss a canary in float32.
    - torch reads the size of cuBLAS's buffers at the first product of a process, so it is set here.
    - On Hopper and Blackwell torch prefers cuDNN's attention, which makes a plan for each new shape in 0.4 s. Here each
      step of decoding and each piece of a batch has a new shape.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def computing_repeatably(device: torch.device, *, strictly: bool = True) -> Iterator[None]:
    """Compute the same bits from the same inputs each time in this block, or fail; unless `strictly`, try to.

    By default a card adds in any order where several values go to one place: shared prompts, attention's gradients.
    Attention has a fixed order only if every operation must have one. Drawing tokens has none, so this is not set for
    the whole process.
    """
    if device.type != "cuda":
        yield
        return
    mode, fills = torch.get_deterministic_debug_mode(), _filling.fill_uninitialized_memory
    _filling.fill_uninitialized_memory = False  # what is never read need not be filled
    torch.use_deterministic_algorithms(True, warn_only=not strictly or not has_order())
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
        _filling.fill_uninitialized_memory = fills


def has_order() -> bool:
    """Return True if attention on this machine's cards can have a fixed order, which is not known of ROCm's."""
    return not torch.version.hip


def repeat_heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values [R, kv_heads, K, D] with a copy for each head of `query` [R, heads, Q, D].

    Up to torch 2.13, a card's attention with shared heads and a mask, or in float32, has all scores in memory.
    """
    rows, kv_heads, places, size = states.shape
    each = query.shape[1] // kv_heads
    return states[:, :, None].expand(rows, kv_heads, each, places, size).reshape(rows, kv_heads * each, places, size)
