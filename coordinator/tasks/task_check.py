"""What is wrong with a task, found before a round is paid for: its problems, its prompts' lengths, and its rewards.

- Every finding has a place and a next step; an `error` would waste money, a `warning` may be meant so.
- Rewards are tried as the round would run them: in processes, within their bounds, on real problems, with completions
  that are the answer, another problem's answer, nothing, and nonsense.
- Everything is made in a folder that is thrown away.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from coordinator.config import Config
from coordinator.tasks import importing
from coordinator.tasks.chat import PLAIN_CHAT, Chat
from coordinator.tasks.import_child import prepare
from coordinator.tasks.kinds import MATH, functions_of, reward_spec
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.reward_pool import RewardPool
from coordinator.tasks.task import open_task
from coordinator.tasks.task_text import Coder
from protocol.errors import ConfigInvalid, SwarmError, VerifierDown, VerifierFailed
from protocol.tasks import Judging, Problem, Reward, Task

TRIED = 12
"""Problems on which rewards are tried, from all over the train split and the held-out one."""

PROMPTS_LOOKED_AT = 2000
SLOW_SHARE = 0.25
"""Of the time that a group may take: more is an accident that waits to happen."""

NONSENSE = "\u4e2d lorem \\frac{1}{0} <|im_end|> 42"

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class TaskIssue:
    """One thing that is wrong."""

    code: str
    severity: Severity
    place: str
    message: str
    next_step: str


async def check(config: Config, folder: Path) -> list[TaskIssue]:
    """All that is wrong, in the order in which it should be mended."""
    config = config.model_copy(update={"round": config.round.model_copy(update={"directory": folder})})
    try:
        prepare(config, anew=True)
        task = open_task(config)
    except SwarmError as error:
        return [
            TaskIssue("unreadable", "error", "[task] [data]", error.message, error.hint or "Mend it, and try again.")
        ]
    found = [*_problems(config, folder), *_lengths(config, task)]
    return found + ([] if isinstance(task, Judging) else await _Trial(config, task).findings())


def _problems(config: Config, folder: Path) -> Iterator[TaskIssue]:
    """What the copy's note says of repetition and of size."""
    if not importing.needs_data(config):
        return
    note = json.loads((folder / importing.FOLDER / importing.NOTE).read_text())
    counts, repeated = note["problems"], note["repeated"]
    if repeated:
        yield TaskIssue(
            "duplicates", "warning", "[data]",
            f"{repeated} prompts are there twice, in one split or several; each is kept once, held-out ones first.",
            "Nothing has to be done; if there should be none, look for them in the source.",
        )  # fmt: skip
    if not counts["held_out"]:
        yield TaskIssue(
            "no_held_out", "warning", "[data]", "No problem is held out, so nothing can be evaluated.",
            "Set data.eval, or give more problems.",
        )  # fmt: skip
    if counts["train"] < config.learner.groups_per_update:
        yield TaskIssue(
            "few_problems", "warning", "[data]",
            f"{counts['train']} problems to learn from are fewer than learner.groups_per_update.",
            "Each update would train on some of them twice: give more problems.",
        )  # fmt: skip


def _lengths(config: Config, task: Task) -> Iterator[TaskIssue]:
    """Prompts that leave the model no room for an answer; those of a model folder only, which has a tokenizer."""
    model = Path(config.model.path)
    if not (model / "tokenizer.json").is_file():
        return
    coder = Coder(lambda name: (model / name).read_bytes(), Chat.from_config(config.data))
    positions = int(json.loads((model / "config.json").read_text()).get("max_position_embeddings", 0))
    room = positions - config.sampling.max_new_tokens
    if isinstance(task.problem(0).prompt, str) and Chat.from_config(config.data) != PLAIN_CHAT:
        yield TaskIssue(
            "no_chat", "error", "[data]",
            "The prompts are plain text, so data.system_prompt and data.template_arguments change nothing.",
            "Set data.chat = true, or leave them out.",
        )  # fmt: skip
    for number in range(PROMPTS_LOOKED_AT if positions else 0):
        prompt = task.problem(number).prompt
        try:
            tokens = len(coder.encode(prompt))
        except ConfigInvalid as error:
            yield TaskIssue("no_template", "error", "[data]", error.message, error.hint)
            return
        if tokens > room:
            yield TaskIssue(
                "prompt_too_long", "error", f"train problem {number}: {str(prompt)[:40]!r}",
                f"{tokens} tokens are more than the {room} that an answer leaves of the model's {positions}.",
                "Leave such problems out, or lower sampling.max_new_tokens.",
            )  # fmt: skip
            return


