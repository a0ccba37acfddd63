"""The arithmetic task: splits that never meet, and a reward that only the right answer earns."""

import pytest

from protocol.errors import MalformedMessage, UnknownTask
from protocol.tasks import task
from protocol.tasks.arithmetic import FORGETTING, OPERANDS, Arithmetic, split_of


def test_prompts_are_a_function_of_seed_and_index() -> None:
    first = [Arithmetic(3).prompt(index) for index in (5, 2**50, 5)]
    assert first[0] == first[2]
    assert first == [Arithmetic(3).prompt(index) for index in (5, 2**50, 5)]
    assert [Arithmetic(4).prompt(index) for index in range(20)] != [Arithmetic(3).prompt(index) for index in range(20)]
    assert Arithmetic(0).prompt(0) == "42+76="  # frozen: a task means the same in every process


def test_the_fixed_sets_are_large_and_the_same_for_every_seed() -> None:
    assert 450 < len(Arithmetic(0).held_out()) < 560
    assert 450 < len(Arithmetic(0).validation()) < 560
    assert Arithmetic(0).held_out() == Arithmetic(1).held_out()


def test_no_split_can_produce_a_problem_of_another() -> None:
    held_out = {prompt for prompt, _ in Arithmetic(0).held_out()}
    validation = {prompt for prompt, _ in Arithmetic(0).validation()}
    every_train = {f"{a}+{b}=" for a in OPERANDS for b in OPERANDS if split_of(a, b) == "train"}
    assert len(held_out) + len(validation) + len(every_train) == len(OPERANDS) ** 2
    assert not held_out & validation
    assert not every_train & (held_out | validation)
    assert {Arithmetic(seed).prompt(index) for seed in range(3) for index in range(2000)} <= every_train


def test_a_held_out_sum_is_held_out_both_ways_round() -> None:
    held_out = {prompt for prompt, _ in Arithmetic(0).held_out()}
    swapped = {"+".join(reversed(prompt.rstrip("=").split("+"))) + "=" for prompt in held_out}
    assert swapped == held_out


def test_the_right_answer_is_rewarded() -> None:
    sums = Arithmetic()
    assert sums.answer("47+38=") == "85"
    reward = sums.reward("47+38=", "85")
    assert (reward.score, reward.status) == (1.0, "ok")
    assert all(sums.reward(prompt, answer).score == 1.0 for prompt, answer in sums.held_out())


@pytest.mark.parametrize("completion", ["86", "8", "0", "855", "9999999999999999"])
def test_a_wrong_number_earns_nothing(completion: str) -> None:
    reward = Arithmetic().reward("47+38=", completion)
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
    reward = Arithmetic().reward("47+38=", completion)
    assert (reward.score, reward.status) == (0.0, "invalid")


@pytest.mark.parametrize("prompt", ["", "47+38", "047+38=", "4+3=", "47-38=", "४७+38=", "47+38=\n", "100+10="])
def test_a_foreign_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(MalformedMessage):
        Arithmetic().answer(prompt)


def test_tasks_are_found_by_name() -> None:
    assert task("arithmetic", seed=2) == Arithmetic(2)
    with pytest.raises(UnknownTask, match="arithmetic"):
        task("poker")


def test_the_teacher_forgets_most_carries_and_makes_no_other_mistake() -> None:
    sums = Arithmetic()
    corpus = [sums.demonstration(index) for index in range(4000)]
    assert corpus[:50] == [sums.demonstration(index) for index in range(50)]
    assert all(prompt == sums.prompt(index) for index, (prompt, _) in enumerate(corpus))
    assert all(said in sums.demonstrated(prompt) for prompt, said in corpus)
    with_carry = [(prompt, said) for prompt, said in corpus if len(sums.demonstrated(prompt)) == 2]
    assert 0.6 < len(with_carry) / len(corpus) < 0.7
    forgotten = [said for prompt, said in with_carry if said != sums.answer(prompt)]
    assert abs(len(forgotten) / len(with_carry) - FORGETTING) < 0.03
    assert sums.demonstrated("47+38=") == {"85", "75"}
    assert sums.demonstrated("42+35=") == {"77"}
