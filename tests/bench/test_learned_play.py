"""The subjects of bench/learned_play: careless players whose episodes are what the policy imitates."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from bench.learned_play.subjects import CALL, CALLS_TIMES, SUBJECTS, asks_carelessly
from bench.learned_play.warehouse import Environment, known, problems
from bench.learning.cells import Cell
from bench.learning.training import play, start_of
from coordinator.environments.tool_calls import parse
from coordinator.learner.warmstart import NOT_JUDGED
from protocol.tasks import Problem

TOOLS = next(subject for subject in SUBJECTS if subject.name == "tools")


def asked(row: dict[str, object]) -> Problem:
    return Problem("", str(row["answer"]), row)


@pytest.mark.asyncio
async def test_only_the_right_call_returns_the_answer() -> None:
    row = next(problems("train", 0))
    tool, good, before, between, after = row["tool"], row["good"], *CALL
    episode = Environment(asked(row))
    assert await episode.step(f"{before}{tool}{between}{good}{after}") == f"\n{row['answer']}\n"
    assert await episode.step(row["answer"]) is None
    assert await episode.reward() == {"score": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}
    other = "stock" if tool == "price" else "price"
    assert await Environment(asked(row)).step(f"{before}{other}{between}{good}{after}") != f"\n{row['answer']}\n"
    assert len({known(day, "price", "plum") for day in range(100)}) > 80


def test_no_day_is_in_two_splits() -> None:
    days = [{row["day"] for row in problems(split, 0)} for split in ("train", "validation", "held_out")]
    assert sum(map(len, days)) == len(set().union(*days))


def test_the_player_calls_as_often_as_it_says_and_is_seldom_right() -> None:
    rows = [asked(row) for row in islice(problems("train", 0), 400)]
    turns = [parse(asks_carelessly(number, row, [])) for number, row in enumerate(rows)]
    calls = [turn.calls[0] for turn in turns if turn.calls]
    assert len(calls) / len(rows) == pytest.approx(CALLS_TIMES, abs=0.06)
    right = [
        call
        for turn, row in zip(turns, rows, strict=True)
        for call in turn.calls
        if (call.name, call.arguments) == (row.columns["tool"], {"good": row.columns["good"]})
    ]
    assert 0.2 < len(right) / len(rows) < 0.5


def test_a_policy_imitates_the_players_turns_only_and_is_trained_on_its_own(tmp_path: Path) -> None:
    settings = (*TOOLS.settings, "sampling.samples_per_group=2", "learner.groups_per_update=2")
    shown = []

    def begin(trial) -> None:  # type: ignore[no-untyped-def]  # the bench's trial
        lessons = trial._player.lessons(trial.task, asks_carelessly, trial.end)
        for tokens, then in islice(lessons, 20):
            assert len(tokens) == len(then)
            shown.append(trial.text.decode([token for token in then if token != NOT_JUDGED]))
        trial.imitate_player(asks_carelessly, 1, 4)

    subject = replace(TOOLS, settings=settings, every=1, begin=begin, measure=lambda trial: trial.held_out(4)[0].score)
    cell = play(subject, Cell("tools", 0, "corrected", 0, 1), start_of(subject, 0, tmp_path))
    assert [update for update, _ in cell.curve] == [0, 1]
    assert len(shown) == 20
    assert all("user" not in text and "?" not in text for text in shown)
    assert any("<tool_call>" in text for text in shown)
