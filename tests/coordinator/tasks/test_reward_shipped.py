"""The shipped rewards with their real libraries: mathematics as such, and inputs that hang them for ever."""

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from coordinator.environments import gym_answers as reward_gym
from coordinator.tasks import reward_math
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import ConfigInvalid, VerifierFailed
from protocol.tasks import Problem, Reward

RIGHT, WRONG = Reward(1.0, "ok"), Reward(0.0, "ok")
NONE = Reward(0.0, "invalid")


@pytest.mark.parametrize(
    ("gold", "said", "reward"),
    [
        ("204", r"So the answer is $\boxed{204}$.", RIGHT),  # AIME: three digits
        ("025", r"\boxed{25}", RIGHT),
        ("204", r"First \boxed{17}, but no: \boxed{204}", RIGHT),
        ("204", r"\boxed{204} or rather \boxed{17}", WRONG),
        (r"\frac{1}{2}", r"\boxed{0.5}", RIGHT),
        (r"$\frac{\sqrt{3}}{3}$", r"\boxed{\frac{1}{\sqrt{3}}}", RIGHT),
        (r"x^2-1", r"\boxed{(x-1)(x+1)}", RIGHT),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", RIGHT),
        (r"\boxed{7}", r"\boxed{7.0}", RIGHT),
        ("She has 3 + 4 = 7 eggs.\n#### 7", r"\boxed{7}", RIGHT),
        ("7", r"\boxed{8}", WRONG),
        ("7", "seven, I think", NONE),
        ("7", "", NONE),
    ],
)
def test_answers_are_compared_as_mathematics(gold: str, said: str, reward: Reward) -> None:
    assert reward_math.reward(Problem("p", gold), said) == reward


def test_a_gold_answer_that_says_nothing_is_no_zero() -> None:
    with pytest.raises(ConfigInvalid, match="cannot be parsed"):
        reward_math.reward(Problem("p", ""), r"\boxed{7}")


HANGING = (
    r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}",
    r"\boxed{10^{(5^{5^{5^{5^{5}}} \cdot \log_{10}(5)} - 4)}}",
    r"\boxed{2^{2^{2^{2^{2^{2^{2}}}}}}}",
    r"\boxed{(10^9)!}",
)
"""Answers of models that users of the library found, with its timeouts on, or the like of it."""


@pytest.mark.asyncio
async def test_answers_on_which_the_library_hangs_are_failures_and_no_zeros() -> None:
    pool = TaskPool(TaskProcessSpec((("math", 1.0),), timeout_s=5.0, processes=len(HANGING)))

    async def judged(said: str) -> str:
        with pytest.raises(VerifierFailed) as failure:
            await pool.judge(Job(Problem("p", "1"), [said], [[1]]))
        return failure.value.message

    reasons = await asyncio.gather(*map(judged, HANGING))
    assert set(reasons) <= {"It did not answer within 5 s (reward.timeout_s).", "MemoryError: "}
    assert "It did not answer within 5 s (reward.timeout_s)." in reasons
    sound = TaskPool(TaskProcessSpec((("math", 1.0),), timeout_s=60.0, processes=1))
    assert await sound.judge(Job(Problem("p", "1"), [r"\boxed{1}"], [[1]])) == [Reward(1.0, "ok", {"math": 1.0})]
    await sound.close()
    await pool.close()


def test_a_generators_own_score_counts() -> None:
    dataset = reward_gym.open_dataset("chain_sum", 7, 10, {"min_terms": 2, "max_terms": 2})
    entry = dataset[3]
    made = {"generator": "chain_sum", "seed": 7, "size": 10, "index": 3}
    problem = Problem(entry["question"], entry["answer"], made | {"parameters": {"min_terms": 2, "max_terms": 2}})
    assert reward_gym.reward(problem, entry["answer"]).score == 1.0
    assert reward_gym.reward(problem, f"It is <answer> {entry['answer']} </answer>, I say").score == 1.0
    assert reward_gym.reward(problem, "<answer>no</answer>").score < 1.0
    assert reward_gym.reward(problem, "").status == "invalid"


