"""One turn of a group: the question to its environment, and the tokens to insert by its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.config.task import EpisodeSection
from coordinator.environments.host import TurnQuestion
from coordinator.tasks.task_pool import EpisodeAnswer
from coordinator.tasks.task_text import TaskText
from coordinator.transactions.scoring import PlayedEpisode, Unscored
from protocol.errors import VerifierFailed
from protocol.tasks import Problem, Reward
from protocol.work.lease import Prefix

OVER = Prefix(tokens=b"", finish="stop")


@dataclass
class GroupPlay:
    """The answers of an environment to the last turns of a group's samples.

    - An episode ends (`stop`) when its environment says so. It is cut (`length`) after `turns_max` turns, or where what
      the policy reads next would leave no room for a turn.
    - If an episode was played again from its first turn, its environment must say the same as before, to the token.
    """

    waiting: Unscored
    problem: Problem
    text: TaskText
    limits: EpisodeSection
    cut: set[int] = field(default_factory=set)
    """Samples whose environment's answer leaves no room for a turn, and whose rewards are not known yet."""

    def __post_init__(self) -> None:
        self._answer: list[Prefix] = [OVER] * len(self.waiting.episodes)
        self._rewards: list[Reward | None] = [None] * len(self.waiting.episodes)

    def asked(self, *, cut: bool = False) -> TurnQuestion:
        """Return the question about all samples, or only for the rewards of those that were cut."""
        turns = [
            None
            if episode is None or (cut and number not in self.cut)
            else [self.text.judged_text(turn) for turn in episode.turns]
            for number, episode in enumerate(self.waiting.episodes)
        ]
        over = [cut or (episode is not None and self._is_full(episode)) for episode in self.waiting.episodes]
        return TurnQuestion(str(self.waiting.group_no), self.problem, turns, over)

    def record(self, answers: Sequence[EpisodeAnswer | None]) -> None:
        """Record the answers to the question."""
        for number, (episode, answer) in enumerate(zip(self.waiting.episodes, answers, strict=True)):
            if episode is not None and answer is not None:
                self._record_answer(number, episode, answer)

    def results(self) -> tuple[list[Prefix], list[Reward | None]]:
        """Return the tokens to insert after each sample's turn, and the rewards of the episodes that have ended."""
        return self._answer, self._rewards

    def _record_answer(self, number: int, episode: PlayedEpisode, answer: EpisodeAnswer) -> None:
        first = len(episode.turns) - len(answer.read)
        read = [
            b"" if said is None else self.text.observed(self.problem, said, turn, self.text.bounds.end_tokens)
            for said, turn in zip(answer.read, episode.turns[first:], strict=True)
        ]
        if tuple(read[:-1]) != episode.read[first:]:
            raise VerifierFailed("The environment answered something else when its episode was played again.")
        if answer.reward is not None:
            self.cut.discard(number)
            ended = bool(answer.read) and answer.read[-1] is None
            self._answer[number] = Prefix(tokens=b"", finish="stop" if ended else "length")
            self._rewards[number] = answer.reward
        elif episode.length + len(read[-1]) // 4 >= self.text.bounds.max_new_tokens:
            self.cut.add(number)
        else:
            self._answer[number] = Prefix(tokens=read[-1], finish="")

    def _is_full(self, episode: PlayedEpisode) -> bool:
        """Return True if no turn can follow the last one."""
        return len(episode.turns) >= self.limits.turns_max or episode.length >= self.text.bounds.max_new_tokens
