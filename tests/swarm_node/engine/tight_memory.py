"""Samples more than a limit on its memory allows at once, and without transformers; run as a program."""

import resource
import sys
from pathlib import Path

import torch

from protocol.work.rollout import pack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

GROUPS, SAMPLES = 32, 64
ROOM_BYTES = 20 * 2**20
"""Room for the keys and values of about 700 samples."""


def sample(engine: Engine, groups: int, prompt: list[int]) -> list[GroupDone | GroupFailed]:
    for number in range(groups):
        engine.add(
            SampleRequest(
                request_id=f"{number:02}",
                version=1,
                prompt=pack_tokens(prompt),
                seed=number,
                samples=SAMPLES if groups > 1 else 1,
                max_new_tokens=3,
                temperature=1.0,
            )
        )
    ended: list[GroupDone | GroupFailed] = []
    while engine.busy:
        ended += [said for said in engine.step() if not isinstance(said, GroupGrown)]
    return sorted(ended, key=lambda group: group.request_id)


def tokens(groups: list[GroupDone | GroupFailed]) -> list[bytes]:
    return [one.tokens for group in groups if isinstance(group, GroupDone) for one in group.samples]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    plenty, tight = (TorchEngine(slots=GROUPS * SAMPLES) for _ in range(2))
    for engine in (plenty, tight):
        engine.load(Path(folder), 1)
    expected = tokens(sample(plenty, GROUPS, [19, 20, 31]))
    del plenty
    assert len(expected) == GROUPS * SAMPLES
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES, -1))

    assert tokens(sample(tight, GROUPS, [19, 20, 31])) == expected
    print("fewer at once, the same tokens")

    (failed,) = sample(tight, 1, [19] * 30_000)
    assert isinstance(failed, GroupFailed)
    print(failed.message)

    assert len(tokens(sample(tight, 1, [19, 20, 31]))) == 1
    print("and goes on")
    assert "transformers" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1])
