"""The arithmetic task: splits that never meet, and a reward that only the right answer earns."""

from typing import Literal

import pytest

from protocol.errors import MalformedMessage, UnknownTask
from protocol.tasks import Exact, Judging, Problem, Prompt, Teaching, stand_in, task
from protocol.tasks.arithmetic import FORGETTING, OPERANDS, Arithmetic, answer_to, split_of

PROBLEM = Problem("47+38=", "85")


def prompts(split: Literal["validation", "held_out"]) -> set[Prompt]:
    return {problem.prompt for problem in Arithmetic(0).problems(split)}


def test_prompts_are_a_function_of_seed_and_index() -> None:
    first = [Arithmetic(3).problem(index) for index in (5, 2**50, 5)]
    assert first[0] == first[2]
    assert first == [Arithmetic(3).problem(index) for index in (5, 2**50, 5)]
    assert [Arithmetic(4).problem(index) for index in range(20)] != [
        Arithmetic(3).problem(index) for index in range(20)
    ]
    assert Arithmetic(0).problem(0) == Problem("42+76=", "118")  # frozen: a task means the same in every process


def test_the_fixed_sets_are_large_and_the_same_for_every_seed() -> None:
    assert 450 < len(Arithmetic(0).problems("held_out")) < 560
    assert 450 < len(Arithmetic(0).problems("validation")) < 560
    assert Arithmetic(0).problems("held_out") == Arithmetic(1).problems("held_out")


def test_no_split_can_produce_a_problem_of_another() -> None:
    held_out = prompts("held_out")
    validation = prompts("validation")
    every_train = {f"{a}+{b}=" for a in OPERANDS for b in OPERANDS if split_of(a, b) == "train"}
    assert len(held_out) + len(validation) + len(every_train) == len(OPERANDS) ** 2
    assert not held_out & validation
    assert not every_train & (held_out | validation)
    assert {Arithmetic(seed).problem(index).prompt for seed in range(3) for index in range(2000)} <= every_train


def test_a_held_out_sum_is_held_out_both_ways_round() -> None:
    held_out = prompts("held_out")
    swapped = {"+".join(reversed(str(prompt).rstrip("=").split("+"))) + "=" for prompt in held_out}
    assert swapped == held_out


def test_the_right_answer_is_rewarded() -> None:
    sums = Arithmetic()
    assert answer_to("47+38=") == "85"
    reward = sums.reward(PROBLEM, "85")
    assert (reward.score, reward.status) == (1.0, "ok")
    assert all(sums.reward(problem, problem.answer).score == 1.0 for problem in sums.problems("held_out"))


@pytest.mark.parametrize("completion", ["86", "8", "0", "855", "9999999999999999"])
def test_a_wrong_number_earns_nothing(completion: str) -> None:
    reward = Arithmetic().reward(PROBLEM, completion)
    assert (reward.score, reward.status) == (0.0, "ok")


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "085",
        "00085",
        "+85",
        "-85",
        " 85",
        "85 ",
        "85\n",
        "\n85",
        "85.0",
        "8_5",
        "8५",
        "८५",
        "\uff18\uff15",
        "8\u200b5",
        "85\x00",
        "0x55",
        "85<|im_end|>",
        "85 85",
        "47+38",
        "eighty-five",
        "85" + "0" * 15,
        pytest.param("8" * 10_000_000, id="ten megabytes"),
    ],
)
def test_reward_hacks_earn_nothing(completion: str) -> None:
    reward = Arithmetic().reward(PROBLEM, completion)
    assert (reward.score, reward.status) == (0.0, "invalid")


@pytest.mark.parametrize("prompt", ["", "47+38", "047+38=", "4+3=", "47-38=", "४७+38=", "47+38=\n", "100+10="])
def test_a_foreign_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(MalformedMessage):
        answer_to(prompt)


def test_tasks_are_found_by_name() -> None:
    assert task("arithmetic", seed=2) == Arithmetic(2)
    with pytest.raises(UnknownTask, match="arithmetic"):
        task("poker")
    with pytest.raises(UnknownTask, match="digits"):
        task("arithmetic", parameters={"digits": 3})


def test_what_arithmetic_can_do_is_seen_by_its_form() -> None:
    assert isinstance(Arithmetic(), Judging)
    assert isinstance(Arithmetic(), Exact)
    assert isinstance(Arithmetic(), Teaching)


def test_a_machine_is_measured_though_nobody_told_it_the_task() -> None:
    assert stand_in("arithmetic", 0) == "42+76="
    assert stand_in("an operator's own", 0) == "42+76="


def test_the_teacher_forgets_most_carries_and_makes_no_other_mistake() -> None:
    sums = Arithmetic()
    corpus = [sums.demonstration(index) for index in range(4000)]
    assert corpus[:50] == [sums.demonstration(index) for index in range(50)]
    assert all(one.prompt == sums.problem(index).prompt for index, one in enumerate(corpus))
    assert all(one.answer in sums.demonstrated(one) for one in corpus)
    with_carry = [one for one in corpus if len(sums.demonstrated(one)) == 2]
    assert 0.6 < len(with_carry) / len(corpus) < 0.7
    forgotten = [one for one in with_carry if one.answer != answer_to(one.prompt)]
    assert abs(len(forgotten) / len(with_carry) - FORGETTING) < 0.03
    assert sums.demonstrated(PROBLEM) == {"85", "75"}
    assert sums.demonstrated(Problem("42+35=")) == {"77"}
