"""vLLM made to fail in ways that must not go unnoticed; run as a program under its interpreter.

Prints a line for each: weights packed for oneDNN, of which a reload leaves stale copies and a plain copy finds nothing;
then memory that ends while more than a few samples run.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

FOREIGN = Path(__file__).resolve().parents[2] / "swarm_node" / "engine" / "foreign.py"
runpy.run_path(str(FOREIGN))["take_rooms"]()
os.environ.update(importlib.import_module("swarm_node.engine.vllm.command").environment(threads=1))
_custom_ops: Any = importlib.import_module("vllm._custom_ops")
engines: Any = importlib.import_module("swarm_node.engine.vllm.engine")
models: Any = importlib.import_module("swarm_node.engine.vllm.model")
messages: Any = importlib.import_module("swarm_node.engine.messages")
Worker: Any = importlib.import_module("swarm_node.engine.vllm.worker").WorkerExtension

ROWS_THAT_FIT = 3
PROMPT = b"\x13\0\0\0\x14\0\0\0"

settings, take, step = models.of_platform, Worker.swap_policy, models.VllmModel.step


def packed(vram_share: float = 1.0, cards: int = 1) -> dict[str, Any]:
    """Ours, but with the weights packed."""
    found: dict[str, Any] = settings(vram_share, cards)
    _custom_ops._supports_onednn = True
    return found


def reload(worker: Any, folder: str) -> None:
    """Reload the weights by the call that vLLM offers for the purpose."""
    worker.reload_weights(weights_path=folder)


def scarce(model: Any) -> Any:
    """Raise what torch says where memory ends."""
    if model.rows > ROWS_THAT_FIT:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return step(model)


def refused(engine: Any, first: Path, then: Path) -> str:
    """Return why the second policy is not loaded over the first."""
    engine.load(first, 1)
    try:
        engine.load(then, 2)
    except engines.EngineFailed as error:
        return str(error.message)
    return "nothing noticed"


def sampled(engine: Any) -> list[bytes]:
    for seed in (1, 2):
        asked = {"version": 1, "prompt": PROMPT, "seed": seed, "samples": 4, "max_new_tokens": 6, "temperature": 1.0}
        engine.add(messages.SampleRequest(request_id=str(seed), **asked))
    ended: list[Any] = []
    while engine.busy:
        ended += engine.step()
    groups = sorted(ended, key=lambda group: str(group.request_id))
    return [one.tokens for group in groups for one in group.samples]


def main(policy: Path, other: Path) -> None:
    engine = engines.VllmEngine(dtype="float32")
    models.of_platform, Worker.swap_policy = packed, reload
    print(refused(engine, policy, other))
    Worker.swap_policy = take
    print(refused(engine, policy, other))
    models.of_platform, _custom_ops._supports_onednn = settings, False
    engine.load(policy, 1)
    plenty = sampled(engine)
    models.VllmModel.step = scarce
    print("fewer at once, the same tokens" if len(plenty) == 8 and sampled(engine) == plenty else "other tokens")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
