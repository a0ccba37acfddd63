"""A round in one process: the real learner, engine, task and rewards, without a network and without a clock.

- `Crew` trains as it does in a round, `TorchEngine` samples. Games are played turn by turn, and rewards of shipped
  tasks are called, as a task process does it.
- A version is published every kappa updates; a batch comes from the newest one that is at least `delay` updates old.
- Problems come in the order in which a round leases them, by its `[selection]`.
- Versions that no batch can come from any more are removed.
"""

import shutil
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from bench.learning.playing import EpisodePlayer, Player, rewards_of, samples_of
from bench.learning.prompts import Prompts
from coordinator.config import Config
from coordinator.learner import playing
from coordinator.learner.crew import Crew
from coordinator.learner.policy import UpdateResult
from coordinator.learner.ranks import Ranks
from coordinator.learner.warmstart import accuracy
from coordinator.rules.prompt_refs import PromptRef
from coordinator.tasks import reward_functions
from coordinator.tasks.importing import make_copy, needs_data
from coordinator.tasks.kinds import FOLDER, environment_of, functions_of
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.task import open_task
from coordinator.tasks.task_text import TaskText
from coordinator.transactions.leases import rules_of
from coordinator.transactions.turns import AcceptedTurn
from protocol.tasks import Problem, Reward
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine


