"""Train one cell of a subject, from the start that all cells of its seed share.

- A start is made once and kept beside the record: it is whole when it has its name.
"""

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from bench.learning.cells import OBJECTIVES, Cell
from bench.learning.subjects import EXAMPLES, Subject
from bench.learning.trial import Trial
from coordinator.config import Config, load
from coordinator.learner import playing
from coordinator.learner.embedded import make_policy


def settings(subject: Subject, cell: Cell, *, folder: Path = Path("round"), model: Path | None = None) -> Config:
    """The round that a cell is: a version with every update, and every batch exactly S updates old."""
    fixed = [
        f"staleness.max_updates={cell.staleness}",
        "staleness.publish_every=1",
        f"round.max_updates={cell.updates}",
        f"round.seed={cell.seed}",
        f"round.directory={folder}",
    ]
    if model is not None:
        fixed.append(f"model.path={model}")
    return load(EXAMPLES / subject.example, [*subject.settings, *fixed, *OBJECTIVES[cell.objective]])


def start_of(subject: Subject, seed: int, starts: Path) -> Path:
    """The folder of the policy that a seed begins with."""
    kept = starts / f"{subject.name}-{seed}"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory() as scratch:
        raw, first = Path(scratch) / "raw", Cell(subject.name, 0, "corrected", seed, 1)
        config = settings(subject, first, folder=Path(scratch) / "round", model=raw)
        game = playing.game_of(config)
        words = game.words if game else subject.words
        make_policy(raw, seed=seed, shape=subject.shape, words=words)
        if subject.template:
            (raw / "chat_template.jinja").write_text(subject.template)
        trial = Trial(config, delay=0)
        subject.begin(trial)
        starts.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=starts))
        shutil.copytree(trial.publish(), draft, dirs_exist_ok=True)
    draft.rename(kept)
    return kept


def play(subject: Subject, cell: Cell, start: Path) -> Cell:
    """Train, and measure on the way."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(settings(subject, cell, folder=Path(scratch) / "round", model=start), delay=cell.staleness)
        trial.publish()
        curve, rewards = [(0, subject.measure(trial))], []
        while trial.update < cell.updates:
            groups = trial.generate()
            rewards.append(fmean(sample.reward for group in groups for sample in group.samples))
            trial.train(groups)
            if trial.update % subject.every == 0 or trial.update == cell.updates:
                curve.append((trial.update, subject.measure(trial)))
    return replace(cell, curve=tuple(curve), rewards=tuple(rewards), cpu_s=time.process_time() - began)
