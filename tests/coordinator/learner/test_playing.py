"""The learner and games: what an environment said teaches nothing, and what a policy plays is what it would say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.environments.games.episodes import open_game, seed_of
from coordinator.environments.games.limit_poker import SPOKEN, LimitPoker
from coordinator.learner import playing
from coordinator.learner.embedded import EmbeddedShape, make_policy
from coordinator.learner.playing import GameText
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.warmstart import NOT_JUDGED
from coordinator.model.batch import collate
from coordinator.tasks.task_text import TaskText
from protocol.tasks import task
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

SHAPE = EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=24)


KUHN = open_game("kuhn", {"opponent": "rule"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kuhn")
    make_policy(place, seed=1, shape=SHAPE, words=KUHN.words)
    return place


@pytest.fixture(scope="module")
def text(folder: Path) -> GameText:
    made = TaskText(lambda name: (folder / name).read_bytes(), task("arithmetic"), 64)
    (end,) = made.bounds.end_tokens
    return GameText("kuhn", KUHN, made, chat=False, end=end)


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_games_words_are_tokens_and_any_text_survives(text: GameText) -> None:
    coder = text.coder
    said = ("hold K\n>", "they raise\n>", "fold", "call", "raise")
    assert [len(coder.encode(piece)) for piece in said] == [4, 4, 1, 1, 1]
    assert coder.decode(coder.encode("hold Q\nthey call\n> naïve 47+38=")) == "hold Q\nthey call\n> naïve 47+38="


def test_imitation_teaches_to_act_and_to_act_legally(folder: Path, text: GameText) -> None:
    assert isinstance(KUHN, LimitPoker)
    model, told = model_of(folder), list[float]()
    before = playing.strategy_of(model, KUHN, text)
    playing.warm_start(model, text, lambda share, _: told.append(share), steps=60)
    after = playing.strategy_of(model, KUHN, text)
    assert told[-1] == 1.0
    assert min(sum(after[name]) / sum(before[name]) for name in before) > 50


def test_a_strategy_is_what_the_policy_says_in_a_real_game(folder: Path, text: GameText) -> None:
    """The second turn of a game that a player really plays, by a plain forward pass over its tokens."""
    assert isinstance(KUHN, LimitPoker)
    model = model_of(folder)
    strategy = playing.strategy_of(model, KUHN, text)
    checked = 0
    for number in range(60):
        hand: Any = KUHN.reset(seed_of("kuhn", KUHN, "train", 0, number))
        tokens = text.opening(hand.opening)
        then = hand.step("call")
        if then is None:
            continue
        tokens += text.turn("call") + text.answer(then)
        name = f"{hand._cards[hand._seat]}:{hand.table.history}"
        said = text.turn(SPOKEN[hand.table.legal[0]])
        with torch.inference_mode():
            scores = torch.log_softmax(model(torch.tensor([tokens + said])).logits[0, len(tokens) - 1 : -1], -1)
        chance = float(scores.gather(1, torch.tensor(said)[:, None]).sum().exp())
        assert chance == pytest.approx(strategy[name][0], rel=1e-4)
        checked += 1
    assert checked > 5


def test_lessons_judge_turns_only(text: GameText) -> None:
    lessons = playing._lessons(text)
    for _ in range(20):
        said, then = next(lessons)
        judged = [token for token in then if token != NOT_JUDGED]
        assert judged[-1] == text.end
        assert set(text.coder.decode([token for token in judged if token != text.end])) <= set("foldcallraise")
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
