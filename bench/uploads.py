"""Bytes that a trainer sends for a version: whole files, files in the round's types, and patches.

- A Qwen3 of 27 million parameters, which the round publishes in bf16, is trained in float32 by AdamW on random tokens,
  as a trainer of one's own would: all weights at two rates, or LoRA adapters that the round publishes as adapters.
- What is sent is made by the client's own code, `echo_swarm.weights`, and checked as the coordinator checks it: each
  patch must lead to the digest of the whole file.
- Bytes are exact. The seconds are those that casting and comparing take the trainer, on all cores.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from bench.delta import SHAPE, SMALL, make_start
from bench.harness import Bench, no_options, quick_from_environment
from coordinator.base.files import mapped
from coordinator.publishing import weights
from echo_swarm.weights import digest_of, in_published_form, read_published, write_patch
from protocol.policy import adapter, delta

RANK = 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEQUENCES, LENGTH = 4, 32

State = dict[str, torch.Tensor]
Step = Callable[[], State]


@dataclass(frozen=True)
class Case:
    """A way to change weights."""

    name: str
    rate: float
    begin: Callable[[Path, float], Iterator[State]]
    """Yields the weights before training, and after each step."""
    at_least: float
    """The goal: times that a patch is smaller than what was sent before, the trainer's whole file."""


def of_all_weights(start: Path, rate: float) -> Iterator[State]:
    """Train all weights."""
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    names = [name for name, _ in model.named_parameters()]
    while True:
        yield {name: model.get_parameter(name).detach() for name in names}
        step(model, optimizer)


def of_adapters(start: Path, rate: float) -> Iterator[State]:
    """Train adapters beside the weights."""
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32).requires_grad_(False)
    matrices: State = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path.endswith(ADAPTED):
            down, up = torch.randn(RANK, module.in_features) / RANK, torch.zeros(module.out_features, RANK)
            matrices |= zip(adapter.names(f"{path}.weight"), (down, up), strict=True)
            adapt(module, down.requires_grad_(), up.requires_grad_())
    optimizer = torch.optim.AdamW(matrices.values(), lr=rate, weight_decay=0.0)
    while True:
        yield {name: matrix.detach() for name, matrix in matrices.items()}
        step(model, optimizer)


def adapt(module: torch.nn.Module, down: torch.Tensor, up: torch.Tensor) -> None:
    """Add an adapter's output to that of a layer."""
    module.register_forward_hook(lambda _, given, output: output + given[0] @ down.T @ up.T)


def step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Take one step on random tokens."""
    tokens = torch.randint(3, model.config.vocab_size, (SEQUENCES, LENGTH))
    optimizer.zero_grad()
    torch.autograd.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()


def write(state: State, path: Path, dtype: torch.dtype) -> Path:
    """Write weights as one file."""
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    save_file(tensors, path, {"format": "pt"})
    return path


def described(path: Path) -> dict[str, object]:
    """Return what the coordinator says of a published file."""
    size = path.stat().st_size
    return {"name": path.name, "digest": digest_of(path), "size_bytes": size, "header": weights.header_text(path)}


def measure(bench: Bench, case: Case, start: Path, folder: Path, versions: int) -> None:
    """Train, and make what a trainer sends for each version."""
    torch.manual_seed(1)
    states = case.begin(start, case.rate)
    base = write(next(states), folder / "round" / "model.safetensors", torch.bfloat16)
    for number in range(1, versions + 1):
        own = write(next(states), folder / "own" / "model.safetensors", torch.float32)
        published = read_published({"files": [described(base)]})
        made, patch = folder / str(number), folder / "patch"
        made.mkdir()
        began = time.perf_counter()
        ((path, digest),) = in_published_form({own: ""}, published, made).items()
        is_smaller = write_patch(base, published[path.name].digest, path, patch)
        bench.measure(f"{case.name}: cast and compared in", time.perf_counter() - began, unit="s")
        hasher = blake3()
        for block in delta.apply(mapped(base), mapped(patch), base_digest=published[path.name].digest):
            hasher.update(block)
        bench.check(f"{case.name}: a patch is made, and leads to the file", is_smaller and hasher.hexdigest() == digest)
        for what, file in (("float32", own), ("the round's type", path), ("patch", patch)):
            bench.measure(f"{case.name}: {what}", file.stat().st_size / 1e6, unit="MB")
        base = path
    times = bench.ratio(f"{case.name}: float32 ÷ patch", f"{case.name}: float32", f"{case.name}: patch")
    bench.goal(f"{case.name}: times fewer bytes", times, at_least=case.at_least)


CASES = (
    Case("all weights, rate 1e-6", 1e-6, of_all_weights, 50.0),
    Case("all weights, rate 1e-5", 1e-5, of_all_weights, 10.0),
    Case("adapters of rank 16, rate 1e-5", 1e-5, of_adapters, 4.0),
)


def main() -> int:
    """Measure every case, print and judge."""
    no_options(__doc__)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    quick = quick_from_environment()
    versions, shape = (2, SMALL) if quick else (4, SHAPE)
    bench = Bench("uploads", inputs={"versions": versions, "hidden": shape.hidden, "layers": shape.layers}, quick=quick)
    with tempfile.TemporaryDirectory() as place:
        start = make_start(Path(place) / "start", shape)
        for number, case in enumerate(CASES):
            folder = Path(place) / f"case-{number}"
            folder.mkdir()
            measure(bench, case, start, folder, versions)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
