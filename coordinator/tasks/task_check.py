"""A check of a task before a round is paid for: its problems, the lengths of its prompts, and its rewards.

- Every issue has a place and a next step; an `error` would waste money, a `warning` may be intended.
- Rewards are tested as the round would run them: in processes, within their limits, on real problems, with completions
  that are the answer, another problem's answer, an empty text, and nonsense.
- Environments are tested by a scripted policy, which plays three problems twice. The samples of a group say the answer
  at each turn (or `yes`), nothing, `1`, and nonsense. What they read and earn must be the same again in a fresh
  process: after a crash, episodes are played again.
- The first sample of each problem is shown as it was played: what was read, what was said, and how many tokens that is.
- All files are written to a temporary folder.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from coordinator.config import Config
from coordinator.environments.host import TurnQuestion
from coordinator.environments.interface import Observation
from coordinator.tasks import importing, kinds, sandbox
from coordinator.tasks.chat import PLAIN_CHAT, Chat
from coordinator.tasks.import_child import prepare
from coordinator.tasks.kinds import MATH, functions_of, process_spec
from coordinator.tasks.prompt_room import prompt_too_long
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.task import open_task
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.task_text import Coder, ReadFile
from protocol.errors import ConfigInvalid, SwarmError, VerifierDown, VerifierFailed
from protocol.tasks import ROLES, Judging, Problem, Reward, Task
from protocol.text.plain import one_line
from protocol.work.rollout import unpack_tokens

PLAYED = 3
"""Problems that are played."""

SAID_NONSENSE = "\u4e2d lorem <|im_end|> 42"
SHOWN_MAX_CHARS = 160

Severity = Literal["error", "warning"]


@dataclass
class ScriptedEpisode:
    """A sample's turns, what it read after each, and its reward."""

    say: str
    turns: list[str] = field(default_factory=list)
    read: list[Observation | None] = field(default_factory=list)
    reward: Reward | None = None


@dataclass(frozen=True)
class EpisodeFindings:
    """The result of the check: what was found, if anything, and the transcripts."""

    code: str = ""
    message: str = ""
    next_step: str = ""
    transcripts: tuple[str, ...] = ()
    severity: Severity = "error"


async def check_episodes(
    config: Config, spec: TaskProcessSpec, task: Task, read_file: ReadFile | None = None
) -> EpisodeFindings:
    """Play the first problems twice, and return what was found."""
    problems = [task.problem(number) for number in range(PLAYED)]
    try:
        first = [await _played(spec, config.episode.turns_max, problem) for problem in problems]
        second = [await _played(spec, config.episode.turns_max, problem) for problem in problems]
    except VerifierDown as error:
        return EpisodeFindings(
            "not_loadable", error.message, error.hint or "Check that the file can import all its modules here."
        )
    except VerifierFailed as error:
        return EpisodeFindings(
            "environment_failed", error.detail, "Fix the environment: such groups would be paid, and not trained on."
        )
    shown = tuple(map(_shower(config, read_file), problems, first))
    if first != second:
        text = "The same turns are answered or rewarded differently when an episode is played again."
        return EpisodeFindings("not_deterministic", text, "Take all chance from the problem, such as a seed.", shown)
    played = [episode for episodes in first for episode in episodes]
    if role := unknown_role([message["role"] for message in _messages(played)]):
        return EpisodeFindings("unknown_role", *role, shown, "warning")
    if len(scores := {episode.reward.score for episode in played if episode.reward}) == 1:
        text = f"All {len(played)} episodes of the scripted policy earn {scores.pop():g}."
        check = "Check by hand that one that is played well earns more: the policy learns nothing from equal rewards."
        return EpisodeFindings("constant", text, check, shown, "warning")
    return EpisodeFindings(transcripts=shown)


def unknown_role(roles: Iterable[str]) -> tuple[str, str] | None:
    """Return the message and the next step about a role that chat templates hardly know; None if there is none."""
    for role in roles:
        if role not in ROLES:
            return (
                f"A message has the role {role!r}.",
                f"Use one of {', '.join(ROLES)}, if the chat template has no other.",
            )
    return None


def _messages(episodes: Iterable[ScriptedEpisode]) -> Iterator[Any]:
    """Yield the messages that the policy reads after its turns."""
    for episode in episodes:
        for read in episode.read:
            yield from read if isinstance(read, list) else ()


