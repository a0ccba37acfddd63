"""Episodes of several turns, with the rows of finished turns kept and without.

- A group of samples plays: a prompt, then turns of the policy with observations between them, each turn a request of
  its own whose prefixes are everything before it, as a node gets them.
- Both engines, on one thread and in float32, with rows kept and with none, which take turns. The first turn is the same
  for both, and counts.
- Times are CPU seconds of the whole episode. Tokens computed are those of prompts and prefixes; each turn's own tokens
  are decoded one by one in either way, and are the same ones, which the bench checks.
- The policy has random weights, and an end token that is never drawn: every turn has its full length.
"""

import json
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.learner.embedded import EmbeddedShape, make_model, make_tokenizer
from protocol.work.lease import Prefix
from protocol.work.rollout import Sample, pack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

SHAPE = EmbeddedShape(hidden=512, layers=6, heads=8, intermediate=1536)
POSITIONS = 8192
SAMPLES, TURNS = 4, 4
TURN_TOKENS, OBSERVED_TOKENS = 16, 32
CONTEXTS = {"short": 128, "long": 2048}
"""Tokens of the prompt."""


def make_version(folder: Path) -> Path:
    """Write a policy whose end token is never drawn."""
    make_model(make_tokenizer(), seed=1, shape=SHAPE, positions=POSITIONS).save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 10**9}))
    return folder


def episode(engine: Engine, seed: int, prompt_tokens: int) -> tuple[float, int, list[bytes]]:
    """Play an episode; return its CPU seconds, the tokens computed before its draws, and the tokens of its samples."""
    begun = [b""] * SAMPLES
    engine.measured()
    started = time.process_time()
    for turn in range(TURNS):
        ended: list[GroupDone] = []
        request = SampleRequest(
            request_id=f"{seed}/{turn}",
            version=1,
            prompt=pack_tokens([5 + number % 250 for number in range(prompt_tokens)]),
            seed=seed,
            samples=SAMPLES,
            max_new_tokens=TURNS * (TURN_TOKENS + OBSERVED_TOKENS),
            temperature=1.0,
            prefixes=tuple(Prefix(tokens=tokens, finish="") for tokens in begun) if turn else (),
            turn_tokens_max=TURN_TOKENS,
        )
        engine.generate([request], ended.append)
        begun = [_answered(tokens, sample) for tokens, sample in zip(begun, ended[0].samples, strict=True)]
    return time.process_time() - started, engine.measured().prompt_tokens, begun


def _answered(before: bytes, sample: Sample) -> bytes:
    return before + sample.tokens + pack_tokens([7 + number for number in range(OBSERVED_TOKENS)])


def engines(folder: Path) -> dict[str, dict[str, Engine]]:
    """Return each engine with rows kept, and without."""
    made: dict[str, dict[str, Engine]] = {
        "torch": {"kept": TorchEngine(device="cpu"), "none": TorchEngine(device="cpu", turns_max_bytes=0)},
        "llama": {"kept": LlamaEngine(gpu_layers=0), "none": LlamaEngine(gpu_layers=0, turns_max_bytes=0)},
    }
    for ways in made.values():
        for engine in ways.values():
            engine.load(folder, 1)
    return made


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    torch.set_num_threads(1)
    rounds = 1 if quick else 3
    inputs = {"rounds": rounds, "samples": SAMPLES, "turns": TURNS, "turn_tokens": TURN_TOKENS}
    bench = Bench("turns", inputs=inputs | {"observed_tokens": OBSERVED_TOKENS}, quick=quick)
    same = True
    with tempfile.TemporaryDirectory() as temp:
        for name, ways in engines(make_version(Path(temp) / "policy")).items():
            for context, prompt_tokens in CONTEXTS.items():
                for seed in range(rounds):
                    drawn = {}
                    for way, engine in ways.items():
                        seconds, computed, drawn[way] = episode(engine, seed, prompt_tokens)
                        bench.measure(f"{name}, {context}: {way}", seconds, unit="CPU s")
                        bench.measure(f"{name}, {context}, computed: {way}", computed, unit="tokens")
                    same &= drawn["kept"] == drawn["none"]
                bench.ratio(
                    f"{name}, {context}: computed",
                    f"{name}, {context}, computed: none",
                    f"{name}, {context}, computed: kept",
                )
                faster = bench.ratio(
                    f"{name}, {context}: none / kept", f"{name}, {context}: none", f"{name}, {context}: kept"
                )
                if context == "long":
                    bench.goal(f"{name}: kept rows halve the time of an episode", faster, at_least=2.0)
    bench.check("the same tokens are drawn in both ways", same)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
