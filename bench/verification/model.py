"""The policies of the bench: a small model that learns to write worksheets, and versions of it one GRPO update apart.

- A worksheet begins with a sum of the arithmetic task. The completion answers it as the careless teacher does, and goes
  on with further sums: up to forty tokens, half of them free to choose, so that there is something to verify.
- GRPO then rewards a right first answer. Each update is saved as a version.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from bench.verification.sampler import Group, sample
from coordinator.learner.embedded import EmbeddedShape, make_policy
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.warmstart import answered, imitate
from coordinator.tasks.task_text import TaskText
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import Completion, pack_logprobs, pack_tokens

SHAPE = EmbeddedShape(hidden=256, layers=5, heads=4, intermediate=1024)
"""5.3 million parameters."""

MAX_NEW_TOKENS = 40
SHEETS_PER_STEP = 32
LEARNING_RATE = 2e-3
RAMP_STEPS = 20

TASK = Arithmetic(seed=4)


class Text:
    """Sheets as tokens."""

    def __init__(self, folder: Path) -> None:
        self._text = TaskText(lambda name: (folder / name).read_bytes(), TASK, MAX_NEW_TOKENS)
        self.encode = self._text.encode
        self.bounds = self._text.bounds
        (self.end,) = self.bounds.end_tokens

    def prompt(self, number: int) -> list[int]:
        return self.encode(TASK.problem(number).prompt)

    def reward(self, number: int, completion: Completion) -> float:
        """Return 1 if the first answer of a sheet is right, else 0."""
        right = self.encode(TASK.problem(number).answer + "\n")
        return float(completion.tokens[: len(right)].tolist() == right)


def sheet(number: int) -> Problem:
    """A prompt, and three to five sums and answers that the teacher writes down to it."""
    sums = [TASK.demonstration(6 * number + place) for place in range(3 + number % 3)]
    return Problem(
        sums[0].prompt, "\n".join([sums[0].answer, *(f"{problem.prompt}{problem.answer}" for problem in sums[1:])])
    )


def train(folder: Path, *, seed: int, steps: int, shape: EmbeddedShape) -> Path:
    """A policy that writes sheets."""
    made, start = folder / "untrained", folder / "start"
    if start.exists():
        return start
    make_policy(made, seed=seed, shape=shape)
    policy = TrainedPolicy(made, TrainSettings(LEARNING_RATE))
    said = Text(made)
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, (steps - step) / (steps / 2))
        first = 2**30 + step * SHEETS_PER_STEP
        sheets = [sheet(number) for number in range(first, first + SHEETS_PER_STEP)]
        imitate(policy.model, optimizer, answered(sheets, said.encode, said.end))
    policy.writer.save_hub(start)
    return start


def versions(start: Path, folder: Path, *, learning_rate: float, updates: int, keep: int) -> list[Path]:
    """The last versions of a GRPO run, the oldest first; one update lies between neighbours."""
    kept = [folder / str(update) for update in range(updates - keep + 1, updates + 1)]
    if all(path.exists() for path in kept):
        return kept
    policy, text = TrainedPolicy(start, TrainSettings(learning_rate)), Text(start)
    for update in range(1, updates + 1):
        policy.train_step(_batch(policy, text, range(update * 8, update * 8 + 8)))
        if folder / str(update) in kept:
            policy.writer.save_hub(folder / str(update))
    return kept


def _batch(policy: TrainedPolicy, text: Text, numbers: Sequence[int]) -> list[TrainingGroup]:
    groups = [Group(number, text.prompt(number), seed=2**40 + number, samples=8) for number in numbers]
    return [
        TrainingGroup(
            claim_id=f"{group.number:064x}",
            prompt=pack_tokens(group.prompt),
            policy_update=policy.update,
            samples=tuple(
                TrainingSample(
                    tokens=pack_tokens(said.tokens),
                    logprobs=pack_logprobs(said.logprobs),
                    reward=text.reward(group.number, said),
                )
                for said in completions
            ),
        )
        for group, completions in zip(groups, sample(policy.model, groups, text.bounds), strict=True)
    ]
