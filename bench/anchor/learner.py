"""The shipped learner whose updates last as long as told: it trains as ever, then sleeps for the rest.

`python -m bench.anchor.learner ROUND_FOLDER TRAIN_S`
"""

import sys
import time
from pathlib import Path

import torch

from coordinator.base import logs
from coordinator.config import Config
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.crew import Crew
from coordinator.learner.loop import Learner
from coordinator.learner.policy import UpdateResult
from coordinator.learner.ranks import Ranks
from coordinator.model.watchdog import Watchdog
from protocol.work.learning import TrainingGroup


class PacedCrew(Crew):
    """Trains, and takes its time."""

    train_s = 0.0

    def train(self, groups: tuple[TrainingGroup, ...]) -> UpdateResult:
        ends_s = time.monotonic() + self.train_s
        step = super().train(groups)
        time.sleep(max(0.0, ends_s - time.monotonic()))  # the pace is played, as on a slower device
        return step


def main() -> None:
    """Train the round to its end."""
    folder, train_s = Path(sys.argv[1]), float(sys.argv[2])
    logs.to_stderr(quiet=False)
    torch.set_num_threads(1)
    config = Config.model_validate_json((folder / "resolved.json").read_text())
    client = CoordinatorClient(f"http://{config.round.listen}", (folder / "operator.token").read_text().strip())
    ranks = Ranks(config.learner.device, Watchdog(config.learner.watchdog_s))
    crew = PacedCrew(config, ranks)
    crew.train_s = train_s
    Learner(config, client, crew).run()
    ranks.leave()


if __name__ == "__main__":
    main()
