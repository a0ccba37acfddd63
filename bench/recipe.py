"""Does the demo's recipe learn? Warm start and GRPO without a network, on rollouts as stale as a swarm's.

- One process plays both sides with the real parts, see `bench/learning/trial.py`.
- A version is published every kappa updates, and a batch comes from the newest that is at least `DELAY` updates old:
  with kappa = 3 it lags 2, 3 or 4 updates behind the learner, never more than S = 4.
- Costs are CPU seconds of one thread, split by side; a swarm adds its network, and shares its cores.

`python bench/recipe.py --seeds 5` runs the settings of examples/demo.toml; the other options try different ones.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, quick_from_environment
from bench.learning.trial import Trial
from coordinator.config import Config, load

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"

DELAY = 2
"""Updates between publishing a version and training on its first rollouts: fetching, sampling and queueing."""

ALL = 10_000
"""More held-out problems than there are."""


class Clock:
    """CPU seconds of this process by side."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.cpu_s[side] = self.cpu_s.get(side, 0.0) + time.process_time() - began


def run_seed(config: Config, seed: int, bench: Bench) -> tuple[float, float]:
    """Run one seed and record what came of it: the accuracy before and after."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        place = {"directory": Path(folder), "seed": seed}
        trial = Trial(config.model_copy(update={"round": config.round.model_copy(update=place)}), delay=DELAY)
        with clock.of("warm start"):
            trial.warm_start()
        before = trial.right(ALL)
        for _ in range(config.round.max_updates):
            with clock.of("generation"):
                groups = trial.generate()
            with clock.of("training"):
                trial.train(groups)
        after = trial.right(ALL)
    costs = ", ".join(f"{side} {seconds:.0f}" for side, seconds in clock.cpu_s.items())
    print(
        f"seed {seed}: {before:.1%} → {after:.1%}; CPU seconds: {costs}; "
        f"farthest honest group: {trial.max_distance:.2f} nats per token",
        flush=True,
    )
    bench.measure("accuracy before", 100 * before, unit="%")
    bench.measure("accuracy after", 100 * after, unit="%")
    bench.measure("rise", 100 * (after - before), unit="points")
    bench.measure("warm start", clock.cpu_s["warm start"], unit="CPU s")
    bench.measure("generation per update", clock.cpu_s["generation"] / config.round.max_updates, unit="CPU s")
    bench.measure("training per update", clock.cpu_s["training"] / config.round.max_updates, unit="CPU s")
    bench.measure("farthest honest group", trial.max_distance, unit="nats")
    return before, after


def main() -> int:
    """Run the seeds and judge the worst of them."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1 if quick else 5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the recipe")
    options = parser.parse_args()
    config = load(DEMO, options.set)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    recipe = config.model_dump(include={"sampling", "staleness", "learner"})
    inputs = {f"{section}.{key}": value for section, keys in recipe.items() for key, value in keys.items()}
    bench = Bench("recipe", inputs={"seeds": list(seeds), "updates": config.round.max_updates, **inputs}, quick=quick)
    results = [run_seed(config, seed, bench) for seed in seeds]
    bench.check("every warm start ends between 20 and 50 %", all(0.2 <= before <= 0.5 for before, _ in results))
    bench.goal(
        "points that the worst seed rises", min(100 * (after - before) for before, after in results), at_least=20.0
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
