"""The learner and games: what an environment said teaches nothing, and what a policy plays is what it would say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.learner import playing
from coordinator.learner.embedded import EmbeddedShape, make_policy
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.warmstart import NOT_JUDGED
from coordinator.model.batch import collate
from coordinator.tasks.task_text import TaskText
from protocol.tasks import Episodes, task
from coordinator.environments.games.limit_poker import SPOKEN
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens
from protocol.work.transcript import Player

SHAPE = EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=24)


@pytest.fixture(scope="module")
def kuhn() -> Episodes:
    made = task("kuhn", parameters={"opponent": "rule", "turn_tokens_max": 4})
    assert isinstance(made, Episodes)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kuhn: Episodes) -> Path:
    place = tmp_path_factory.mktemp("kuhn")
    make_policy(place, seed=1, shape=SHAPE, words=kuhn.environment.words)
    return place


@pytest.fixture(scope="module")
def text(folder: Path, kuhn: Episodes) -> TaskText:
    return TaskText(lambda name: (folder / name).read_bytes(), kuhn, 64)


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_games_words_are_tokens_and_any_text_survives(text: TaskText) -> None:
    said = ("hold K\n>", "they raise\n>", "fold", "call", "raise")
    assert [len(text.encode(piece)) for piece in said] == [4, 4, 1, 1, 1]
    assert text.decode(text.encode("hold Q\nthey call\n> naïve 47+38=")) == "hold Q\nthey call\n> naïve 47+38="


def test_imitation_teaches_to_act_and_to_act_legally(folder: Path, kuhn: Episodes, text: TaskText) -> None:
    model, frame = model_of(folder), text.framed(kuhn.game(0))
    (end,) = text.bounds.end_tokens
    told = list[float]()
    before = playing.strategy_of(model, kuhn.environment, frame, text.codec, end)  # type: ignore[arg-type]  # it is Kuhn's
    playing.warm_start(model, kuhn, frame, text.codec, end, lambda share, _: told.append(share), steps=60)
    after = playing.strategy_of(model, kuhn.environment, frame, text.codec, end)  # type: ignore[arg-type]  # it is Kuhn's
    assert told[-1] == 1.0
    assert min(sum(after[name]) / sum(before[name]) for name in before) > 50


def test_a_strategy_is_what_the_policy_says_in_a_real_game(folder: Path, kuhn: Episodes, text: TaskText) -> None:
    """The second turn of a game that a player really plays, by a plain forward pass over its tokens."""
    model, frame = model_of(folder), text.framed(kuhn.game(0))
    (end,) = text.bounds.end_tokens
    strategy = playing.strategy_of(model, kuhn.environment, frame, text.codec, end)  # type: ignore[arg-type]  # it is Kuhn's
    checked = 0
    for number in range(60):
        episode = text.framed(kuhn.game(number))
        player = Player(episode, text.codec, end_tokens=text.bounds.end_tokens, tokens_max=64)
        hand: Any = player._play
        tokens = text.encode(kuhn.problem(number).prompt)
        for token in (*text.encode("call"), end):
            tokens += [token, *player.append(token)]
        if player.finish:
            continue
        name = f"{hand._cards[hand._seat]}:{hand.table.history}"
        said = [*text.encode(SPOKEN[hand.table.legal[0]]), end]
        with torch.inference_mode():
            scores = torch.log_softmax(model(torch.tensor([tokens + said])).logits[0, len(tokens) - 1 : -1], -1)
        chance = float(scores.gather(1, torch.tensor(said)[:, None]).sum().exp())
        assert chance == pytest.approx(strategy[name][0], rel=1e-4)
        checked += 1
    assert checked > 5


def test_lessons_judge_turns_only(kuhn: Episodes, text: TaskText) -> None:
    frame = text.framed(kuhn.game(0))
    (end,) = text.bounds.end_tokens
    lessons = playing._lessons(kuhn, frame, text.codec, end)
    for _ in range(20):
        said, then = next(lessons)
        judged = [token for token in then if token != NOT_JUDGED]
        assert judged[-1] == end
        assert set(text.decode([token for token in judged if token != end])) <= set("foldcallraise")
        assert len(said) == len(then)


def game(sampled: bytes, tokens: list[int], logprobs: list[float]) -> TrainingGroup:
    samples = tuple(
        TrainingSample(tokens=pack_tokens(row), logprobs=pack_logprobs(logprobs), reward=reward, sampled=sampled)
        for row, reward in ((tokens, 1.0), (tokens[::-1], 0.0))
    )
    return TrainingGroup(claim_id="0" * 64, prompt=pack_tokens([5, 6, 7]), policy_update=0, samples=samples)


def test_what_an_environment_said_is_in_no_loss_ratio_or_length(folder: Path) -> None:
    """Other log-probabilities where nothing was drawn change nothing of an update, to the bit."""
    tokens, drawn = [10, 2, 30, 31, 32, 10], bytes([1, 1, 0, 0, 0, 1])
    steps = []
    for claimed in (0.0, -9.0):
        logprobs = [-5.0 if one else claimed for one in drawn]
        policy = TrainedPolicy(folder, TrainSettings(learning_rate=1e-2, warmup_updates=0))
        step = policy.train_step([game(drawn, tokens, logprobs)])
        steps.append((step, [weight.detach().clone() for weight in policy.model.parameters()]))
    (one, first), (other, second) = steps
    assert one.metrics == other.metrics
    assert one.distances == other.distances
    assert one.metrics["tokens"] == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_a_sample_is_as_long_as_its_tokens_though_few_were_drawn() -> None:
    data = collate([game(bytes([1, 0, 0, 0, 0, 1]), [10, 2, 30, 31, 32, 10], [-1.0] * 6)])
    assert data.lengths.tolist() == [6, 6]
    assert data.mask.sum(1).tolist() == [2, 2]
