"""Does the demo's recipe learn? Warm start and GRPO without a network, on rollouts as stale as a swarm's.

- One process plays both sides with the real parts: `TorchEngine` samples, the task rewards, `Policy` trains.
- A version is published every kappa updates, and a batch comes from the newest that is at least `DELAY` updates old:
  with kappa = 3 it lags 2, 3 or 4 updates behind the learner, never more than S = 4.
- Costs are CPU seconds of one thread, split by side; a swarm adds its network, and shares its cores.

`python bench/recipe.py --seeds 5` runs the settings of examples/demo.toml; the other options try different ones.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, quick_from_environment
from coordinator.config import Config, load
from coordinator.learner.embedded import make_policy
from coordinator.learner.evaluate import accuracy
from coordinator.learner.policy import Policy
from coordinator.learner.settings import train_settings
from coordinator.learner.warmstart import warm_start
from coordinator.policy_text import PolicyText
from coordinator.prompts import TRAIN, Source
from protocol.learning import TrainingGroup, TrainingSample
from protocol.rollout import pack_tokens, unpack_tokens
from protocol.tasks.arithmetic import Arithmetic
from swarm_node.engine.messages import GroupDone, Request
from swarm_node.engine.torch_engine import TorchEngine

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"

DELAY = 2
"""Updates between publishing a version and training on its first rollouts: fetching, sampling and queueing."""


class Round:
    """One seed: its policy, its versions on disk, and a swarm of one."""

    def __init__(
        self, config: Config, seed: int, folder: Path, *, delay: int = DELAY, start: Path | None = None
    ) -> None:
        self._config, self._seed, self._folder, self._delay = config, seed, folder, delay
        self._task = Arithmetic(seed)
        if start is None:
            start = folder / "start"
            make_policy(start, seed=seed)
        self._policy = Policy(start, train_settings(config))
        self._text = PolicyText(lambda name: (start / name).read_bytes(), self._task, config.sampling.max_new_tokens)
        (self._end,) = self._text.bounds.end_tokens
        self._engine = TorchEngine()
        self._versions: dict[int, Path] = {}
        self.max_distance = 0.0
        """The largest mean |log π/μ| of an honest group: what a limit for dishonest ones must lie above."""

    def warm_start(self) -> None:
        warm_start(self._policy.model, self._task, self._text.encode, self._end, lambda *_: None)
        self.publish()

    def accuracy(self) -> float:
        return accuracy(self._policy.model, self._task.problems("held_out"), self._text.encode, self._end)

    def generate(self) -> list[TrainingGroup]:
        """The next batch, sampled from the version that a swarm would have by now."""
        due = max(0, self._policy.update - self._delay)
        update = max(version for version in self._versions if version <= due)
        self._engine.load(self._versions[update], update)
        size = self._config.learner.groups_per_update
        first = self._policy.update * size
        requests = {str(number): self._request(number, update) for number in range(first, first + size)}
        groups: list[GroupDone] = []
        self._engine.generate(list(requests.values()), groups.append)
        return [self._reward(group, requests[group.request_id].prompt, update) for group in groups]

    def train(self, groups: Sequence[TrainingGroup]) -> None:
        step = self._policy.train_step(groups)
        self.max_distance = max(self.max_distance, *step.distances.values())
        if self._policy.update % self._config.staleness.kappa == 0:
            self.publish()

    def publish(self) -> Path:
        """The folder of the policy as it stands, which rollouts may now come from."""
        update = self._policy.update
        self._versions[update] = self._folder / str(update)
        self._policy.save_hub(self._versions[update])
        return self._versions[update]

    def _request(self, number: int, update: int) -> Request:
        sampling = self._config.sampling
        return Request(
            request_id=str(number),
            version=update,
            prompt=pack_tokens(self._text.prompt(Source(TRAIN, number))),
            seed=self._seed << 32 | number,
            samples=sampling.samples_per_group,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
        )

    def _reward(self, group: GroupDone, prompt: bytes, update: int) -> TrainingGroup:
        samples = tuple(
            TrainingSample(
                tokens=sample.tokens,
                logprobs=sample.logprobs,
                reward=self._text.reward(
                    Source(TRAIN, int(group.request_id)), unpack_tokens(sample.tokens).tolist()
                ).score,
            )
            for sample in group.samples
        )
        return TrainingGroup(
            claim_id=f"{int(group.request_id):064x}", prompt=prompt, policy_update=update, samples=samples
        )


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
        trial = Round(config, seed, Path(folder))
        with clock.of("warm start"):
            trial.warm_start()
        before = trial.accuracy()
        for _ in range(config.round.max_updates):
            with clock.of("generation"):
                groups = trial.generate()
            with clock.of("training"):
                trial.train(groups)
        after = trial.accuracy()
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
