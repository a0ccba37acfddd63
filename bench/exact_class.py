"""`python -m bench.exact_class FOLDER`: the exact class of a policy on this machine, and a digest of answers to it.

- It imports the engine alone, so it runs where torch does: on another processor, or one that is emulated.
- Two machines of one class print one digest; `bench.exact` compares instruction sets by it.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from protocol.work.lease import EXACT
from protocol.work.rollout import Completion, pack_tokens, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine


def requests(groups: int, samples: int, length: int, first: int = 0) -> list[SampleRequest]:
    """Leases with prompts of 5 to 70 tokens that mean nothing."""
    return [
        SampleRequest(
            request_id=str(number), version=1, seed=number, samples=samples, max_new_tokens=length, temperature=1.0,
            prompt=pack_tokens([7 + (number * 31 + place * 17) % 250 for place in range(5 + number * 13 % 66)]),
        )
        for number in range(first, first + groups)
    ]  # fmt: skip  # one field after the other


def loaded(folder: Path, dtype: str, slots: int = 256) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype=dtype, slots=slots)
    engine.load(folder, 1)
    return engine


def sampled(engine: Engine, asked: Sequence[SampleRequest]) -> dict[str, list[Completion]]:
    done = dict[str, list[Completion]]()

    def keep(group: GroupDone) -> None:
        rows = group.samples
        done[group.request_id] = [
            Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish) for row in rows
        ]

    engine.generate(asked, keep)
    return done


def digest(answers: dict[str, list[Completion]]) -> str:
    """Return a digest of all bits of some answers."""
    whole = hashlib.sha256()
    for name in sorted(answers):
        for said in answers[name]:
            whole.update(said.tokens.tobytes() + said.logprobs.tobytes())
    return whole.hexdigest()[:16]


def main() -> int:
    """Print class and digest."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    engine = loaded(folder, EXACT)
    print(engine._loaded().numerics, digest(sampled(engine, requests(2, 16, 12))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
