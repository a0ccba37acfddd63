"""Results of a real round, read from its store when it is over.

- The learner's waits and work, the ages of groups, what was in vain, and when each version was in each engine.
- And what the simulator is given besides the setting: how long an update, an answer's way, hearing of a version and
  loading it took. None of them is what is foretold.
"""

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from bench.anchor.setting import POOL, Case, group_s, machines, paced_s
from coordinator.sim.report import WARM_UP
from protocol.work.lease import Lease

MILLI = 1000.0

STAGES = """
    SELECT b.version, (b.heard_ms - v.published_ms) / 1000.0, (b.loaded_ms - v.published_ms) / 1000.0
    FROM broadcasts b JOIN versions v USING (version) WHERE b.loaded_ms IS NOT NULL AND v.policy_update > 0
"""
LEASES = """
    SELECT l.offer, (l.ended_ms - l.issued_ms) / 1000.0, n.name
    FROM leases l JOIN nodes n USING (node_id) WHERE l.state IN ('accepted', 'rejected')
"""
ENDS = """
    SELECT (SELECT count(*) FROM rollouts WHERE batch IS NOT NULL),
           (SELECT count(*) FROM rollouts WHERE state IN ('stale', 'surplus'))
         + (SELECT count(*) FROM leases WHERE state IN ('rejected', 'expired'))
"""
AGE = "SELECT avg(batch - 1 - policy_update) FROM rollouts WHERE batch > ?"


@dataclass(frozen=True)
class Measured:
    """The figures of a round, once its pipeline was full."""

    train_s: float
    """Seconds from a batch until the next one is asked for, saving and publishing included."""
    size_mb: float
    answer_s: float
    """Seconds that asking for a group and bringing the answer added to its sampling."""
    hear_s: float
    """Seconds from a publication until a node knows of it."""
    load_s: float
    step_s: float
    bubble: float
    broadcast_s: float
    """Seconds from a publication until half of the nodes had it in their engines, in the median."""
    discarded_share: float
    age_mean: float
    cost_per_update: float


def measured(store: Path, size_bytes: int, logs: Sequence[Path]) -> Measured:
    """Return the figures in a finished round's store."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        batches = connection.execute("SELECT formed_ms, idle_s, busy_s FROM batches ORDER BY batch").fetchall()
        ((trained, in_vain),) = connection.execute(ENDS)
        ((age_mean,),) = connection.execute(AGE, [int(WARM_UP * len(batches))])
        stages = connection.execute(STAGES).fetchall()
        leases = connection.execute(LEASES).fetchall()
    done = batches[int(WARM_UP * len(batches)) :]
    idle_s, busy_s = (sum(row[column] for row in done[1:]) for column in (1, 2))
    step_s = (done[-1][0] - done[0][0]) / MILLI / (len(done) - 1)
    loads = [float(said) for log in logs for said in re.findall(r"version loaded .*seconds=([\d.]+)", log.read_text())]
    means_s = {node.name: group_s(node) for node in machines()}
    ways = [took_s - paced_s(Lease.from_bytes(offer).seed, means_s[name]) for offer, took_s, name in leases]
    hourly = Case("visible", 1).scenario().learner_price_per_hour + 3600 * sum(node.cost for node in machines())
    return Measured(
        train_s=busy_s / (len(done) - 1),
        size_mb=size_bytes / 1e6,
        answer_s=fmean(ways),
        hear_s=median(heard_s for _, heard_s, _ in stages),
        load_s=median(loads),
        step_s=step_s,
        bubble=idle_s / (idle_s + busy_s),
        broadcast_s=median(_halves([(version, loaded_s) for version, _, loaded_s in stages])),
        discarded_share=in_vain / (in_vain + trained),
        age_mean=age_mean,
        cost_per_update=hourly * step_s / 3600,
    )


def _halves(loaded: Sequence[tuple[int, float]]) -> list[float]:
    """Return, for each version, the time at which half of the nodes had loaded it."""
    moments: dict[int, list[float]] = {}
    for version, seconds in sorted(loaded):
        moments.setdefault(version, []).append(seconds)
    half = (POOL.nodes + 1) // 2 - 1
    return [seconds[half] for seconds in moments.values() if len(seconds) > half]
