"""Does a round learn in which three nodes of ten are hostile, and come back under new keys whenever they are banned?

- The demo's recipe: its model, warm start, task and learner; the arena's leases, intake, audits and batches.
- The hostile ones forge what rewards one sample and blames all others, which say what is nearly right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from coordinator.config import Config
from coordinator.learner.embedded import make_policy
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import train_settings
from coordinator.learner.warmstart import accuracy, warm_start
from coordinator.tasks.task_text import TaskText
from protocol.tasks import Teaching, task
from protocol.work.learning import TrainingBatch
from tests.adversaries.arena import Arena, Stage, claims_of
from tests.adversaries.nodes import Node
from tests.adversaries.poisoning import Poisoner

HONEST, HOSTILE = 7, 3


class Learned(NamedTuple):
    """The result of a training."""

    before: float
    after: float
    updates: int
    hostile_groups: int
    """Forged groups that were trained on."""
    hostile_keys: int
    honest_hard_faults: int


def started(folder: Path, config: Config, *, seed: int) -> TrainedPolicy:
    """The demo's policy after its warm start."""
    make_policy(folder / "start", seed=seed)
    policy, problems = TrainedPolicy(folder / "start", train_settings(config)), task(config.task.name, seed=seed)
    text = text_of(folder / "start", config)
    assert isinstance(problems, Teaching)
    warm_start(policy.model, problems, text.encode, min(text.bounds.end_tokens), lambda *_: None)
    return policy


def text_of(folder: Path, config: Config) -> TaskText:
    return TaskText(lambda name: (folder / name).read_bytes(), task(config.task.name), config.sampling.max_new_tokens)


def stage_of(first: Path, config: Config) -> Stage:
    return Stage(
        (first,),
        first,
        samples=config.sampling.samples_per_group,
        max_new_tokens=config.sampling.max_new_tokens,
        tolerance=config.audit.tolerance,
        groups_per_update=config.learner.groups_per_update,
    )


def learn(
    folder: Path, policy: TrainedPolicy, config: Config, *, updates: int, hostile: int, say: Callable[[str], None]
) -> Learned:
    """Train for so many updates with so many hostile nodes among ten."""
    torch.set_num_threads(1)
    text, trained_on = text_of(folder / "start", config), list[str]()
    policy.writer.save_hub(folder / "0")

    def measured() -> float:
        held_out = task(config.task.name).problems("held_out")
        return accuracy(policy.model, held_out, text.encode, min(text.bounds.end_tokens))

    def train(batch: TrainingBatch) -> Path:
        policy.train_step(batch.groups)
        trained_on.extend(group.claim_id for group in batch.groups)
        target = folder / str(policy.update)
        policy.writer.save_hub(target)
        if policy.update % 10 == 0:
            say(f"update {policy.update}: {measured():.1%}")
        return target

    before = measured()
    arena = Arena(folder, stage_of(folder / "0", config), train=train)
    honest = [arena.enter(Node) for _ in range(HONEST + HOSTILE - hostile)]
    poisoners = [arena.enter(Poisoner) for _ in range(hostile)]
    arena.play(100 * updates, until=lambda: arena.update >= updates)
    arena.finish()
    forged = {claim for node in poisoners for claim in claims_of(arena, node)}
    arena.world.database.close()
    return Learned(
        before=before,
        after=measured(),
        updates=arena.update,
        hostile_groups=len(forged.intersection(trained_on)),
        hostile_keys=sum(len(node.keys) for node in poisoners),
        honest_hard_faults=sum(node.hard_faults for node in honest),
    )
