"""The trial of bench/learning: a round in one process, on groups that are exactly as old as they should be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.learning.cells import Cell
from bench.learning.subjects import BY_NAME, Subject
from bench.learning.teacher import CARELESS_TIMES, OF, Taught, spells_carelessly
from bench.learning.training import play, settings, start_of
from bench.learning.trial import Trial
from coordinator.learner.embedded import make_policy
from protocol.tasks import Reward
from protocol.work.rollout import unpack_tokens

SMALL = ("sampling.samples_per_group=2", "learner.groups_per_update=2")


def small(name: str) -> Subject:
    """A subject without its supervised start, which is the learner's and tested there."""
    subject = BY_NAME[name]
    return replace(subject, settings=(*subject.settings, *SMALL), every=1, begin=lambda trial: trial.publish())


def trial_of(name: str, folder: Path, *, staleness: int = 0) -> Trial:
    subject = small(name)
    make_policy(folder / "model", seed=0, words=subject.words or ("hold", "J", "Q", "K"))
    cell = Cell(name, staleness, "corrected", 0, 8)
    trial = Trial(settings(subject, cell, folder=folder / "round", model=folder / "model"), delay=staleness)
    trial.publish()
    return trial


def test_every_batch_is_as_old_as_the_bound_allows(tmp_path: Path) -> None:
    trial, ages = trial_of("arithmetic", tmp_path, staleness=2), []
    for update in range(5):
        groups = trial.generate()
        ages.append(update - groups[0].policy_update)
        trial.train(groups)
    assert ages == [0, 1, 2, 2, 2]
    kept = {int(path.name) for path in (tmp_path / "round" / "versions").iterdir()}
    assert kept == {2, 3, 4, 5}  # the last batch came from version 2


@pytest.mark.slow
def test_what_the_environment_said_is_no_token_of_the_policys(tmp_path: Path) -> None:
    trial = trial_of("sokoban", tmp_path)
    groups = trial.generate()
    for sample in [sample for group in groups for sample in group.samples]:
        drawn = np.frombuffer(sample.sampled, np.uint8)
        said = trial.text.decode([int(token) for token in unpack_tokens(sample.tokens)[drawn == 0]])
        assert len(drawn) == len(unpack_tokens(sample.tokens))
        assert said.count("######") % 2 == 0
        assert "######" in said
    trial.train(groups)


@pytest.mark.slow
def test_held_out_games_are_played_from_the_policy_as_it_stands(tmp_path: Path) -> None:
    trial = trial_of("sokoban", tmp_path, staleness=3)
    trial.train(trial.generate())
    rewards = trial.held_out(3)
    assert len(rewards) == 3
    assert {"solved", "placed"} <= set(rewards[0].components)
    assert trial.generate()[0].policy_update == 0  # measuring leaves no newer version behind


def test_words_of_the_generator_are_judged_by_its_own_reward(tmp_path: Path) -> None:
    trial = trial_of("spell_backward", tmp_path)
    problem = trial.task.problem(0)
    right = [*trial.text.encode(problem.answer), trial.end]
    (best, half) = trial.rewards(problem, [right, trial.text.encode(problem.answer[:2])])
    assert best == Reward(1.0, "ok", best.components)
    assert 0.0 < half.score < 1.0
    assert len(trial.text.encode(problem.prompt)) == 1 + len(problem.answer)
    trial.train(trial.generate())


def test_the_teacher_is_careless_as_often_as_it_says(tmp_path: Path) -> None:
    task = trial_of("spell_backward", tmp_path).task
    teacher = Taught(task, spells_carelessly)
    said = [teacher.demonstration(index) for index in range(400)]
    slips = [demo for index, demo in enumerate(said) if demo.answer != task.problem(index).answer]
    assert len(slips) / len(said) == pytest.approx(CARELESS_TIMES / OF, abs=0.08)
    assert all(demo.prompt.endswith(f" {demo.answer}") for demo in slips if isinstance(demo.prompt, str))
    assert all(demo.answer in teacher.demonstrated(task.problem(index)) for index, demo in enumerate(said))


def test_a_start_is_made_once_and_half_of_one_is_none(tmp_path: Path) -> None:
    subject, starts = small("arithmetic"), tmp_path / "starts"
    (starts / "draft-killed").mkdir(parents=True)  # by a run that ended in the middle
    first = start_of(subject, 0, starts)
    assert (first / "model.safetensors").is_file()
    made = first.stat().st_mtime_ns
    assert start_of(subject, 0, starts) == first
    assert first.stat().st_mtime_ns == made


def test_the_same_cell_comes_out_the_same(tmp_path: Path) -> None:
    subject = small("arithmetic")
    start = start_of(subject, 0, tmp_path)
    cell = Cell("arithmetic", 1, "plain", 0, 3)
    once, again = (play(subject, cell, start) for _ in range(2))
    assert replace(once, cpu_s=0.0) == replace(again, cpu_s=0.0)
    assert [update for update, _ in once.curve] == [0, 1, 2, 3]
    assert len(once.rewards) == 3