class Trial:
    """A round, and a swarm of one."""

    def __init__(self, config: Config, *, delay: int) -> None:
        self._config, self._delay = config, delay
        folder = config.round.directory
        if needs_data(config):
            make_copy(config, folder / FOLDER)
        self.task = open_task(config)
        self.crew = Crew(config, Ranks())
        start = folder / "learner" / "start"
        self.text = TaskText(lambda name: (start / name).read_bytes(), self.task, config.sampling.max_new_tokens)
        (self.end,) = self.text.bounds.end_tokens
        self._prompts = Prompts(rules_of(config), self.text.prompt)
        self._engine, self._loaded = TorchEngine(), 0
        self._player = EpisodePlayer(config, self.text) if environment_of(config) else None
        judged_here = self.text.judges or self._player is not None
        self._judges = [] if judged_here else [reward_functions.load(place) for place in functions_of(config)]
        self._versions: dict[int, Path] = {}
        self.max_distance = 0.0
        """The largest mean |log π/μ| of an honest group: what a limit for dishonest ones must lie above."""

    @property
    def update(self) -> int:
        return self.crew.policy.update

    def warm_start(self) -> None:
        """The short supervised start of a round; its version 0."""
        self.crew.warm_start(lambda *_: None)
        self.publish()

    def imitate_play(self, steps: int) -> None:
        """Warm-start by imitation of a game's player, with so many steps."""
        game = playing.game_of(self._config)
        assert game is not None
        text = playing.GameText(self._config.task.name, game, self.text, self._config.data.chat, self.end)
        playing.warm_start(self.crew.policy.model, text, lambda *_: None, steps=steps)
        self.publish()

    def imitate_player(self, player: Player, steps: int, episodes: int) -> None:
        """Warm-start by imitation of a player of the bench, whose episodes are shown again and again."""
        assert self._player is not None
        lessons = cycle(islice(self._player.lessons(self.task, player, self.end), episodes))
        playing.imitate_player(self.crew.policy.model, lessons, lambda *_: None, steps=steps)
        self.publish()

    def generate(self) -> list[TrainingGroup]:
        """The next batch, sampled from the version that a swarm would have by now."""
        due = max(0, self.update - self._delay)
        update = max(version for version in self._versions if version <= due)
        for old in [version for version in self._versions if version < update]:
            shutil.rmtree(self._versions.pop(old))
        sources = self._prompts.next(self._config.learner.groups_per_update)
        self._load(self._versions[update], update)
        samples = self._config.sampling.samples_per_group
        if self._player:
            played = self._played(sources, samples)
            groups = [self._of(source, samples_of(played[source])) for source in sources]
        else:
            sampled = self._sampled(sources, samples)
            groups = [self._group(source, done) for source, done in zip(sources, sampled, strict=True)]
        for group in groups:
            self._prompts.note(group.prompt, [sample.reward for sample in group.samples])
        return groups

    def train(self, groups: Sequence[TrainingGroup]) -> UpdateResult:
        """Train one update."""
        step = self.crew.train(tuple(groups))
        self.max_distance = max(self.max_distance, *step.distances.values())
        if self.update % self._config.staleness.kappa == 0:
            self.publish()
        return step

    def publish(self) -> Path:
        """The folder of the policy as it stands, which rollouts may now come from."""
        self._versions[self.update] = self._config.round.directory / "versions" / str(self.update)
        self._versions[self.update].parent.mkdir(parents=True, exist_ok=True)
        self.crew.publish(self._versions[self.update])
        return self._versions[self.update]

    def answer(self, group: TrainingGroup) -> str:
        """The right answer of a group's problem."""
        return self.text.problem(PromptRef("train", int(group.claim_id, 16))).answer

    def right(self, most: int) -> float:
        """The share of so many held-out problems that greedy decoding answers exactly."""
        problems = self.task.problems("held_out")
        asked = [problems[number] for number in range(min(most, len(problems)))]
        return accuracy(self.crew.policy.model, asked, self.text.encode, self.end)

    def held_out(self, most: int, samples: int = 1) -> list[Reward]:
        """Return the rewards of the policy as it stands: `samples` for each of at most `most` held-out problems."""
        folder = self._config.round.directory / "measured"
        shutil.rmtree(folder, ignore_errors=True)
        self.crew.publish(folder)
        count = min(most, len(self.task.problems("held_out")))
        sources = [PromptRef("held_out", number) for number in range(count)]
        self._load(folder, self.update)
        if self._player:
            played = self._played(sources, samples)
            return [reward for source in sources for reward in rewards_of(played[source])]
        judged = [
            self._judged(source, done) for source, done in zip(sources, self._sampled(sources, samples), strict=True)
        ]
        return [reward for group in judged for reward in group]

    def _sampled(self, sources: Sequence[PromptRef], samples: int) -> list[GroupDone]:
        """A group for each source, in their order, from the version that is loaded."""
        return self._draw([self._request(source, samples) for source in sources])

    def _played(self, sources: Sequence[PromptRef], samples: int) -> dict[PromptRef, list[AcceptedTurn]]:
        """Play an episode for each sample of each source; return their turns."""
        assert self._player is not None
        return self._player.play({source: self._request(source, samples) for source in sources}, self._draw)

    def _draw(self, requests: Sequence[SampleRequest]) -> list[GroupDone]:
        answers: dict[str, GroupDone] = {}
        self._engine.generate(requests, lambda group: answers.update({group.request_id: group}))
        return [answers[request.request_id] for request in requests]

    def _load(self, folder: Path, update: int) -> None:
        self._engine.load(folder, update)
        self._loaded = update

    def _request(self, source: PromptRef, samples: int) -> SampleRequest:
        sampling = self._config.sampling
        return SampleRequest(
            request_id=str(source.number),
            version=self._loaded,
            prompt=self._prompt(source),
            seed=self._config.round.seed << 32 | source.number,
            samples=samples,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
        )

    def _prompt(self, source: PromptRef) -> bytes:
        return pack_tokens(self.text.prompt(source))

    def _group(self, source: PromptRef, done: GroupDone) -> TrainingGroup:
        rewards = self._judged(source, done)
        samples = tuple(
            TrainingSample(tokens=sample.tokens, logprobs=sample.logprobs, reward=reward.score)
            for sample, reward in zip(done.samples, rewards, strict=True)
        )
        return self._of(source, samples)

    def _of(self, source: PromptRef, samples: tuple[TrainingSample, ...]) -> TrainingGroup:
        return TrainingGroup(
            claim_id=f"{source.number:064x}", prompt=self._prompt(source), policy_update=self._loaded, samples=samples
        )

    def _judged(self, source: PromptRef, done: GroupDone) -> list[Reward]:
        completions = [unpack_tokens(sample.tokens).tolist() for sample in done.samples]
        return self.rewards(self.text.problem(source), completions)

    def rewards(self, problem: Problem, completions: Sequence[Sequence[int]]) -> list[Reward]:
        if self.text.judges:
            return [self.text.judge(problem, completion) for completion in completions]
        said = [self.text.judged_text(completion) for completion in completions]
        return reward_functions.judge(self._judges, Job(problem, said, completions))