class _Trial:
    """Rewards, as the round would run them."""

    def __init__(self, config: Config, task: Task) -> None:
        self._config, self._spec = config, reward_spec(config)
        held_out = task.problems("held_out")
        step = max(1, len(held_out) // (TRIED // 2))
        self._problems = [*held_out[: step * (TRIED // 2) : step], *map(task.problem, range(TRIED // 2))]
        self._place = ", ".join(functions_of(config))
        self._slowest_s = 0.0

    async def findings(self) -> list[TaskIssue]:
        """Judge everything twice, in fresh processes, and look at what came."""
        try:
            first, second = await self._judged(), await self._judged()
        except VerifierDown as error:
            return [self._finding("not_loadable", error.message, "Does the file import all it needs, here?")]
        except VerifierFailed as error:
            return [self._finding("verifier_error", error.message, "Such groups would be paid, and never trained on.")]
        found = []
        if first != second:
            found.append(
                self._finding("not_deterministic", "The same completions earn one thing, then another.", "Seed it.")
            )
        said = [text for number in range(len(first)) for text in self._job(number).completions]
        if not any(_teaches(reward, text) for reward, text in zip(chain.from_iterable(first), said, strict=True)):
            text = "Of all that was tried, nothing would be trained on."
            found.append(self._finding("nothing_taught", text, "Look at the weight and skip of its rewards."))
        if len({reward.score for rewards in first for reward in rewards}) == 1:
            found.append(self._constant(first[0][0].score))
        return found + self._answers(first) + self._pace()

    def _constant(self, score: float) -> TaskIssue:
        if any(problem.answer for problem in self._problems):
            return self._finding("constant", f"Whatever is said earns {score:g}.", "There is nothing to learn from it.")
        text = f"All that was tried earns {score:g}, but no problem names an answer that could have been tried."
        return self._finding("constant", text, "See by hand whether a right answer earns more.", "warning")

    async def _judged(self) -> list[list[Reward]]:
        pool = RewardPool(self._spec)
        try:
            await pool.judge(self._job(0))  # what is imported is not timed
            rewards = []
            for number in range(len(self._problems)):
                began = time.monotonic()
                rewards.append(await pool.judge(self._job(number)))
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
            return rewards
        finally:
            await pool.close()

    def _job(self, number: int) -> Job:
        """A group as large as the round's: the answer, then wrong ones."""
        problem, other = self._problems[number], self._problems[number - 1]
        wrong = (self._said(other), "", NONSENSE)
        size = self._config.sampling.samples_per_group
        said = [self._said(problem), *(wrong[each % len(wrong)] for each in range(size - 1))]
        return Job(problem, said, [[0]] * size)

    def _said(self, problem: Problem) -> str:
        boxed = self._config.task.name == MATH and "\\boxed" not in problem.answer
        return f"\\boxed{{{problem.answer.rpartition('####')[2].strip()}}}" if boxed else problem.answer

    def _answers(self, judged: list[list[Reward]]) -> list[TaskIssue]:
        """The answer must earn more than the rest, where there is one."""
        found = []
        for problem, rewards in zip(self._problems, judged, strict=True):
            if problem.answer and rewards[0].score < max(reward.score for reward in rewards):
                found.append(f"{str(problem.prompt)[:40]!r} (answer {problem.answer[:40]!r})")
        if not found:
            return []
        text = (
            f"The answer earns less than nonsense does in {len(found)} of {len(self._problems)} problems: {found[0]}."
        )
        return [self._finding("answer_earns_less", text, "Is the right column the answer, and in the reward's form?")]

    def _pace(self) -> list[TaskIssue]:
        if self._slowest_s < SLOW_SHARE * self._spec.timeout_s:
            return []
        text = f"A group takes {self._slowest_s:.1f} s of the {self._spec.timeout_s:g} s after which it is given up."
        return [self._finding("slow", text, "Raise reward.timeout_s and reward.processes.", "warning")]

    def _finding(self, code: str, message: str, next_step: str, severity: Severity = "error") -> TaskIssue:
        return TaskIssue(code, severity, self._place, message, next_step)


def _teaches(reward: Reward, text: str) -> bool:
    """Whether anything that was said here is trained on."""
    skipped = {place for start, end in reward.skip for place in range(start, end)}
    return reward.weight > 0 and len(skipped) < len(text)
