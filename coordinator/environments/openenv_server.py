"""Environments of an OpenEnv server, which runs elsewhere, over its WebSocket.

    [task.parameters]
    url = "http://127.0.0.1:8000"
    prompt = ""                 text before the first observation
    resets = [{seed = 1}, …]    arguments of `reset`, one row each; without it, a seed for each row
    action = "message"          the field of an action that a turn fills; without it, the only required one
    text = "prompt"             the field of an observation that the policy reads; without it, all of it as JSON
    reward = "sum"              of all steps, or "last"
    timeout_s = 60              of each answer

- An episode is a connection. A turn is an action: a JSON object, or the text of the one field.
- A server with tools lists them for the chat template; a turn is then the tool calls in it, or the end.
- An action that the server refuses is answered with its error. It costs nothing but the turn.
- The number of calls and of those that failed, or of refused actions, become components of the reward.
- The connection is read at all times, since the server closes one that answers no pings.
"""

import asyncio
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import aiohttp

from coordinator.environments.adapting import Row, ToolCalls, ToolResult, later, on_loop, run, seeds, unreachable
from coordinator.environments.interface import Message
from coordinator.environments.tool_calls import parse
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem

MESSAGE_MAX_BYTES = 16 << 20
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""The titles of action schemas that mean tools."""

KEPT_BACK = ("reward", "done", "metadata")
"""Fields of an observation that are not for the policy."""


def problems(
    split: str,
    seed: int,
    size: int,
    *,
    url: str,
    prompt: str = "",
    resets: Sequence[Row] = (),
    text: str = "",
    timeout_s: float = 60.0,
    **others: Any,
) -> Iterator[Row]:
    """Return an episode for each reset of the split; the prompt is the first observation."""
    chosen = [{"seed": each} for each in seeds(split, seed, size)]
    if resets:
        chosen = [dict(each) for number, each in enumerate(resets) if _is_of(number, len(resets), split)][:size]
    described = run(_described(url, timeout_s))
    for reset in chosen:
        opening = "\n\n".join(filter(None, [prompt, run(_opening(url, timeout_s, reset, text))]))
        yield {"prompt": [{"role": "user", "content": opening}], "reset": reset} | described


def _is_of(number: int, count: int, split: str) -> bool:
    """Return True for the split of a reset: the last tenth is held out, the tenth before it is for validation."""
    tenth = count // 10
    part = "held_out" if number >= count - tenth else "validation" if number >= count - 2 * tenth else "train"
    return part == split


async def _described(url: str, timeout_s: float) -> Row:
    """Return the schemas of the tools, and the required fields of an action."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as session,
            session.get(f"{url.rstrip('/')}/schema") as answer,
        ):
            answer.raise_for_status()
            action = (await answer.json())["action"]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise unreachable("OpenEnv", url, error) from error
    if action.get("title") not in TOOL_ACTIONS:
        return {"fields": action.get("required", []), "tools": []}
    connection = await _Connection.open(url, timeout_s)
    try:
        listed = (await connection.ask("step", {"type": "list_tools"}))["observation"].get("tools", [])
    finally:
        connection.close()
    return {"fields": [], "tools": [_schema(each) for each in listed]}


def _schema(tool: Row) -> Row:
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


async def _opening(url: str, timeout_s: float, reset: Row, text: str) -> str:
    connection = await _Connection.open(url, timeout_s)
    try:
        return _read((await connection.ask("reset", reset))["observation"], text)
    finally:
        connection.close()


def _read(observation: Row, text: str) -> str:
    """Return what the policy reads of an observation."""
    if not text:
        return json.dumps({name: each for name, each in observation.items() if name not in KEPT_BACK})
    if text not in observation:
        raise ConfigInvalid(
            f"An observation has no field {text!r}.",
            hint=f"Set task.parameters.text to one of: {', '.join(observation)}.",
        )
    return str(observation[text])


def _result(observation: Row) -> str:
    """Return what a tool gave: its error, its data, or all of the observation."""
    if error := observation.get("error"):
        return f"Error: {error['message']}"
    result = observation.get("result", observation)
    data = result.get("data", result) if isinstance(result, dict) else result
    return data if isinstance(data, str) else json.dumps(data)


class ActionRefused(Exception):
    """The server could not read an action, or failed at it."""


