"""The episodes of several groups, played turn by turn with an engine and an environment in this process.

- A *player* says what a policy is to imitate, before its rewards teach it to play better.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count

from coordinator.config import Config
from coordinator.environments.host import EpisodeHost, TurnQuestion
from coordinator.learner.warmstart import FIRST_DEMONSTRATION, NOT_JUDGED, Lesson
from coordinator.rules.prompt_refs import PromptRef
from coordinator.tasks import reward_functions
from coordinator.tasks.group_play import GroupPlay
from coordinator.tasks.kinds import environment_of
from coordinator.tasks.task_pool import EpisodeAnswer
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from coordinator.transactions.scoring import Unscored
from coordinator.transactions.turns import AcceptedTurn, whole_samples
from protocol.ids import NodeId
from protocol.tasks import Problem, Reward, Task
from protocol.work.learning import TrainingSample
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest

Player = Callable[[int, Problem, Sequence[str]], str]
"""Returns the next turn in an episode, by the episode's number, its problem and the texts that were read so far."""

Sample = Callable[[Sequence[SampleRequest]], list[GroupDone]]
"""Samples the requests, and returns the groups in their order."""


class EpisodePlayer:
    """The environment of a round, for groups that are sampled here."""

    def __init__(self, config: Config, text: TaskText) -> None:
        environment = environment_of(config)
        assert environment is not None
        self._limits, self._text = config.episode, text
        self._make, self._parameters = reward_functions.load_callable(environment[0]), environment[1]

    def play(self, requests: dict[PromptRef, SampleRequest], sample: Sample) -> dict[PromptRef, list[AcceptedTurn]]:
        """Play the episodes of each request's samples to their ends; return their turns."""
        played: dict[PromptRef, list[AcceptedTurn]] = {source: [] for source in requests}
        left = {
            source: request.model_copy(update={"turn_tokens_max": self._limits.turn_tokens_max})
            for source, request in requests.items()
        }
        with closing(EpisodeHost(self._make, self._parameters)) as host:
            while left:
                for source, done in zip(list(left), sample(list(left.values())), strict=True):
                    turn = self._turn(host, source, left[source], done, played[source])
                    played[source].append(turn)
                    if all(prefix.finish for prefix in turn.answer):
                        del left[source]
                    else:
                        left[source] = left[source].model_copy(update={"prefixes": turn.prefixes})
        return played

    def lessons(self, task: Task, player: Player, end: int) -> Iterator[Lesson]:
        """Yield episodes of a player, without end; only the player's turns are to be said."""
        with closing(EpisodeHost(self._make, self._parameters)) as host:
            for number in count(FIRST_DEMONSTRATION):
                yield self._lesson(host, task.problem(number), partial(player, number), end)

    def _lesson(
        self, host: EpisodeHost, problem: Problem, player: Callable[[Problem, Sequence[str]], str], end: int
    ) -> Lesson:
        tokens = self._text.encode(problem.prompt, problem.columns.get("tools") or ())
        judged, turns, read = [False] * len(tokens), list[str](), list[str]()
        while True:
            turns.append(player(problem, read))
            said = [*self._text.codec.encode(turns[-1]), end]
            tokens, judged = tokens + said, judged + [True] * len(said)
            last = len(turns) == self._limits.turns_max
            (reply,) = host.play(TurnQuestion("lesson", problem, [turns], [last]))
            if reply is None or reply.earned is not None or (observation := reply.read[-1]) is None:
                break
            read.append(observation if isinstance(observation, str) else observation[-1]["content"])
            packed = self._text.observed(problem, observation, said, self._text.bounds.end_tokens)
            then = [int(token) for token in unpack_tokens(packed)]
            tokens, judged = tokens + then, judged + [False] * len(then)
        return tokens[:-1], [token if mine else NOT_JUDGED for token, mine in zip(tokens[1:], judged[1:], strict=True)]

    def _turn(
        self,
        host: EpisodeHost,
        source: PromptRef,
        request: SampleRequest,
        done: GroupDone,
        before: Sequence[AcceptedTurn],
    ) -> AcceptedTurn:
        """Return a turn of a group, with what the environment answers to it."""
        lease = Lease(
            lease_id="0" * 32,
            version=max(1, request.version),
            seed=request.seed,
            samples=request.samples,
            prompt=request.prompt,
            price_micros_per_mtok=0,
            expires_ms=0,
            prefixes=request.prefixes,
            turn_tokens_max=request.turn_tokens_max,
        )
        turn = AcceptedTurn("", NodeId(""), lease, done.samples, (), [None] * request.samples)
        waiting = Unscored("", source.number, source, episodes=scoring.episodes([*before, turn]))
        play = GroupPlay(waiting, self._text.problem(source), self._text, self._limits)
        play.record(_ask(host, play.asked()))
        if play.cut:
            play.record(_ask(host, play.asked(cut=True)))
        answer, rewards = play.results()
        return replace(turn, answer=tuple(answer), rewards=rewards)


def _ask(host: EpisodeHost, asked: TurnQuestion) -> list[EpisodeAnswer | None]:
    return [
        None
        if said is None
        else EpisodeAnswer(said.read, None if said.earned is None else reward_functions.earned(said.earned))
        for said in host.play(asked)
    ]


def rewards_of(played: Sequence[AcceptedTurn]) -> list[Reward]:
    """Return the reward of each sample's episode."""
    return [
        next(reward for reward in known if reward is not None)
        for known in zip(*(turn.rewards for turn in played), strict=True)
    ]


def samples_of(played: Sequence[AcceptedTurn]) -> tuple[TrainingSample, ...]:
    """Return the samples of a group as the learner reads them."""
    return tuple(
        TrainingSample(tokens=tokens, logprobs=logprobs, reward=reward.score, sampled=sampled)
        for (tokens, logprobs, sampled), reward in zip(whole_samples(played), rewards_of(played), strict=True)
    )
