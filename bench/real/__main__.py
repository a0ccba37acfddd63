"""`make bench-real`: SmolLM2-135M-Instruct on this machine, ours against what others sample and train it with.

- Every contender is a process of its own, and only one computes at a time, on as many threads as any other. They take
  turns, by the clock; memory is the peak of the process. The machine must do nothing else.
- `sampling`: 8 questions, 8 samples of each, of 12 to 96 tokens that no end token cuts short, at temperature 1. Our
  engine on torch against `generate` of transformers in float32; our engine on llama.cpp against a batched loop over
  llama.cpp alone, in float16 and float32; vLLM's `LLM.generate`, if `SWARM_VLLM_PYTHON` names its interpreter.
- `update`: `TrainedPolicy.train_step` against the loss, backward pass, clipping and AdamW of TRL's GRPOTrainer: the
  same completions of the real model, all weights in float32, DAPO's token mean, gradient checkpointing, one optimizer
  step. The whole batch at once, and 8 samples at once. Unless both come to the same loss and gradient, the bench ends.
- `versions`: bytes of a version as a patch and as an adapter against the whole.
- These three take about twenty minutes of two cores; the bench prints the minutes of each part.
- Only if named (`ARGS="--parts moments"`), and described in modules of their own in `bench.real`: `moments`, ten
  minutes; `bound`, 18 minutes for each of `--rounds`; `curve`, an hour.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.delta import LORA_RANK, Run, measure_adapters, measure_run
from bench.harness import ROOT, Bench, quick_from_environment
from bench.real import bound, curve, moments, sampling, training
from bench.vllm.__main__ import VARIABLE

FOLDER = Path(os.environ.get("SWARM_SMOLLM2", ROOT / ".venv-real" / "smollm2"))

PARTS = ("sampling", "update", "versions", "moments", "bound", "curve")

FULL_RATE = 2e-6
"""The learning rate of `examples/smollm2.toml`."""


def measure_versions(bench: Bench, folder: Path, scratch: Path, versions: int) -> None:
    """All weights in training as patches, then adapters."""
    for line in measure_run(bench, Run(scratch / "patches", folder, learning_rate=FULL_RATE), versions):
        print(line, flush=True)
    for line in measure_adapters(bench, scratch / "adapters", folder, versions):
        print(line, flush=True)


def main() -> int:
    """Measure the parts that are named, and judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the policy in hub format")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--rounds", type=int, default=1 if quick else 2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=2 if quick else 8, help="of each question, in sampling")
    parser.add_argument("--longest", type=int, default=16 if quick else 96, help="tokens, in sampling")
    parser.add_argument("--groups", type=int, default=2, help="of an update, of eight samples")
    parser.add_argument("--tokens", type=int, default=32 if quick else 96, help="of a completion that is trained on")
    parser.add_argument("--versions", type=int, default=1 if quick else 2)
    parser.add_argument(
        "--updates", type=int, default=2 if quick else 30, help="of each arm of moments, bound and curve"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4] if quick else list(curve.STALENESS))
    parser.add_argument("--adapters", action="store_true", help="train adapters in the curve, without TRL")
    options = parser.parse_args()
    if "curve" in options.parts and len(set(options.staleness)) < 2:
        parser.error("the curve compares rounds: give two or more values of --staleness")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers annotates half
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    torch.set_num_threads(options.threads)
    vllm = os.environ.get(VARIABLE, "")
    inputs = {name: value for name, value in vars(options).items() if name != "folder"}
    bench = Bench("real", inputs=inputs | {"vllm": bool(vllm), "lora_rank": LORA_RANK}, quick=quick)
    folder = options.folder.absolute()
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for part in [part for part in PARTS if part in options.parts]:
            began = time.monotonic()
            _measure(bench, part, folder, scratch, options)
            bench.measure(f"this bench: {part}", (time.monotonic() - began) / 60, unit="min")
    return bench.finish()


def _measure(bench: Bench, part: str, folder: Path, scratch: Path, options: argparse.Namespace) -> None:
    threads, tokens, updates = options.threads, options.tokens, options.updates
    match part:
        case "sampling":
            sampling.measure(
                bench,
                folder,
                scratch,
                threads=threads,
                samples=options.samples,
                longest=options.longest,
                rounds=options.rounds,
                vllm=os.environ.get(VARIABLE, ""),
            )
        case "update":
            batches = training.make_batches(folder, groups=options.groups, tokens=tokens, count=options.rounds + 1)
            training.measure(bench, folder, batches, threads=threads, tokens=tokens)
        case "versions":
            measure_versions(bench, folder, scratch, options.versions)
        case "moments":
            moments.measure(bench, folder, scratch, updates)
        case "bound":
            bound.measure(bench, folder, scratch, max(updates, bound.UNCOUNTED + 1), options.rounds)
        case "curve":
            curve.measure(bench, folder, scratch, options.staleness, updates, adapters=options.adapters)


if __name__ == "__main__":
    raise SystemExit(main())
