"""Episodes per second of a whole round, against a checkout in which nodes played the episodes themselves.

- Both sides have a coordinator, the same policy and the same number of nodes, on the same cores.
- Counted are groups of 16 whole episodes whose rewards are known, after the first groups.
"""

import time
from pathlib import Path

from bench.environments.round import CHAINS, NODE_SIDE, SAMPLES, settings, whole_groups
from bench.harness import ROOT
from bench.rounds.served import BenchRound

NODES = 2
WARM_GROUPS = 16


def episodes_per_s(policy: Path, folder: Path, measured_s: float, *, before: Path | None = None) -> float:
    """Measure a round of this checkout, or of the one at `before`."""
    play, code = (CHAINS, ROOT) if before is None else (NODE_SIDE, before.absolute())
    with BenchRound(folder, policy, settings(play), code) as round_:
        for number in range(NODES):
            round_.add_node(f"node-{number}", "--no-share")
        round_.wait_for(f"{WARM_GROUPS} groups", lambda: whole_groups(folder) >= WARM_GROUPS)
        began, first = time.monotonic(), whole_groups(folder)
        time.sleep(measured_s)  # the measurement
        took_s, last = time.monotonic() - began, whole_groups(folder)
    return SAMPLES * (last - first) / took_s
