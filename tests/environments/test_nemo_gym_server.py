"""A resources server of NeMo-Gym, as its repository describes it: sessions by cookie, tools as endpoints, a verdict."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coordinator.environments import nemo_gym_server
from protocol.errors import ConfigInvalid
from protocol.tasks import Reward
from tests.environments.playing import call, play, problems
from tests.environments.serving import DOWN, served

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add to the counter.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
SECRET = {"type": "function", "name": "verify", "parameters": {"type": "object", "properties": {}}}


def row(number: int) -> dict[str, Any]:
    """Return a row: count from a number to the next ten."""
    asked = {"role": "user", "content": [{"type": "input_text", "text": f"The counter is at {number}: make it 10."}]}
    return {"responses_create_params": {"input": [asked], "tools": [ADD, SECRET]}, "initial": number, "expected": 10}


class CounterServer:
    """The server: a counter per session. Records the path and the body of each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.counters: dict[str, int] = {}
        self.fails = False

    def app(self) -> web.Application:
        app = web.Application()
        routes = {"/seed_session": self.seed, "/add": self.add, "/verify": self.verify}
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        return app

    async def _body(self, request: web.Request) -> Any:
        body = await request.json()
        self.asked.append((request.path, body))
        return body

    async def seed(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        name = f"session-{len(self.counters)}"
        self.counters[name] = body["initial"]
        answer = web.json_response({})
        answer.set_cookie("session", name)
        return answer

    async def add(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if "count" not in body:
            return web.json_response({"detail": "count is missing"}, status=422)
        session = request.cookies["session"]
        self.counters[session] += body["count"]
        return web.json_response({"count": self.counters[session], "done": self.counters[session] >= 10})

    async def verify(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if self.fails:
            return web.json_response(body | {"reward": 0.0, "mask_sample": True, "failure_reason": "lost session"})
        right = float(self.counters[request.cookies["session"]] == body["expected"])
        return web.json_response(body | {"reward": right, "reward_components": {"right": right}})


@pytest.fixture
def counter() -> CounterServer:
    return CounterServer()


@pytest.fixture
def settings(counter: CounterServer, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row(number)) for number in (3, 4, 5)))
    with served(counter.app()) as url:
        yield {"url": url, "data": {"train": str(tmp_path / "train.jsonl")}}


def test_rows_become_prompts_with_tools(settings: dict[str, Any]) -> None:
    first, _, third = problems(nemo_gym_server, **settings)
    assert first.prompt[0] == ("user", "The counter is at 3: make it 10.")
    assert third.columns["row"] == row(5)
    assert first.columns["tools"][0]["function"]["parameters"] == ADD["parameters"]


def test_an_episode_is_a_session_with_a_verdict(counter: CounterServer, settings: dict[str, Any]) -> None:
    first, second, _ = problems(nemo_gym_server, **settings)

    won = play(nemo_gym_server, first, ["Hm." + call("add", count=4) + call("add", count=3), "It is 10."], **settings)
    assert won.read == [
        [
            {"role": "tool", "name": "add", "content": '{"count": 7, "done": false}'},
            {"role": "tool", "name": "add", "content": '{"count": 10, "done": true}'},
        ],
        None,
    ]
    assert won.earned == Reward(1.0, "ok", {"tool_calls": 2.0, "tool_errors": 0.0, "right": 1.0})
    assert [path for path, _ in counter.asked] == ["/seed_session", "/add", "/add", "/verify"]
    body = counter.asked[-1][1]
    assert body["initial"] == 3
    kinds = ["message", "function_call", "function_call", "function_call_output", "function_call_output", "message"]
    output = body["response"]["output"]
    assert [item["type"] for item in output] == kinds
    assert [item["call_id"] for item in output[1:3]] == [item["call_id"] for item in output[3:5]]
    assert output[-1]["content"][0]["text"] == "It is 10."

    assert play(nemo_gym_server, second, ["It is 10."], **settings).score == 0.0
    assert play(nemo_gym_server, second, [call("add", count=6)], **settings).score == 1.0  # cut off


def test_a_tool_that_says_done_can_end_the_episode(settings: dict[str, Any]) -> None:
    first, *_ = problems(nemo_gym_server, **settings)
    played = play(nemo_gym_server, first, [call("add", count=7), "More."], **settings, done_flag=True)
    assert played.read == [None]
    assert played.score == 1.0


def test_a_bad_call_is_answered_and_no_policy_reaches_the_verdict(
    counter: CounterServer, settings: dict[str, Any]
) -> None:
    first, *_ = problems(nemo_gym_server, **settings)
    turns = [
        call("add"),
        call("seed_session", initial=10),
        call("verify", reward=1),
        call("../add"),
        "<tool_call>x",
        ".",
    ]
    played = play(nemo_gym_server, first, turns, **settings)
    read = played.read
    assert read[0] == [{"role": "tool", "name": "add", "content": '{"detail": "count is missing"}'}]
    assert all("There is no tool" in each[0]["content"] for each in read[1:4])
    assert [path for path, _ in counter.asked] == ["/seed_session", "/add", "/verify"]
    assert isinstance(played.earned, Reward)
    assert played.earned.components["tool_errors"] == 5.0


def test_the_same_turns_are_answered_the_same(settings: dict[str, Any]) -> None:
    first, *_ = problems(nemo_gym_server, **settings)
    turns = [call("add", count=4), call("add"), call("add", count=3), "Done."]
    assert play(nemo_gym_server, first, turns, **settings) == play(nemo_gym_server, first, turns, **settings)


def test_a_masked_sample_is_no_reward_of_zero(counter: CounterServer, settings: dict[str, Any]) -> None:
    first, *_ = problems(nemo_gym_server, **settings)
    counter.fails = True
    assert play(nemo_gym_server, first, ["."], **settings).earned == Reward(
        0.0, "verifier_error", reason="lost session"
    )


def test_a_server_that_is_down_or_refuses_is_named(settings: dict[str, Any]) -> None:
    first, *_ = problems(nemo_gym_server, **settings)
    with pytest.raises(ConfigInvalid, match="does not answer") as caught:
        problems(nemo_gym_server, **settings | {"url": DOWN})
    assert "task.parameters.url" in str(caught.value.hint)
    with pytest.raises(ConfigInvalid, match="does not answer"):
        play(nemo_gym_server, first, ["."], **settings | {"url": DOWN})
    with pytest.raises(ConfigInvalid, match=r"refused /seed_session \(404\)"):
        play(nemo_gym_server, first, ["."], **settings | {"url": settings["url"] + "/elsewhere"})
    with pytest.raises(ConfigInvalid, match="no responses_create_params"):
        problems(nemo_gym_server, **settings | {"data": f"{Path(__file__).with_name('trl_task.py')}:problems"})
