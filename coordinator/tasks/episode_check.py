"""A check of an environment before a round is paid for: a scripted policy plays three problems, twice.

- The samples of a group say the answer at each turn (or `yes`), nothing, `1`, and nonsense.
- What they read and earn must be the same again in a fresh process: after a crash, episodes are played again.
- The first sample of each problem is shown as it was played: what was read, what was said, and how many tokens that is.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.config import Config
from coordinator.environments.host import TurnQuestion
from coordinator.environments.interface import Observation
from coordinator.tasks.chat import Chat
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.task_text import Coder, ReadFile
from protocol.errors import VerifierDown, VerifierFailed
from protocol.tasks import ROLES, Problem, Reward, Task
from protocol.work.rollout import unpack_tokens

PLAYED = 3
"""Problems that are played."""

NONSENSE = "\u4e2d lorem <|im_end|> 42"
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
    episodes = [ScriptedEpisode(say) for say in (problem.answer or "yes", "", "1", NONSENSE)]
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
