"""`make bench-gpu`: what can only be said on a GPU; without one it says so, and that is no failure.

- The torch engine on CUDA against the CPU, and against `generate` of transformers; the learner at the shapes of
  Qwen3-0.6B and 4B; then vLLM's tests and bench, where `SWARM_VLLM_PYTHON` names an environment that runs on CUDA.
- `QUICK=1` without a GPU runs the learner's and the engine's part on the CPU, at a tiny shape: it shows that they work.
- The learner's part comes first: it takes a minute or two, the comparison with the CPU several.
- A part that fails is a missed goal; the others run.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.engines import SHAPES, make_version
from bench.engines import requests as one_of_each
from bench.gpu import learner, sampling
from bench.gpu.shapes import SHAPES as LEARNER_SHAPES
from bench.gpu.shapes import TINY, LearnerShape
from bench.harness import Bench, Input, quick_from_environment
from coordinator.learner.embedded import EmbeddedShape
from protocol.errors import ConfigInvalid
from protocol.work.rollout import unpack_tokens
from swarm_node.engine.messages import GroupDone
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.engine.vllm import command

VARIABLE = "SWARM_VLLM_PYTHON"


def tokens_of(engine: TorchEngine) -> list[list[int]]:
    """Return the tokens that the requests of the bench draw, in their order."""
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
    same = sum(first == other for first, other in zip(drawn["cuda"], drawn["cpu"], strict=True)) / len(drawn["cpu"])
    bench.goal(f"{name}: share of completions that both draw alike in float32", same, at_least=0.9)


def run_vllm(bench: Bench) -> None:
    """vLLM's contract tests and its bench, as programs of their own."""
    try:
        probed = command.probe(os.environ.get(VARIABLE, ""))
    except ConfigInvalid as error:
        print(f"vLLM skipped: {error}")
        return
    if probed.device != "cuda":
        print(f"vLLM skipped: that of {VARIABLE} runs on {probed.device}")
        return
    for name, words in {"tests": ["pytest", "-q", "tests/vllm"], "bench": ["bench.vllm"]}.items():
        bench.check(f"vLLM's {name}", subprocess.run([sys.executable, "-P", "-m", *words], check=False).returncode == 0)


def measure_sampling(bench: Bench, rounds: int, *, quick: bool) -> None:
    """The smallest shape of the learner's, against `generate`."""
    name, shape = next(iter(LEARNER_SHAPES.items()))
    demand = sampling.Demand(longest=64) if quick else sampling.Demand()
    sampling.measure(bench, name, shape, demand, device="cuda", rounds=rounds)


def measure_learner(bench: Bench, peak: float | None, rounds: int) -> None:
    """Each shape that fits, and how its memory compares with what was predicted."""
    for name, shape in LEARNER_SHAPES.items():
        attempt(bench, f"the learner at {name}", partial(measure_update, bench, name, shape, peak, rounds))


def measure_update(bench: Bench, name: str, shape: LearnerShape, peak: float | None, rounds: int) -> None:
    """One shape, if it fits."""
    load, (free, _) = learner.Load(), torch.cuda.mem_get_info()
    found = learner.fitting(shape, load, free)
    if found is None:
        print(f"{name} skipped: it is predicted not to fit into {free / 2**30:.0f} GiB")
        return
    settings, predicted = found
    name = f"{name}, {settings.optimizer_dtype} moments"
    torch.cuda.reset_peak_memory_stats()
    learner.measure(bench, name, shape, load, settings, peak=peak, rounds=rounds)
    bench.measure(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, unit="GiB")
    bench.measure(f"{name}: reserved memory", torch.cuda.max_memory_reserved() / 2**30, unit="GiB")
    bench.measure(f"{name}: predicted with a version written beside", predicted / 2**30, unit="GiB")


def attempt(bench: Bench, name: str, part: Callable[[], None]) -> None:
    """Run a part; its failure is printed and a missed goal, and the next part runs."""
    try:
        part()
    except Exception:  # whatever a card that was never tried raises
        traceback.print_exc()
        bench.check(f"{name} runs", ok=False)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def try_on_cpu() -> int:
    """The learner's part where there is no GPU."""
    bench = Bench("gpu", inputs={"device": "cpu", "torch": torch.__version__}, quick=True)
    settings = learner.settings_of(learner.SMALL, "cpu", "float32")
    learner.measure(bench, "a tiny shape", TINY, learner.SMALL, settings, peak=None, rounds=1)
    bench.check("the learner's part runs", bench.median("a tiny shape: completion tokens") > 0)
    sampling.measure(
        bench, "a tiny shape", TINY, sampling.Demand(groups=2, samples=2, prompt=8, longest=16), device="cpu", rounds=1
    )
    return bench.finish()


def main() -> int:
    """Measure what there is."""
    parser = argparse.ArgumentParser(
        prog="bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 by the data sheet, of a device not known here")
    options = parser.parse_args()
    quick = quick_from_environment()
    if not torch.cuda.is_available():
        if quick:
            print("No CUDA device: the learner's part runs on the CPU, at a tiny shape.")
            return try_on_cpu()
        print("skipped: no CUDA device; QUICK=1 tries the learner's part on the CPU, at a tiny shape")
        return 0
    device = torch.cuda.get_device_name()
    peak = options.peak_tflops or learner.peak_tflops(device)
    if peak is None:
        print(f"MFU is left out: {device} is not known here; its data sheet goes into --peak-tflops")
    inputs: dict[str, Input] = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    inputs |= {"capability": list(torch.cuda.get_device_capability()), "peak": peak or 0.0}
    bench = Bench("gpu", inputs=inputs, quick=quick)
    measure_learner(bench, peak, 1 if quick else 5)
    attempt(bench, "sampling", partial(measure_sampling, bench, 1 if quick else 3, quick=quick))
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in SHAPES.items():

            def compare(name: str = name, shape: EmbeddedShape = shape) -> None:
                folder = make_version(Path(scratch) / str(shape.hidden), 1, shape)
                measure_torch(bench, name, folder, 1 if quick else 3)

            attempt(bench, f"{name} on card and processor", compare)
    attempt(bench, "vLLM", partial(run_vllm, bench))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
