"""The example with tools plays as its file says, and a policy that knows little can learn from it step by step."""

import asyncio
import json
from typing import Any

from coordinator.tasks.reward_functions import module
from protocol.tasks import ChatMessage, Problem

EXAMPLE: Any = module("examples/tools.py")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def earned(*turns: str) -> float:
    async def played() -> float:
        episode = EXAMPLE.Environment(Problem((ChatMessage("user", "What do 3 pears cost?"),), "21"))
        for turn in turns:
            await episode.step(turn)
        score: float = (await episode.reward())["score"]
        return score

    return asyncio.run(played())


def test_each_step_towards_the_answer_earns_more() -> None:
    look, multiply = call("price", fruit="pear"), call("calculate", a=7, operation="*", b=3)
    games = [("nothing",), (look,), (look, multiply), (look, multiply, "It is 21 ."), (look, multiply, "21")]
    scores = [earned(*turns) for turns in games]
    assert scores == sorted(set(scores))
    assert (scores[0], scores[-1]) == (0.0, 1.0)
    assert earned(call("price", fruit="kiwi"), call("open")) == 0.0


def test_questions_are_in_one_split_and_bring_the_schemas() -> None:
    splits = [list(EXAMPLE.problems(split, 0)) for split in ("held_out", "validation", "train")]
    questions = [row["prompt"][0]["content"] for rows in splits for row in rows]
    assert len(questions) == len(set(questions)) == len(EXAMPLE.BASKETS)
    assert [tool["function"]["name"] for tool in splits[0][0]["tools"]] == ["price", "calculate"]
