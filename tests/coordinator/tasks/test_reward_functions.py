"""Reward functions of any signature drop in unchanged, and whatever is no reward is named."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.tasks import reward_functions
from coordinator.tasks.reward_functions import BadAnswer, Job, load
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage, Problem, Reward

PROBLEM = Problem("2+2=", "4", {"level": 3, "data_source": "sums", "extra_info": {"hard": False}})
JOB = Job(PROBLEM, ["4", "5"], [[7, 1], [8, 1]])

TRL = """
def by_column(completions, level, **kwargs):
    return [each / 10 if said == "4" else 0.0 for each, said in zip(level, completions, strict=True)]

def exact(prompts, completions, answer):
    return [float(said == right) for said, right in zip(completions, answer)]

def chatty(prompts, completions, **kwargs):
    assert prompts[0][0]["role"] == "user"
    return [float(len(messages[0]["content"])) for messages in completions]

async def waits(completions, completion_ids, **kwargs):
    return [float(ids[0]) for ids in completion_ids]

class Short:
    # as that of get_repetition_penalty_reward, which is TRL's own

    def __call__(self, completion_ids, **kwargs):
        assert "prompts" in kwargs and "completions" in kwargs
        return [1.0 / len(ids) for ids in completion_ids]

short = Short()

def only_some(completions, **kwargs):
    return [1.0 if said == "4" else None for said in completions]

def none(completions, **kwargs):
    return [None] * len(completions)
"""

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"hard": False}
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

def of_gsm8k(solution_str, ground_truth, method="strict"):
    assert method == "strict"
    return float(solution_str == ground_truth)
"""

OURS = """
from protocol.tasks import Reward

def judged(problem, completion):
    return Reward(0.5, "invalid" if completion == "5" else "ok", {"form": 1.0})
"""


def place(folder: Path, text: str, name: str) -> str:
    path = folder / "my_rewards.py"
    path.write_text(text)
    return f"{path}:{name}"


def scores(folder: Path, text: str, name: str, job: Job = JOB) -> list[float]:
    return [reward.score for reward in reward_functions.judge([load(place(folder, text, name))], job)]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (TRL, "by_column", [0.3, 0.0]),
        (TRL, "exact", [1.0, 0.0]),
        (TRL, "waits", [7.0, 8.0]),
        (TRL, "short", [0.5, 0.5]),
        (VERL, "compute_score", [1.0, 0.0]),
        (VERL, "of_gsm8k", [1.0, 0.0]),
        (OURS, "judged", [0.5, 0.5]),
    ],
)
def test_a_function_of_any_known_signature_drops_in(tmp_path: Path, text: str, name: str, expected: Any) -> None:
    assert scores(tmp_path, text, name) == expected


def test_chat_comes_as_messages(tmp_path: Path) -> None:
    job = JOB._replace(problem=Problem((ChatMessage("user", "2+2="),), "4"))
    assert scores(tmp_path, TRL, "chatty", job) == [1.0, 1.0]


def test_parts_are_weighed_and_named(tmp_path: Path) -> None:
    weighted = [load(place(tmp_path, VERL, "compute_score"), 2.0), load(place(tmp_path, TRL, "only_some"), 0.5)]
    right, wrong = reward_functions.judge(weighted, JOB)
    parts = {"compute_score": 1.0, "compute_score/acc": 1.0, "only_some": 1.0}
    assert right == Reward(2.5, "ok", parts)
    assert wrong == Reward(0.0, "ok", {"compute_score": 0.0, "compute_score/acc": 0.0})


def test_what_broke_the_form_is_invalid(tmp_path: Path) -> None:
    right, wrong = reward_functions.judge([load(place(tmp_path, OURS, "judged"))], JOB)
    assert (right.status, wrong.status) == ("ok", "invalid")
    assert right.components == {"judged": 0.5, "judged/form": 1.0}