def test_tags_without_end_are_read_in_one_pass() -> None:
    """The text has the greatest length: a search for each closing tag would take minutes and block all rewards."""
    problem = asked("chain_sum")
    assert reward_gym.reward(problem, "<answer>" * 32_768).score == 0.0
    said = f"<answer>no</answer>{'<answer>' * 32_768}{problem.answer}</answer><answer>never mind"
    assert reward_gym.reward(problem, said).score == 1.0


def test_a_generator_that_is_none_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigInvalid, match="chain_sum"):
        reward_gym.open_dataset("no_such", 0, 1, {})
    with pytest.raises(ConfigInvalid, match="refuses its parameters"):
        reward_gym.open_dataset("chain_sum", 0, 1, {"colour": "red"})


def asked(generator: str, **parameters: Any) -> Problem:
    """The first problem of a generator, as the round's copy has it."""
    entry = reward_gym.open_dataset(generator, 7, 1, parameters)[0]
    made = {"generator": generator, "seed": 7, "size": 1, "index": 0, "parameters": parameters}
    return Problem(entry["question"], entry["answer"], made)


def test_an_answer_at_which_a_generator_raises_is_invalid_and_costs_no_group() -> None:
    problem = asked("prime_factorization")
    assert reward_gym.reward(problem, problem.answer) == RIGHT
    assert reward_gym.reward(problem, "no number") == NONE


def test_a_problem_is_made_once_for_all_its_completions() -> None:
    problem = asked("chain_sum")
    reward_gym._entry.cache_clear()
    for said in ("1", "2", "3"):
        reward_gym.reward(problem, said)
    assert reward_gym._entry.cache_info().misses == 1


RUNS_ANSWERS = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "number_sorting",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
"""Generators that read by `eval` or sympy's `parse_expr`, which is the same."""


def test_every_generator_that_runs_answers_is_known() -> None:
    """The test includes helpers in the file: a release with a new generator fails here before it is included."""
    evaluating = re.compile(r"(?<![\w.])eval\(answer|parse_expr\(answer|exec\(answer|sympify\(answer")
    files = {name: Path(inspect.getfile(dataset)).read_text() for name, (dataset, _) in DATASETS.items()}
    found = {name for name, source in files.items() if evaluating.search(source)}
    assert found <= RUNS_ANSWERS
    assert {name for name in DATASETS if reward_gym.readers(name)} == RUNS_ANSWERS


@pytest.mark.parametrize("generator", sorted(RUNS_ANSWERS))
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('pathlib').Path({target!r}).touch()",
        "[open({target!r}, 'w')]",
        "sin(\"__import__('pathlib').Path({target!r}).touch()\")",
        "\"__import__('pathlib').Path({target!r}).touch()\"",
        "__import__('pathlib').Path({target!r}).touch()!",  # no Python, until sympy has made some of it
        "[x for x in [open({target!r}, 'w')]]",
        "(lambda: open({target!r}, 'w'))()",
        "{deep}open({target!r}, 'w')",
    ],
)
def test_code_in_a_strangers_answer_is_not_run(generator: str, answer: str, tmp_path: Path) -> None:
    target = tmp_path / "owned"
    said = answer.format(target=str(target), deep="-" * 5_000)
    reward = reward_gym.reward(asked(generator), f"<answer>{said}</answer>")
    assert not target.exists()
    assert reward.score < 0.1


@pytest.mark.parametrize("generator", sorted(RUNS_ANSWERS))
def test_right_answers_of_generators_that_run_them_still_count(generator: str) -> None:
    problem = asked(generator)
    assert reward_gym.reward(problem, problem.answer).score == 1.0


def test_answers_that_are_arithmetic_or_lists_are_still_worth_what_they_were() -> None:
    matrix = asked("spiral_matrix")
    assert reward_gym.reward(matrix, str(matrix.answer.split())).score == 0.1
    integral = asked("simple_integration")
    assert reward_gym.reward(integral, integral.answer.replace("+ C", "+ 3*C - sin(C)**2/4")).score == 1.0
