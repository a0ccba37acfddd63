"""The reward `code` runs the last block of a completion against every form of tests."""

import asyncio
import json
from typing import Any

import pytest

from coordinator.tasks import reward_code
from coordinator.tasks.reward_code import CodeSettings, last_block, read_tests
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.reward_settings import from_environment
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage, Problem, Reward

PATIENT = CodeSettings(timeout_s=60.0, score="share")
LINES = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 5"]
EXAMPLES = [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "2\n", "stdout": "3"}]


def block(code: str, language: str = "python") -> str:
    return f"So:\n```{language}\n{code}\n```\n"


RIGHT = block("print(int(input()) + 1)")


def judged(completion: str, tests: Any, settings: CodeSettings = PATIENT) -> Reward:
    return asyncio.run(reward_code.judge(completion, read_tests(tests), settings))


def test_the_last_python_block_counts() -> None:
    assert last_block(block("a") + block("b") + block("c", "sh")) == "b"
    assert last_block(block("a", "Py") + "```python\ncut off") == "a"
    assert last_block("   ```python3\n  a\n```") == "  a"
    assert last_block("```\na\n```") is None
    assert last_block(block("```python", "text")) is None
    assert last_block("```python\n" * 100_000) is None


def test_the_share_of_passed_tests_is_a_component_and_may_be_the_score() -> None:
    code = block("def f(x): return x + 1")
    assert judged(code, LINES) == Reward(2 / 3, "ok", {"passed": 2 / 3})
    assert judged(code, LINES, CodeSettings(timeout_s=60.0)) == Reward(0.0, "ok", {"passed": 2 / 3})
    assert judged(code, LINES[:2], CodeSettings(timeout_s=60.0)) == Reward(1.0, "ok", {"passed": 1.0})


@pytest.mark.parametrize(
    "tests",
    [
        EXAMPLES,
        json.dumps(EXAMPLES),
        {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]},
        [{"input": "1", "output": "2  \n\n"}],
    ],
)
def test_outputs_are_compared_for_each_input(tests: Any) -> None:
    assert judged(RIGHT, tests).score == 1.0
    assert judged(block("print(input())"), tests).score == 0.0


def test_a_text_of_tests_is_one_test() -> None:
    tests = "def check(f):\n    assert f(1) == 2\n\ncheck(f)"
    assert judged(block("def f(x): return x + 1"), tests).score == 1.0
    assert judged(block("def f(x): return x"), tests).score == 0.0


@pytest.mark.parametrize("code", ["1 +", "raise ValueError", "import os; os._exit(0)", "exit()", "", "\ud800"])
def test_a_program_that_fails_passes_nothing(code: str) -> None:
    for tests in (LINES, EXAMPLES):
        assert judged(block(code), tests) == Reward(0.0, "ok", {"passed": 0.0})


def test_a_completion_without_a_block_is_invalid() -> None:
    assert judged("print(1)", LINES) == Reward(0.0, "invalid", {"passed": 0.0})


def test_a_program_that_hangs_costs_its_own_score_only() -> None:
    settings = CodeSettings(timeout_s=1.0, score="share")
    assert judged(block("while True: pass"), EXAMPLES * 100, settings).score == 0.0
    assert judged(block("def f(x):\n    while x > 1: pass\n    return 2"), LINES, settings).score == 1 / 3


@pytest.mark.parametrize(
    "tests", [None, [], "", {}, [1], [{"stdin": "1"}], {"inputs": ["1"], "outputs": []}, "[]", "3"]
)
def test_read_tests_no_known_form_are_an_error_and_no_zero(tests: Any) -> None:
    with pytest.raises(ConfigInvalid, match="tests cannot be read"):
        read_tests(tests)


@pytest.mark.asyncio
async def test_a_task_process_judges_a_group_of_chats() -> None:
    pool = TaskPool(TaskProcessSpec((("code", 1.0),), timeout_s=240.0))
    problem = Problem((ChatMessage("user", "Add one."),), columns={"tests": EXAMPLES})
    rewards = await pool.judge(Job(problem, [RIGHT, block("print(2)"), "no"], [[1]] * 3))
    await pool.close()
    assert rewards == [
        Reward(1.0, "ok", {"code": 1.0, "code/passed": 1.0}),
        Reward(0.0, "ok", {"code": 0.0, "code/passed": 0.5}),
        Reward(0.0, "invalid", {"code": 0.0, "code/passed": 0.0}),
    ]


def test_settings_are_read_from_variables_and_wrong_ones_are_named() -> None:
    read = from_environment(CodeSettings, "SWARM_CODE_", {"SWARM_CODE_SCORE": "share", "SWARM_CODE_TIMEOUT_S": "60"})
    assert read == PATIENT
    with pytest.raises(ConfigInvalid, match="SWARM_CODE_SCORE"):
        from_environment(CodeSettings, "SWARM_CODE_", {"SWARM_CODE_SCORE": "some"})


def test_data_without_tests_is_an_error_and_no_zero() -> None:
    with pytest.raises(ConfigInvalid, match="no tests"):
        asyncio.run(reward_code.reward([RIGHT]))
