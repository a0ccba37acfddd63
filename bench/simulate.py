"""Speed of the simulator: a thousand nodes over two hundred updates, and ten thousand nodes.

- Everything that the simulator knows is on: unequal nodes, links and lengths, churn, preemption, forgers and their
  audits, the fleet, late groups given twice, lost ones gone on with, trees planned anew for every version.
- The same run is played twice, and must give the same trace.
"""

import argparse
import time
from dataclasses import replace

from bench.harness import Bench, quick_from_environment
from coordinator.rules.fleet_choice import FleetRules
from coordinator.sim.report import SimulationOutcome, figures
from coordinator.sim.scenario import Links, Scenario, SimulatedPool
from coordinator.sim.world import Simulation

LIMIT_S = 60.0
"""The limit of processor time, for a thousand nodes over two hundred updates."""


def swarm(nodes: int, updates: int) -> Scenario:
    """Half as many groups in an update as nodes, and a quarter more nodes than it takes."""
    train_s = 300.0
    groups = nodes // 2
    return Scenario(
        staleness=4,
        groups_per_update=groups,
        updates=updates,
        train_s=train_s,
        lease_s=2000.0,
        links=Links(size_mb=100.0, source_mbit=1000.0, node_mbit=100.0, node_up_mbit=40.0, spread=0.5, load_s=5.0),
        over_issue=8,
        continues=True,
        lookahead=16,
        gamma=1.1,
        rules=FleetRules(window_s=300.0, dwell_s=900.0),
        pool=SimulatedPool(
            nodes=nodes,
            group_s=train_s * nodes / groups / 1.25,
            speed_spread=0.4,
            length_spread=0.7,
            foresight=0.5,
            price_spread=0.4,
            stay_s=8 * 3600.0,
            preempt_s=4 * 3600.0,
            away_s=1800.0,
            liars=0.02,
        ),
    )


def timed(bench: Bench, scenario: Scenario) -> SimulationOutcome:
    """Play it; its processor time is recorded."""
    began_s = time.process_time()
    outcome = Simulation(scenario).run()
    took_s = time.process_time() - began_s
    name = f"{scenario.pool.nodes:,} nodes, {scenario.updates} updates"
    result = figures(scenario, outcome)
    bench.measure(name, took_s, unit="CPU s")
    bench.measure(f"{name}: events", outcome.events)
    bench.measure(f"{name}: learner idle", 100 * result["bubble"], unit="%")
    bench.measure(f"{name}: in vain", 100 * result["discarded_share"], unit="%")
    bench.check(f"{name}: it comes to its end", result["finished"])
    return outcome


def main() -> int:
    """Play and judge."""
    argparse.ArgumentParser(prog="bench simulate", description=__doc__).parse_args()
    quick = quick_from_environment()
    thousand = swarm(100 if quick else 1000, 50 if quick else 200)
    bench = Bench("simulate", inputs={"nodes": thousand.pool.nodes, "updates": thousand.updates}, quick=quick)
    first, again = timed(bench, thousand), timed(bench, thousand)
    bench.check("the same seed is the same trace", first.trace == again.trace)
    other = Simulation(replace(thousand, seed=1)).run()
    bench.check("and another is another", first.trace != other.trace)
    name = f"{thousand.pool.nodes:,} nodes, {thousand.updates} updates"
    bench.goal(f"CPU seconds for {name}", bench.median(name), at_most=LIMIT_S)
    if not quick:
        timed(bench, swarm(10_000, 20))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