async def _played(spec: TaskProcessSpec, turns_max: int, problem: Problem) -> list[ScriptedEpisode]:
    """Play one problem in a fresh process."""
    episodes = [ScriptedEpisode(say) for say in (problem.answer or "yes", "", "1", SAID_NONSENSE)]
    pool = TaskPool(spec)
    try:
        for number in range(1, turns_max + 1):
            for episode in episodes:
                if episode.reward is None:
                    episode.turns.append(episode.say)
            running = [None if episode.reward else episode.turns for episode in episodes]
            if not any(running):
                break
            asked = TurnQuestion("check", problem, running, [number == turns_max] * len(episodes))
            for episode, answer in zip(episodes, await pool.play(asked), strict=True):
                if answer is not None:
                    episode.read += answer.read
                    episode.reward = answer.reward
    finally:
        await pool.close()
    return episodes


def _shower(config: Config, read_file: ReadFile | None) -> Callable[[Problem, list[ScriptedEpisode]], str]:
    """Return the function that shows a transcript, with numbers of tokens if the model's tokenizer is at hand."""
    if read_file is None:
        return lambda problem, episodes: _shown(problem, episodes[0], None, frozenset())
    coder = Coder(read_file, Chat.from_config(config.data))
    named = json.loads(read_file("config.json")).get("eos_token_id")
    ends = frozenset(named if isinstance(named, list) else [named] if named is not None else [])
    return lambda problem, episodes: _shown(problem, episodes[0], coder, ends)


def _shown(problem: Problem, episode: ScriptedEpisode, coder: Coder | None, ends: frozenset[int]) -> str:
    asked = problem.prompt if isinstance(problem.prompt, str) else [message._asdict() for message in problem.prompt]
    opening = coder.encode(problem.prompt, problem.columns.get("tools") or ()) if coder else None
    lines = [_line("reads", asked, opening)]
    for turn, read in zip(episode.turns, episode.read, strict=True):
        said = [*coder.codec.encode(turn), *sorted(ends)[:1]] if coder else None
        lines.append(_line("policy", turn, said))
        if read is not None:
            lines.append(_line("reads", read, _tokens(coder, problem, read, said or [0], ends) if coder else None))
    assert episode.reward is not None
    parts = "".join(f", {name} {value:g}" for name, value in episode.reward.components.items())
    return "\n".join([*lines, f"  reward  {episode.reward.score:g}{parts}"])


def _tokens(
    coder: Coder, problem: Problem, read: Observation, turn: Sequence[int], ends: frozenset[int]
) -> Sequence[int]:
    return [*map(int, unpack_tokens(coder.observed(problem, read, turn, ends)))]


def _line(who: str, said: Any, tokens: Sequence[int] | None) -> str:
    """Show a piece of a transcript: only what the policy says is sampled, paid and trained on."""
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    short = text if len(text) <= SHOWN_MAX_CHARS else f"{text[:SHOWN_MAX_CHARS]}…"
    count = "" if tokens is None else f"{len(tokens):5} {'sampled' if who == 'policy' else 'given'} tokens  "
    return f"  {who:7} {count}{short!r}"


TRIED = 12
"""The number of problems on which rewards are tested, from the train split and the held-out one."""

SLOW_SHARE = 0.25
"""The share of the time limit that a group may take; above it, timeouts are likely."""

PRINTED_LINES = 10
"""The number of printed lines that are shown."""

NONSENSE = "\u4e2d lorem \\frac{1}{0} <|im_end|> 42"


@dataclass(frozen=True)
class TaskIssue:
    """A problem of the task."""

    code: str
    severity: Severity
    place: str
    message: str
    next_step: str