class _Connection:
    """A session of the server: questions and answers in turn."""

    def __init__(self, url: str, session: aiohttp.ClientSession, socket: Any, timeout_s: float) -> None:
        self._url, self._session, self._socket, self._timeout_s = url, session, socket, timeout_s
        self._answers = asyncio.Queue[Row | None]()
        self._reader = asyncio.create_task(self._listen())

    @classmethod
    async def open(cls, url: str, timeout_s: float) -> "_Connection":
        session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(timeout_s):
                socket = await session.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=MESSAGE_MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await session.close()
            raise unreachable("OpenEnv", url, error) from error
        return cls(url, session, socket, timeout_s)

    async def _listen(self) -> None:
        try:
            async for message in self._socket:
                self._answers.put_nowait(json.loads(message.data))
        finally:
            self._answers.put_nowait(None)
            await self._socket.close()
            await self._session.close()

    async def ask(self, kind: str, data: Row) -> Row:
        """Return the data of the answer to a message."""
        try:
            await self._socket.send_json({"type": kind, "data": data})
            async with asyncio.timeout(self._timeout_s):
                answer = await self._answers.get()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable("OpenEnv", self._url, error) from error
        if answer is None:
            raise unreachable("OpenEnv", self._url, ConnectionError("it closed the connection"))
        if answer["type"] != "error":
            return dict(answer["data"])
        said = answer["data"]
        if said.get("code") in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
            raise unreachable("OpenEnv", self._url, RuntimeError(said["message"]))
        raise ActionRefused("; ".join([said["message"], *(str(each.get("msg")) for each in said.get("errors", ()))]))

    def close(self) -> None:
        self._reader.cancel()


class OpenEnvEpisode:
    """A connection in which an episode is played."""

    def __init__(
        self,
        problem: Problem,
        url: str,
        prompt: str = "",
        resets: Any = (),
        action: str = "",
        text: str = "",
        reward: Literal["sum", "last"] = "sum",
        timeout_s: float = 60.0,
    ) -> None:
        columns = problem.columns
        self._reset, self._tools, self._url, self._timeout_s = columns["reset"], columns["tools"], url, timeout_s
        self._field = action or (columns["fields"][0] if len(columns["fields"]) == 1 else "")
        self._text, self._sums = text, reward == "sum"
        self._connection: _Connection | None = None
        self._close: weakref.finalize[[Any], OpenEnvEpisode] | None = None
        self._done = False
        self._earned, self._refused = 0.0, 0
        self._calls = ToolCalls(self._call)

    async def step(self, turn: str) -> str | list[Message] | None:
        return await on_loop(self._step(turn))

    async def reward(self) -> dict[str, float]:
        if self._close is not None:
            self._close()
        counts = self._calls.components if self._tools else {"refused": float(self._refused)}
        return {"score": self._earned} | counts

    async def _step(self, turn: str) -> str | list[Message] | None:
        if self._connection is None:
            self._connection = await _Connection.open(self._url, self._timeout_s)
            self._close = weakref.finalize(self, later, self._connection.close)
            self._close.atexit = False
            await self._connection.ask("reset", self._reset)
        if self._tools:
            results = await self._calls.messages(parse(turn, tools=self._tools))
            return None if results is None or self._done else list(results)
        try:
            read = await self._act(self._action(turn))
        except ActionRefused as error:
            self._refused += 1
            return f"Error: {error}"
        return None if self._done else read

    def _action(self, turn: str) -> Row:
        try:
            value = json.loads(turn.strip().removeprefix("```json").removeprefix("```").removesuffix("```"))
        except (ValueError, RecursionError):
            value = turn
        if isinstance(value, dict):
            return value
        if not self._field:
            raise ActionRefused("An action must be a JSON object.")
        return {self._field: turn}

    async def _act(self, action: Row) -> str:
        assert self._connection is not None
        answer = await self._connection.ask("step", action)
        observation = answer["observation"]
        earned = float(answer.get("reward") or 0.0)
        self._earned = self._earned + earned if self._sums else earned
        self._done = bool(answer.get("done"))
        return _result(observation) if self._tools else _read(observation, self._text)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            text = await self._act({"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        except ActionRefused as error:
            text = f"Error: {error}"
        return ToolResult(text, failed=text.startswith("Error: "))


Environment = OpenEnvEpisode
