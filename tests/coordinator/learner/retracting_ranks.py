"""A learner of two ranks, the side branch of a retraction by two more, and a run that never saw the groups.

Its arguments are a policy folder and a folder for the round. Prints the root of the branch, of that run, and of the
learner.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coordinator.config import Config
from coordinator.learner import retracting
from coordinator.learner.crew import Crew
from coordinator.learner.ranks import Ranks
from coordinator.rules.retraction import KeptState
from tests.coordinator.learner.forked_ranks import forked
from tests.coordinator.learner.test_retracting import BATCHES, OWNERS, clean, config_of


def led(work: Callable[[Config, Ranks], str], config: Config, root: Path) -> None:
    """Do some work as rank 0 and write the root that it returns, or follow as another rank."""
    ranks = Ranks()
    if ranks.first:
        root.write_text(work(config, ranks))
    elif work is retract:
        retracting.follow(config, ranks)
    else:
        Crew(config, ranks).follow()


def learn(config: Config, ranks: Ranks, change: Callable[[Any], Any] = lambda groups: groups) -> str:
    """Train on all batches, as `change` leaves them, and keep checkpoints."""
    crew = Crew(config, ranks)
    for groups in map(change, BATCHES.values()):
        crew.save(taken=0, dense=config.learner.kept_checkpoints)
        if groups:
            crew.train(groups)
        else:
            crew.pass_over()
    root = crew.rooting()()
    crew.over()
    return root


def never_see_them(config: Config, ranks: Ranks) -> str:
    return learn(config, ranks, clean)


def retract(config: Config, ranks: Ranks) -> str:
    branch = retracting.SideBranch(config, ranks, KeptState(2), OWNERS)
    while (number := branch.update + 1) in BATCHES:
        branch.train(clean(BATCHES[number]))
    root = branch.finish(config.round.directory / "result")
    branch.remove()
    return root


def main(start: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    settings = {"processes": 2, "lora_rank": 4, "lora_coverage_min": 0.0, "publish_adapters": False}
    configs = [config_of(folder / name, start, settings, {}) for name in ("round", "other")]
    for work, config in ((learn, configs[0]), (retract, configs[0]), (never_see_them, configs[1])):
        config.round.directory.mkdir(exist_ok=True)
        assert forked(2, led, work, config, folder / work.__name__) == [0, 0]
    assert (configs[0].round.directory / "result" / "model.safetensors").is_file()
    print(*((folder / work.__name__).read_text() for work in (retract, never_see_them, learn)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
