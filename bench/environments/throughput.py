"""Episodes and tokens per second of a whole round, against a checkout in which nodes played the episodes themselves.

- Both sides have a coordinator, the same policy and the same number of nodes, on the same cores.
- Counted are groups of 16 whole episodes whose rewards are known, and the tokens that were sampled in all turns, after
  the first groups.
"""

import time
from pathlib import Path
from typing import NamedTuple

from bench.environments.round import CHAINS, NODE_SIDE, SAMPLES, SokobanRound
from bench.harness import ROOT

NODES = 2
WARM_GROUPS = 16


class Rates(NamedTuple):
    """What a round brought, by the clock."""

    episodes_per_s: float
    tokens_per_s: float


def rates(policy: Path, folder: Path, measured_s: float, *, before: Path | None = None) -> Rates:
    """Return the rates of a round of this checkout, or of the one at `before`."""
    play, code = (CHAINS, ROOT) if before is None else (NODE_SIDE, before.absolute())
    with SokobanRound(folder, policy, play, code) as round_:
        for number in range(NODES):
            round_.add_node(f"node-{number}", "--no-share")
        round_.wait_for(f"{WARM_GROUPS} groups", lambda: round_.progress().groups >= WARM_GROUPS)
        began, first = time.monotonic(), round_.progress()
        time.sleep(measured_s)  # the measurement
        took_s, last = time.monotonic() - began, round_.progress()
    return Rates(SAMPLES * (last.groups - first.groups) / took_s, (last.tokens - first.tokens) / took_s)
