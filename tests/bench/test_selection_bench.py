"""bench/selection: problems that recur, chosen by the round's own rules, and trained on for real."""

from pathlib import Path

from bench.learning.cells import Cell
from bench.learning.prompts import Prompts
from bench.learning.subjects import EXAMPLES
from bench.selection import DATA, EVEN, RULES, SKEWED, play, settings
from coordinator.config import load
from coordinator.learner.embedded import make_policy
from coordinator.rules.prompt_refs import PromptRef
from coordinator.rules.selection import OFF, SelectionRules
from coordinator.tasks.importing import make_copy
from coordinator.tasks.kinds import FOLDER
from coordinator.tasks.task import open_task
from coordinator.transactions.leases import rules_of
from protocol.work.rollout import pack_tokens

PROBLEM_COUNT = 4


def prompt(source: PromptRef) -> list[int]:
    return [source.number % PROBLEM_COUNT]


def test_without_rules_problems_come_in_their_order() -> None:
    prompts = Prompts(OFF, prompt)
    prompts.note(pack_tokens([0]), [1.0, 1.0])
    assert [source.number for source in prompts.next(3) + prompts.next(3)] == [0, 1, 2, 3, 4, 5]


def test_a_problem_that_taught_nothing_is_left_out_when_it_comes_up_again() -> None:
    prompts = Prompts(SelectionRules(filter_after=1, window=PROBLEM_COUNT), prompt)
    for source in prompts.next(PROBLEM_COUNT):
        always_right = source.number == 2
        prompts.note(pack_tokens(prompt(source)), [1.0, 1.0] if always_right else [1.0, 0.0])
    assert [source.number % PROBLEM_COUNT for source in prompts.next(3)] == [0, 1, 3]


def test_data_sets_have_as_many_different_problems_as_they_say_in_an_order_of_their_seed() -> None:
    for name, size in {"even": EVEN, "skewed": SKEWED}.items():
        found = [[problem.prompt for problem in DATA[name](seed)] for seed in (0, 0, 1)]
        assert [len(set(prompts)) for prompts in found] == [size] * 3
        assert found[0] == found[1] != found[2]


def test_half_of_the_skewed_answers_are_longer_than_a_completion_may_be() -> None:
    tokens = load(EXAMPLES / "demo.toml", []).sampling.max_new_tokens
    answers = [problem.answer for problem in DATA["skewed"](0)]
    assert sum(len(answer) + 1 > tokens for answer in answers) == SKEWED // 2  # a token each digit, and the end


def test_all_have_the_same_problems_and_only_their_own_rules(tmp_path: Path) -> None:
    copies, rules = set(), []
    for name in RULES:
        folder = tmp_path / name
        folder.mkdir()
        config = settings(Cell("even", 0, name, 0, 2), folder, tmp_path / "start")
        make_copy(config, folder / "round" / FOLDER)
        task = open_task(config)
        copies.add(tuple(task.problem(number).prompt for number in range(2 * EVEN)))
        rules.append(rules_of(config))
    (problems,) = copies
    assert EVEN // 2 < len(set(problems)) <= EVEN  # a few are kept back for validation
    assert [one.chooses for one in rules] == [False, True, True]


def test_a_cell_is_trained_and_measured(tmp_path: Path) -> None:
    make_policy(tmp_path / "start", seed=0)
    done = play(Cell("skewed", 0, "filtered", 0, 2), tmp_path / "start")
    assert [update for update, _ in done.curve] == [0, 2]
    assert len(done.rewards) == 2
