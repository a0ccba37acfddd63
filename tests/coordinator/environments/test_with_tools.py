"""Tools of every kind are run for the calls of a turn, and whatever goes wrong is an answer to the policy."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.environments.with_tools import tool_environment, with_tools
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage, Problem, Reward

CHAT = Problem((ChatMessage("user", "Go."),), "4")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def wait(text: str) -> dict[str, str]:
    await asyncio.sleep(0)
    return {"text": text}


def fail(how: str) -> None:
    raise {"value": ValueError, "exit": SystemExit, "stop": StopIteration}[how]("so it is")


def half() -> str:
    return "\ud800"


def long() -> str:
    return "<" + "x" * 1000 + ">"


def judged(problem: Problem, completion: str) -> float:
    return float(completion == problem.answer)


def play(environment: Callable[..., Any], *turns: str, problem: Problem = CHAT) -> tuple[list[Any], Any]:
    async def played() -> tuple[list[Any], Any]:
        episode = environment(problem)
        return [await episode.step(turn) for turn in turns], await episode.reward()

    return asyncio.run(played())


TOOLS = tool_environment([add, wait, fail, half, long], judged, result_chars=100)


def test_results_are_messages_in_the_order_of_the_calls() -> None:
    heard, earned = play(TOOLS, f"I add. {call('add', a=1, b='3')}{call('wait', text='é')}", "4")
    assert heard == [
        [{"role": "tool", "name": "add", "content": "4"}, {"role": "tool", "name": "wait", "content": '{"text": "é"}'}],
        None,
    ]
    assert earned == {"score": 1.0, "tool_calls": 2.0, "tool_errors": 0.0}


def test_a_prompt_of_plain_text_is_answered_by_text() -> None:
    heard, _ = play(TOOLS, call("add", a=1, b=3), problem=Problem("Go."))
    assert heard == ["\n4\n"]


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        (call("add", a=1), "Error: Wrong arguments for add: b is missing."),
        (call("fail", how="value"), "Error: ValueError: so it is"),
        (call("fail", how="exit"), "Error: SystemExit: so it is"),
        (call("fail", how="stop"), "Error: RuntimeError: so it is"),
        (call("fail", how="other"), "Error: KeyError: 'other'"),
        (call("half"), "?"),
        (call("long"), f"<{'x' * 49}\n[902 characters left out]\n{'x' * 49}>"),
        (
            call("open"),
            "Error: Call 1 cannot be read: There is no tool 'open'. There are: add, wait, fail, half, long.",
        ),
        ("<tool_call>[", "Error: Call 1 cannot be read: It is not JSON: Expecting value."),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_answered(turn: str, content: str) -> None:
    ((result,),), earned = play(TOOLS, turn)
    assert result["role"] == "tool"
    assert result["content"] == content
    assert earned["tool_errors"] == float(content.startswith("Error"))


def test_a_tool_that_takes_too_long_is_left_behind() -> None:
    never = threading.Event()

    def hang() -> None:
        never.wait()

    async def hang_too() -> None:
        await asyncio.Event().wait()

    environment = tool_environment([hang, hang_too], judged, call_s=0.05)
    heard, _ = play(environment, call("hang") + call("hang_too"))
    never.set()
    assert [result["content"] for result in heard[0]] == [
        "Error: hang took more than 0.05 s.",
        "Error: hang_too took more than 0.05 s.",
    ]


def test_calls_beyond_the_limit_of_a_turn_are_not_run() -> None:
    ran: list[int] = []

    def count(number: int) -> None:
        ran.append(number)

    environment = tool_environment([count], judged, calls_per_turn=2)
    heard, earned = play(environment, "".join(call("count", number=number) for number in range(5)))
    assert ran == [0, 1]
    assert heard[0][2]["content"] == "Error: 3 more calls were not run: a turn may have 2."
    assert earned == {"score": 0.0, "tool_calls": 2.0, "tool_errors": 1.0}


def test_the_episode_ends_with_the_last_turn_that_may_call() -> None:
    heard, earned = play(tool_environment([add], judged, turns=2), *[call("add", a=1, b=1)] * 2)
    assert [result is None for result in heard] == [False, True]
    assert earned["score"] == 0.0


def test_a_reward_may_see_the_whole_episode() -> None:
    seen: list[Any] = []

    async def reward(problem: Problem, completion: str, messages: list[Any]) -> Reward:
        seen.extend(messages)
        return Reward(0.5, "invalid", {"own": 1.0})

    turn = call("add", a=1, b=1)
    _, earned = play(tool_environment([add], reward), turn, "2")
    assert [message["role"] for message in seen] == ["assistant", "tool", "assistant"]
    assert earned == Reward(0.5, "invalid", {"tool_calls": 1.0, "tool_errors": 0.0, "own": 1.0})


class Box:
    """An environment with a state that its tools change."""

    def __init__(self, problem: Problem, size: int = 1) -> None:
        self.inside: list[str] = []
        self.size = size

    def put(self, thing: str) -> str:
        """Put a thing into the box."""
        if len(self.inside) == self.size:
            raise ValueError("The box is full.")
        self.inside.append(thing)
        return ", ".join(self.inside)

    async def look(self) -> list[str]:
        return self.inside

    tools = (put, "look", add)

    async def step(self, turn: str) -> str | None:
        return "Go on." if turn != "end" else None

    def reward(self) -> dict[str, float]:
        return {"score": len(self.inside), "size": self.size}


def test_methods_are_tools_of_their_own_episode() -> None:
    environment = with_tools(Box)
    heard, earned = play(environment, call("put", thing="a") + call("put", thing="b"), call("look"), "well", "end")
    contents = [[result["content"] for result in heard[turn]] for turn in (0, 1)]
    assert contents == [["a", "Error: ValueError: The box is full."], ['["a"]']]
    assert heard[2:] == ["Go on.", None]
    assert earned == {"score": 1, "size": 1, "tool_calls": 3.0, "tool_errors": 1.0}
    assert play(environment, call("look"))[0][0][0]["content"] == "[]"


def test_parameters_reach_the_environment() -> None:
    episode = with_tools(Box)(CHAT, size=3)
    assert asyncio.run(episode.reward()) == {"score": 0, "size": 3, "tool_calls": 0.0, "tool_errors": 0.0}


def test_mistakes_in_the_list_of_tools_are_named() -> None:
    with pytest.raises(ConfigInvalid, match="no method 'jump'"):
        with_tools(Box, ["jump"])
    with pytest.raises(ConfigInvalid, match="Two tools"):
        with_tools(Box, [add, add])
    with pytest.raises(ConfigInvalid, match="no such limits"):
        tool_environment([add], judged, patience=3)
    with pytest.raises(ConfigInvalid, match="cannot be a tool"):
        tool_environment([lambda *any: None], judged)
