"""Environments of a NeMo-Gym resources server, which runs elsewhere, over HTTP.

    [task.parameters]
    url = "http://127.0.0.1:9000"
    data = "rows.jsonl"       rows as NeMo-Gym's agents read them: `responses_create_params`, and what the server needs
    done_flag = false         true if the result {"done": true} of a tool ends the episode
    timeout_s = 60            of each request

- An episode is a session: POST /seed_session with the row, POST /TOOL for each tool call, POST /verify with the row and
  the whole response. The server's cookies identify it.
- It ends with a turn without tool calls. The policy reads the body of a tool's answer, also if the call has failed.
- The number of calls, and of those that failed, become components of the reward.
- `mask_sample` in the verdict means that the server failed, not the policy.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp

from coordinator.environments.adapting import (
    Row,
    ToolCalls,
    ToolResult,
    messages,
    on_loop,
    run,
    source_rows,
    unreachable,
)
from coordinator.environments.interface import Message
from coordinator.environments.tool_calls import ToolCall, Turn, parse
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

RESERVED = ("seed_session", "verify", "close_session", "aggregate_metrics", "sandbox_access")
"""Endpoints that are no tools."""


def problems(
    split: str, seed: int, size: int, *, url: str, data: str | Mapping[str, str], **others: Any
) -> Iterator[Row]:
    """Return the rows of a split, with their messages as the prompt; the server must run already."""
    run(_reach(url))
    for row in source_rows(data, split, seed, size):
        asked = row.get("responses_create_params")
        if not isinstance(asked, dict) or "input" not in asked:
            raise ConfigInvalid(f"A row of {data} has no responses_create_params.input, as NeMo-Gym's rows have.")
        prompt = [{"role": each["role"], "content": _text(each["content"])} for each in messages(asked["input"])]
        if asked.get("instructions"):
            prompt.insert(0, {"role": "system", "content": asked["instructions"]})
        tools = [_schema(each) for each in asked.get("tools") or [] if _is_tool(each)]
        yield {"prompt": prompt, "tools": tools, "row": row}


async def _reach(url: str) -> None:
    try:
        async with aiohttp.ClientSession() as session, session.get(url):  # any answer proves that a server is there
            pass
    except (aiohttp.ClientError, OSError) as error:
        raise unreachable("NeMo-Gym", url, error) from error


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _is_tool(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function" and tool["name"] not in RESERVED  # else a policy could judge itself


def _schema(tool: Mapping[str, Any]) -> Row:
    named = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)}
    return {"type": "function", "function": named}


class NemoGymEpisode:
    """A session of the server."""

    def __init__(
        self, problem: Problem, url: str, data: Any = None, done_flag: bool = False, timeout_s: float = 60.0
    ) -> None:
        self._row: Row = dict(problem.columns["row"])
        self._url, self._timeout, self._ends_by_flag = url.rstrip("/"), aiohttp.ClientTimeout(timeout_s), done_flag
        self._schemas = problem.columns["tools"]
        self._tools = {each["function"]["name"] for each in self._schemas}
        self._cookies = dict[str, str]()
        self._output = list[Row]()
        self._calls = ToolCalls(self._call)
        self._seeded = self._done = False

    async def step(self, text: str) -> list[Message] | None:
        return await on_loop(self._step(text))

    async def reward(self) -> Reward:
        return await on_loop(self._verify())

    async def _step(self, text: str) -> list[Message] | None:
        await self._seed()
        turn = parse(text, tools=self._schemas)
        self._output += _items(turn, len(self._output))
        read = await self._calls.messages(turn)
        return None if read is None or self._done else list(read)

    async def _seed(self) -> None:
        if not self._seeded:
            await self._post("seed_session", self._row)
            self._seeded = True

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        unknown = json.dumps({"error": f"There is no tool {name}. Tools: {', '.join(sorted(self._tools))}."})
        result = ToolResult(unknown, failed=True)
        if name in self._tools:
            result = await self._post(name, dict(arguments), fails=False)
        calls = [item["call_id"] for item in self._output if item["type"] == "function_call"]
        answered = sum(item["type"] == "function_call_output" for item in self._output)
        self._output.append({"type": "function_call_output", "call_id": calls[answered], "output": result.text})
        self._done |= self._ends_by_flag and _says_done(result.text)
        return result

    async def _verify(self) -> Reward:
        await self._seed()
        asked = self._row["responses_create_params"]
        response = {
            "id": "resp_0",
            "created_at": 0,
            "model": asked.get("model") or "policy",
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools") or [],
        }
        verdict = json.loads((await self._post("verify", self._row | {"response": response})).text)
        if verdict.get("mask_sample"):
            reason = str(verdict.get("failure_reason") or verdict.get("failure_kind") or "masked by the server")
            return Reward(0.0, "verifier_error", reason=reason)
        parts = {name: float(value) for name, value in (verdict.get("reward_components") or {}).items()}
        return Reward(float(verdict["reward"]), "ok", self._calls.components | parts)

    async def _post(self, path: str, body: Row, *, fails: bool = True) -> ToolResult:
        try:
            async with (
                aiohttp.ClientSession(cookies=self._cookies, timeout=self._timeout) as session,
                session.post(f"{self._url}/{path}", json=body) as answer,
            ):
                content = await answer.text()
                self._cookies |= {name: each.value for name, each in answer.cookies.items()}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable("NeMo-Gym", self._url, error) from error
        if fails and answer.status >= 400:
            raise ConfigInvalid(f"The NeMo-Gym server refused /{path} ({answer.status}): {content[:300]}")
        return ToolResult(content, failed=answer.status >= 400)


def _items(turn: Turn, at: int) -> list[Row]:
    """Return a turn as items of a response."""
    part = {"type": "output_text", "text": turn.content, "annotations": []}
    message = {"id": f"msg_{at}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    said: list[Row] = [message] if turn.content or not turn.calls else []
    return said + [_call_item(each, f"call_{at}_{number}") for number, each in enumerate(turn.calls)]


def _call_item(call: ToolCall, call_id: str) -> Row:
    arguments = json.dumps(dict(call.arguments))
    return {"type": "function_call", "call_id": call_id, "name": call.name, "arguments": arguments}


def _says_done(result: str) -> bool:
    try:
        value = json.loads(result)
    except ValueError:
        return False
    return isinstance(value, dict) and bool(value.get("done"))


Environment = NemoGymEpisode
