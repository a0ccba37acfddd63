"""What the coordinator and a reward process say to each other: JSON behind its length, a question, then an answer.

to the child    {"functions": [[place, weight], …], "memory_mib"}   once
                {"problem", "completions", "tokens", "timeout_s"}   then as often as there is something to judge
from the child  {"ready": true} or {"error": "…"}                   once
                {"rewards": [[score, status, components, weight, skip], …]} or {"error": "…"}
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

from protocol import limits
from protocol.tasks import Reward

LENGTH = struct.Struct(">I")

ANSWER_MAX_BYTES = limits.MIB
"""What is read of an answer; 64 samples with a dozen components have a hundredth of it."""


def pack(value: Any) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return LENGTH.pack(len(data)) + data


def rewards_to(rewards: Sequence[Reward]) -> list[Any]:
    return [[one.score, one.status, dict(one.components), one.weight, one.skip] for one in rewards]
