"""The shipped rewards with their real libraries: mathematics as such, and inputs that hang them for ever."""

import asyncio

import pytest

from coordinator.rewards import gym, math
from coordinator.rewards.functions import Job
from coordinator.rewards.pool import Pool
from coordinator.rewards.spec import RewardSpec
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
    assert math.reward(Problem("p", gold), said) == reward


def test_a_gold_answer_that_says_nothing_is_no_zero() -> None:
    with pytest.raises(ConfigInvalid, match="says nothing"):
        math.reward(Problem("p", ""), r"\boxed{7}")


HANGING = (
    r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}",
    r"\boxed{10^{(5^{5^{5^{5^{5}}} \cdot \log_{10}(5)} - 4)}}",
    r"\boxed{2^{2^{2^{2^{2^{2^{2}}}}}}}",
    r"\boxed{(10^9)!}",
)
"""What users of the library found in answers of models, with its timeouts on, or the like of it."""


@pytest.mark.asyncio
async def test_answers_on_which_the_library_hangs_are_failures_and_no_zeros() -> None:
    pool = Pool(RewardSpec((("math", 1.0),), timeout_s=5.0, processes=len(HANGING)))

    async def judged(said: str) -> str:
        with pytest.raises(VerifierFailed) as failure:
            await pool.judge(Job(Problem("p", "1"), [said], [[1]]))
        return failure.value.message

    reasons = await asyncio.gather(*map(judged, HANGING))
    assert set(reasons) <= {"It did not answer within 5 s.", "MemoryError: "}
    assert "It did not answer within 5 s." in reasons
    sound = Pool(RewardSpec((("math", 1.0),), timeout_s=60.0, processes=1))
    assert await sound.judge(Job(Problem("p", "1"), [r"\boxed{1}"], [[1]])) == [Reward(1.0, "ok", {"math": 1.0})]
    await sound.close()
    await pool.close()


def test_a_generators_own_score_counts() -> None:
    dataset = gym.open_dataset("chain_sum", 7, 10, {"min_terms": 2, "max_terms": 2})
    entry = dataset[3]
    made = {"generator": "chain_sum", "seed": 7, "size": 10, "index": 3}
    problem = Problem(entry["question"], entry["answer"], made | {"parameters": {"min_terms": 2, "max_terms": 2}})
    assert gym.reward(problem, entry["answer"]).score == 1.0
    assert gym.reward(problem, f"It is <answer> {entry['answer']} </answer>, I say").score == 1.0
    assert gym.reward(problem, "<answer>no</answer>").score < 1.0
    assert gym.reward(problem, "").status == "invalid"


def test_a_generator_that_is_none_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigInvalid, match="chain_sum"):
        gym.open_dataset("no_such", 0, 1, {})
    with pytest.raises(ConfigInvalid, match="refuses its parameters"):
        gym.open_dataset("chain_sum", 0, 1, {"colour": "red"})