async def check(
    config: Config, folder: Path, read_file: ReadFile | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[TaskIssue]:
    """Return all issues, in the order in which to fix them; `tell` gets the transcripts of an environment.

    `read_file` reads the policy's tokenizer; None if it is not on this machine.
    """
    round_folder = config.round.directory
    config = config.model_copy(update={"round": config.round.model_copy(update={"directory": folder})})
    try:
        prepare(config, anew=True)
        task = open_task(config)
    except SwarmError as error:
        return [
            TaskIssue("unreadable", "error", "[task] [data]", error.message, error.hint or "Fix it, and try again.")
        ]
    issues = [*_problems(config, folder), *(_lengths(config, task, read_file) if read_file else ())]
    if kinds.environment_of(config):
        return issues + await _episodes(config, task, round_folder, read_file, tell)
    return issues + ([] if isinstance(task, Judging) else await _Trial(config, task, round_folder, tell).findings())


async def _episodes(
    config: Config, task: Task, round_folder: Path, read_file: ReadFile | None, tell: Callable[[str], None]
) -> list[TaskIssue]:
    """Play episodes, and return the issues."""
    findings = await check_episodes(config, process_spec(config, round_folder), task, read_file)
    for number, transcript in enumerate(findings.transcripts):
        tell(f"problem {number}\n{transcript}")
    if not findings.code:
        return []
    return [TaskIssue(findings.code, findings.severity, config.task.name, findings.message, findings.next_step)]


def _problems(config: Config, folder: Path) -> Iterator[TaskIssue]:
    """Yield issues about repeated prompts and the number of problems, from the copy's note."""
    if not importing.needs_data(config):
        return
    note = json.loads((folder / kinds.FOLDER / kinds.NOTE).read_text())
    counts, repeated = note["problems"], note["repeated"]
    if repeated:
        yield TaskIssue(
            "duplicates", "warning", "[data]",
            f"{repeated} prompts are repeated, in one split or several; each is kept once, held-out ones first.",
            "You need to do nothing. If you expected none, check the source.",
        )  # fmt: skip
    if not counts["held_out"]:
        yield TaskIssue(
            "no_held_out", "warning", "[data]", "No problem is held out, so nothing can be evaluated.",
            "Set data.eval, or add problems.",
        )  # fmt: skip
    if counts["train"] < config.learner.groups_per_update:
        yield TaskIssue(
            "few_problems", "warning", "[data]",
            f"The {counts['train']} train problems are fewer than learner.groups_per_update.",
            "Each update would train on some of them twice: add problems.",
        )  # fmt: skip


def _lengths(config: Config, task: Task, read_file: ReadFile) -> Iterator[TaskIssue]:
    """Yield issues about prompts in the policy's tokens: their form, their tools, and the room for an answer."""
    coder = Coder(read_file, Chat.from_config(config.data))
    first = task.problem(0)
    if isinstance(first.prompt, str) and Chat.from_config(config.data) != PLAIN_CHAT:
        yield TaskIssue(
            "no_chat", "error", "[data]",
            "The prompts are plain text, so data.system_prompt and data.template_arguments have no effect.",
            "Set data.chat = true, or remove these settings.",
        )  # fmt: skip
    elif not isinstance(first.prompt, str) and (role := unknown_role(message.role for message in first.prompt)):
        yield TaskIssue("unknown_role", "warning", "[data]", *role)
    try:
        tools = first.columns.get("tools")
        if (
            tools
            and not isinstance(first.prompt, str)
            and coder.encode(first.prompt, tools) == coder.encode(first.prompt)
        ):
            yield TaskIssue(
                "tools_unseen", "warning", "[model]", "The model's chat template does not show tools to the model.",
                "Describe them in data.system_prompt, or use a model that was trained to call tools.",
            )  # fmt: skip
        long = prompt_too_long(config, task, read_file)
    except ConfigInvalid as error:
        yield TaskIssue("no_template", "error", "[data]", error.message, error.hint)
        return
    if long:
        yield TaskIssue("prompt_too_long", "error", *long)


class _Trial:
    """A test of the rewards, as the round would run them."""

    def __init__(self, config: Config, task: Task, round_folder: Path, tell: Callable[[str], None]) -> None:
        self._config, self._spec, self._tell = config, process_spec(config, round_folder), tell
        held_out = task.problems("held_out")
        step = max(1, len(held_out) // (TRIED // 2))
        self._problems = [*held_out[: step * (TRIED // 2) : step], *map(task.problem, range(TRIED // 2))]
        self._place = ", ".join(functions_of(config))
        self._slowest_s = 0.0
        self._printed = ""
        self._gaps: set[str] = set()

    async def findings(self) -> list[TaskIssue]:
        """Judge all completions twice, in fresh processes, and return the issues."""
        try:
            first, second = await self._judged(), await self._judged()
            self._tell_rewards(first)
        except VerifierDown as error:
            return [
                self._finding(
                    "not_loadable",
                    error.message,
                    error.hint or "Check that the file can import all its modules on this machine.",
                )
            ]
        except VerifierFailed as error:
            return [
                self._finding(
                    "verifier_error", error.detail, "Fix the reward: such groups would be paid, and not trained on."
                )
            ]
        issues = []
        if first != second:
            issues.append(
                self._finding("not_deterministic", "The same completions earn different rewards.", "Use a fixed seed.")
            )
        said = [text for number in range(len(first)) for text in self._job(number).completions]
        if not any(_teaches(reward, text) for reward, text in zip(chain.from_iterable(first), said, strict=True)):
            text = "None of the completions tried would be trained on."
            issues.append(self._finding("nothing_taught", text, "Check the weight and skip of its rewards."))
        if len({reward.score for rewards in first for reward in rewards}) == 1:
            issues.append(self._constant(first[0][0].score))
        return issues + self._answers(first) + self._pace() + self._sandbox()

    def _constant(self, score: float) -> TaskIssue:
        if any(problem.answer for problem in self._problems):
            step = "Fix the reward: the policy learns nothing."
            if not all(isinstance(problem.prompt, str) for problem in self._problems):
                step += (
                    " With chat prompts, each of TRL's `completions` is a list of messages: completion[0]['content']."
                )
            return self._finding("constant", f"All completions earn {score:g}.", step)
        text = f"All completions tried earn {score:g}, but no problem has an answer that could be tried."
        return self._finding("constant", text, "Check by hand that a right answer earns more.", "warning")

    async def _judged(self) -> list[list[Reward]]:
        pool = TaskPool(self._spec)
        try:
            await pool.judge(self._job(0))  # imports are not timed
            rewards = []
            for number in range(len(self._problems)):
                began = time.monotonic()
                rewards.append(await pool.judge(self._job(number)))
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
            return rewards
        finally:
            self._gaps |= pool.gaps
            self._printed = pool.printed
            await pool.close()

    def _tell_rewards(self, judged: list[list[Reward]]) -> None:
        """Print what answers and other completions earn, and what the functions printed last."""
        others = [reward.score for rewards in judged for reward in rewards[1:]]
        answers = [rewards[0].score for problem, rewards in zip(self._problems, judged, strict=True) if problem.answer]
        if answers:
            self._tell(f"Answers earn {_range(answers)}; wrong, empty and random completions earn {_range(others)}.")
        if self._printed:
            lines = "\n".join(f"  | {one_line(line)}" for line in self._printed.splitlines()[-PRINTED_LINES:])
            self._tell(f"The functions printed, last:\n{lines}")

    def _job(self, number: int) -> Job:
        """Return a group as large as the round's: the answer, then wrong ones."""
        problem, other = self._problems[number], self._problems[number - 1]
        wrong = (self._right_answer(other), "", NONSENSE)
        size = self._config.sampling.samples_per_group
        said = [self._right_answer(problem), *(wrong[each % len(wrong)] for each in range(size - 1))]
        return Job(problem, said, [[0]] * size)

    def _right_answer(self, problem: Problem) -> str:
        boxed = self._config.task.name == MATH and "\\boxed" not in problem.answer
        return f"\\boxed{{{problem.answer.rpartition('####')[2].strip()}}}" if boxed else problem.answer

    def _answers(self, judged: list[list[Reward]]) -> list[TaskIssue]:
        """Return an issue if the answer of a problem earns less than a wrong one."""
        examples = []
        for problem, rewards in zip(self._problems, judged, strict=True):
            if problem.answer and rewards[0].score < max(reward.score for reward in rewards):
                examples.append(f"{str(problem.prompt)[:40]!r} (answer {problem.answer[:40]!r})")
        if not examples:
            return []
        count = f"{len(examples)} of {len(self._problems)} problems"
        text = f"The answer earns less than nonsense does in {count}: {examples[0]}."
        return [self._finding("answer_earns_less", text, "Check data.columns, and the answer's format for the reward.")]

    def _pace(self) -> list[TaskIssue]:
        if self._slowest_s < SLOW_SHARE * self._spec.timeout_s:
            return []
        text = f"A group takes {self._slowest_s:.1f} s; the limit is {self._spec.timeout_s:g} s."
        return [self._finding("slow", text, "Raise reward.timeout_s and reward.processes.", "warning")]

    def _sandbox(self) -> list[TaskIssue]:
        gaps = [sandbox.GAPS[name] for name in sorted(self._gaps)]
        return [self._finding("sandbox", gap.message, gap.next_step, "warning") for gap in gaps]

    def _finding(self, code: str, message: str, next_step: str, severity: Severity = "error") -> TaskIssue:
        return TaskIssue(code, severity, self._place, message, next_step)


def _range(scores: list[float]) -> str:
    low, high = min(scores), max(scores)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _teaches(reward: Reward, text: str) -> bool:
    """Return True if any part of the completion is trained on."""
    skipped = {place for start, end in reward.skip for place in range(start, end)}
    return reward.weight > 0 and len(skipped) < len(text)
