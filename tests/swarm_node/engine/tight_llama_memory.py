"""Samples more with llama.cpp than a limit on its memory allows at once, and without torch; run as a program.

The prompt is long, so that keys and values are what memory ends for: llama.cpp survives that, but not the end of memory
for what little it needs besides.
"""

import resource
import sys
from pathlib import Path

from protocol.work.rollout import pack_tokens
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.messages import GroupDone, SampleRequest

GROUPS, SAMPLES = 4, 64
PROMPT = [19, 20, 31] * 250
ROOM_BYTES = 38 * 2**20
"""All samples need 50 MiB at once, half of them 25."""


def sample(engine: LlamaEngine) -> list[bytes]:
    done: list[GroupDone] = []
    prompt = pack_tokens(PROMPT)
    requests = [
        SampleRequest(
            request_id=str(number),
            version=1,
            prompt=prompt,
            seed=number,
            samples=SAMPLES,
            max_new_tokens=2,
            temperature=1,
        )
        for number in range(GROUPS)
    ]
    engine.generate(requests, done.append)
    return [one.tokens for group in sorted(done, key=lambda group: group.request_id) for one in group.samples]


def main(folder: str) -> None:
    plenty, tight = LlamaEngine(dtype="float16"), LlamaEngine(dtype="float16")
    for engine in (plenty, tight):
        engine.load(Path(folder), 1)
    expected = sample(plenty)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES, -1))
    assert sample(tight) == expected
    print("fewer at once, the same tokens")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1])
