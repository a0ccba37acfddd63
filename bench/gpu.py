"""`make bench-gpu`: what can only be said on a GPU; without one it says so, and that is no failure.

- The torch engine's tests and its bench on CUDA, then vLLM's where `SWARM_VLLM_PYTHON` names an environment that runs
  on CUDA.
- Nothing of this was run by its authors, who had no GPU: what it finds is news.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.engines import SHAPES, make_version
from bench.engines import requests as one_of_each
from bench.harness import Bench, quick_from_environment
from protocol.errors import ConfigInvalid
from protocol.rollout import unpack_tokens
from swarm_node.engine import vllm_command
from swarm_node.engine.messages import GroupDone
from swarm_node.engine.torch_engine import TorchEngine

VARIABLE = "SWARM_VLLM_PYTHON"


def tokens_of(engine: TorchEngine) -> list[list[int]]:
    """What the requests of the bench draw, in their order."""
    groups: list[GroupDone] = []
    engine.generate(one_of_each(1), groups.append)
    groups.sort(key=lambda group: int(group.request_id))
    return [unpack_tokens(sample.tokens).tolist() for group in groups for sample in group.samples]


def measure_torch(bench: Bench, name: str, folder: Path, rounds: int) -> None:
    """CUDA against the CPU in turns, and whether both draw the same."""
    engines = {device: TorchEngine(device=device, dtype="float32") for device in ("cuda", "cpu")}
    drawn: dict[str, list[list[int]]] = {}
    for engine in engines.values():
        engine.load(folder, 1)  # the canary is checked on either
        tokens_of(engine)
    for _ in range(rounds):
        for device, engine in engines.items():
            started = time.monotonic()
            drawn[device] = tokens_of(engine)
            seconds = time.monotonic() - started
            bench.measure(f"{name}: torch, {device}", sum(map(len, drawn[device])) / seconds, unit="tokens per s")
    bench.ratio(f"{name}: cuda / cpu", f"{name}: torch, cuda", f"{name}: torch, cpu")
    same = sum(one == other for one, other in zip(drawn["cuda"], drawn["cpu"], strict=True)) / len(drawn["cpu"])
    bench.goal(f"{name}: share of completions that both draw alike in float32", same, at_least=0.9)


def run_vllm(bench: Bench) -> None:
    """vLLM's contract tests and its bench, as programs of their own."""
    try:
        found = vllm_command.probe(os.environ.get(VARIABLE, ""))
    except ConfigInvalid as error:
        print(f"vLLM skipped: {error}")
        return
    if found.device != "cuda":
        print(f"vLLM skipped: that of {VARIABLE} runs on {found.device}")
        return
    for name, words in {"tests": ["pytest", "-q", "tests/vllm"], "bench": ["bench.vllm"]}.items():
        bench.check(f"vLLM's {name}", subprocess.run([sys.executable, "-P", "-m", *words], check=False).returncode == 0)


def main() -> int:
    """Measure what there is."""
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    quick = quick_from_environment()
    bench = Bench("gpu", inputs={"device": torch.cuda.get_device_name(), "torch": torch.__version__}, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in SHAPES.items():
            folder = make_version(Path(scratch) / str(shape.hidden), 1, shape)
            measure_torch(bench, name, folder, 1 if quick else 3)
    run_vllm(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
