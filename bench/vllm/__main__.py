"""`make bench-vllm`: our vLLM child against vLLM's own `LLM.generate`, and a swap against a cold load.

- `SWARM_VLLM_PYTHON` names the interpreter of vLLM's environment (`make test-vllm` makes one); without it the bench
  skips, and says so.
- Both sides hold the same policy, sample the same prompts to the same lengths in processes of their own, and take
  turns. Each is charged the CPU seconds of its process tree, or the clock on a GPU.
- The rival draws with vLLM's own sampler and returns the log-probability of each token, as we must.
"""

import json
import os
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import IO

import psutil

from bench.engines import LENGTHS, PROMPTS, make_version
from bench.engines import requests as one_of_each
from bench.harness import Bench, Input, no_options, quick_from_environment
from coordinator.learner.embedded import EmbeddedShape
from protocol.work.rollout import unpack_tokens
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Command,
    Generate,
    Loaded,
    LoadVersion,
    Ready,
    Said,
    SampleRequest,
    frame,
)
from swarm_node.engine.vllm import command as vllm_command

VARIABLE = "SWARM_VLLM_PYTHON"
SHAPES = {
    "1.1 M": EmbeddedShape(hidden=128, layers=4, heads=4, intermediate=512),
    "21 M": EmbeddedShape(512, 6, 8, 1536),
}
RIVAL = Path(__file__).with_name("rival.py")


TURNS = 3
"""Turns of either side, in each round."""


class Side:
    """A process that samples, and what it has cost."""

    def __init__(self, command: list[str], device: str) -> None:
        self._device, self._since = device, 0.0 if device == "cpu" else time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def reset(self) -> None:
        """Count from here."""
        self._since += self.cost_s()

    def cost_s(self) -> float:
        """CPU seconds of the tree since its start or the last `reset`, or on a GPU those of the clock."""
        return self._spent_s() - self._since

    def _spent_s(self) -> float:
        if self._device != "cpu":
            return time.monotonic()
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return float(sum(spent.user + spent.system for spent in times))

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def close(self) -> None:
        self.stdin.close()
        self.process.wait()


class Ours(Side):
    """The engine child that nodes run."""

    def __init__(self, python: str, device: str) -> None:
        super().__init__(vllm_command.command(python, threads=1), device)
        assert isinstance(self._answer(), Ready)

    def load(self, folder: Path, version: int) -> bool:
        """Load a version; return True if vLLM was rebuilt."""
        loaded = self._tell(LoadVersion(folder=str(folder), version=version))
        assert isinstance(loaded, Loaded), loaded
        return loaded.rebuilt

    def sample(self, requests: list[SampleRequest]) -> None:
        self._tell(Generate(requests=tuple(requests)))
        for _ in requests[1:]:
            self._answer()

    def _tell(self, body: LoadVersion | Generate) -> Said:
        self.stdin.write(frame(Command(body=body)))
        self.stdin.flush()
        return self._answer()

    def _answer(self) -> Said:
        size_bytes = int.from_bytes(self.stdout.read(LENGTH_BYTES))
        return Answer.from_bytes(self.stdout.read(size_bytes)).body


class Rival(Side):
    """`LLM.generate`, one call for all prompts."""

    def __init__(self, python: str, device: str, folder: Path) -> None:
        super().__init__([python, "-P", str(RIVAL), str(folder)], device)

    def wait(self) -> None:
        """Wait until it has started, which takes as long as our cold load."""
        assert json.loads(self.stdout.readline()) == "ready"

    def sample(self, requests: list[SampleRequest]) -> None:
        work = [[unpack_tokens(request.prompt).tolist(), request.max_new_tokens] for request in requests]
        self.stdin.write(json.dumps(work).encode() + b"\n")
        self.stdin.flush()
        assert json.loads(self.stdout.readline()) == sum(request.max_new_tokens for request in requests)


def measure(bench: Bench, name: str, python: str, device: str, folders: list[Path], rounds: int) -> None:
    """Measure, with a new child in each round, its cold load, sampling in turns with the rival, and a swap."""
    work = one_of_each(1)
    tokens = sum(request.max_new_tokens for request in work)
    unit = "tokens per CPU s" if device == "cpu" else "tokens per s"
    with closing(Rival(python, device, folders[0])) as rival:
        rival.wait()
        for _ in range(rounds):
            with closing(Ours(python, device)) as ours:
                ours.load(folders[0], 1)
                bench.measure(f"{name}: cold load", ours.cost_s(), unit="s")
                sides: dict[str, Ours | Rival] = {f"{name}: ours": ours, f"{name}: LLM.generate": rival}
                for turn in range(TURNS + 1):
                    for case, side in sides.items():
                        side.sample(work)
                        if turn:  # the first one compiles and allocates
                            bench.measure(case, tokens / side.cost_s(), unit=unit)
                        side.reset()
                if ours.load(folders[1], 1):
                    raise RuntimeError("the swap built a new model")
                bench.measure(f"{name}: swap", ours.cost_s(), unit="s")
    ratio = bench.ratio(f"{name}: ours / LLM.generate", f"{name}: ours", f"{name}: LLM.generate")
    bench.goal(f"{name}: at most a tenth slower than LLM.generate", ratio, at_least=0.9)
    ratio = bench.ratio(f"{name}: swap / cold load", f"{name}: swap", f"{name}: cold load")
    bench.goal(f"{name}: a swap takes at most a fifth of a cold load", ratio, at_most=0.2)


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    if not (python := os.environ.get(VARIABLE)):
        print(f"skipped: {VARIABLE} names no interpreter of an environment with vLLM")
        return 0
    quick, probed = quick_from_environment(), vllm_command.probe(python)
    rounds = 1 if quick else 3
    inputs: dict[str, Input] = {
        "vllm": probed.version, "device": probed.device, "prompts": PROMPTS, "lengths": LENGTHS, "rounds": rounds,
    }  # fmt: skip  # one line
    bench = Bench("vllm", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in list(SHAPES.items())[: 1 if quick else None]:
            folders = [make_version(Path(scratch) / f"{shape.hidden}-{seed}", seed, shape) for seed in (1, 2)]
            measure(bench, name, python, probed.device, folders, rounds)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