def test_nothing_to_say_of_a_completion_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(BadAnswer, match="judged the completion"):
        scores(tmp_path, TRL, "only_some")
    with pytest.raises(BadAnswer, match="judged the completion"):
        scores(tmp_path, TRL, "none")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("[1.0]", "1 rewards for 2"),
        ("[1.0] * 3", "3 rewards for 2"),
        ("1.0", "not a list"),
        ("'11'", "not a list"),
        ("None", "not a list"),
        ("[float('nan'), 1]", "nan"),
        ("[1, float('inf')]", "inf"),
        ("[1, -1e30]", "and at most 1e"),
        ("[1, '1']", "not a number"),
        ("[1, [1]]", "not a number"),
        ("[1, {'reward': 1}]", "without a 'score'"),
        ("[1, 10**400]", "int too large|OverflowError"),
    ],
)
def test_garbage_is_named(tmp_path: Path, answer: str, says: str) -> None:
    with pytest.raises((BadAnswer, OverflowError), match=says):
        scores(tmp_path, f"def fn(completions, **kwargs):\n    return {answer}\n", "fn")


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def fn(text): return 1.0", "fn", "not those of a reward function"),
        ("def fn(): return 1.0", "fn", "not those of a reward function"),
        ("fn = 3", "fn", "no function"),
        ("x = 1", "fn", "no function.*It has none"),
        ("def reward(): pass\ndef other(): pass", "reword", r"no function.*Did you mean .*my_rewards\.py:reward\?"),
        ("def reward(): pass\ndef other(): pass", "fn", "no function.*It has reward, other"),
    ],
)
def test_what_is_no_reward_function_is_refused(tmp_path: Path, text: str, name: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        load(place(tmp_path, text, name))


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="no file"):
        load(f"{tmp_path}/missing.py:fn")
    with pytest.raises(ConfigInvalid, match=", ".join(reward_functions.BUILT_IN)):
        load("magic")


def test_the_built_in_exact_reward() -> None:
    assert [one.score for one in reward_functions.judge([load("exact")], JOB)] == [1.0, 0.0]


def test_a_file_may_import_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_rewards.py").write_text("WORTH = 0.25\n")
    text = "from beside_the_rewards import WORTH\n\ndef fn(completions, **kwargs):\n    return [WORTH] * 2\n"
    assert scores(tmp_path, text, "fn") == [0.25, 0.25]


LESSONS = """
from protocol.tasks import Reward

def halves(problem, completion):
    return Reward(1.0, "ok", weight=0.5, skip=((0, 1),))

def doubled(completions, **columns):
    return [Reward(1.0, "ok", weight=3.0) for _ in completions]

def heavy(problem, completion):
    return Reward(1.0, "ok", weight=101.0)

def against(problem, completion):
    return Reward(1.0, "ok", weight=-1.0)

def unknown(problem, completion):
    return Reward(1.0, "ok", weight=float("nan"))

def beyond(problem, completion):
    return Reward(1.0, "ok", skip=((0, 2),))

def backwards(problem, completion):
    return Reward(1.0, "ok", skip=((1, 0),))

def endless(problem, completion):
    return Reward(1.0, "ok", skip=((0, float("inf")),))

def shapeless(problem, completion):
    return Reward(1.0, "ok", skip=7)

def many(problem, completion):
    return Reward(1.0, "ok", skip=tuple((0, 1 + number) for number in range(65)))
"""


def test_a_reward_says_what_is_trained_on_and_how_much_it_counts(tmp_path: Path) -> None:
    """The weights of several functions multiply, and their spans are joined; any signature may return them."""
    (one,) = reward_functions.judge([load(place(tmp_path, LESSONS, "halves"))], JOB._replace(completions=["4"]))
    assert (one.weight, one.skip) == (0.5, ((0, 1),))
    both = [load(place(tmp_path, LESSONS, name)) for name in ("halves", "doubled", "halves")]
    assert [(each.weight, each.skip) for each in reward_functions.judge(both, JOB)] == [(0.75, ((0, 1),))] * 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("heavy", "it must be between 0 and 100"),
        ("against", "it must be between 0 and 100"),
        ("unknown", "finite"),
        ("beyond", "not within a completion of 1 characters"),
        ("backwards", "not within"),
        ("endless", "spans look like"),
        ("shapeless", "spans look like"),
        ("many", "64 are allowed"),
    ],
)
def test_lessons_that_cannot_be_are_no_reward(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        reward_functions.judge([load(place(tmp_path, LESSONS, name))], JOB)
