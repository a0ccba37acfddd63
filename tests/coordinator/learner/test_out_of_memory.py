"""A card without room for an update: the log says which settings need less, before the process ends."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.config import Config
from coordinator.learner.crew import Crew
from coordinator.learner.ranks import Ranks


class FullCard:
    """A policy for whose updates the card has no room."""

    def train_step(self, _groups: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_full_card_is_logged_with_the_settings_that_need_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"round": {"directory": tmp_path}, "learner": {"micro_batch_tokens": 4096}})
    crew: Any = Crew(config, Ranks())
    crew.policy = FullCard()
    with pytest.raises(torch.OutOfMemoryError):
        crew.train(())
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "'train'" in line
    assert "learner.micro_batch_tokens (now 4096)" in line
