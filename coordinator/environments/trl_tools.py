"""Environments and tools in the convention of TRL's `environment_factory` and `tools`, without TRL itself.

    [task.parameters]
    factory = "my_task.py:Shop"      or  tools = ["my_task.py:add", …]
    data = "rows.jsonl"              or  "my_task.py:problems"
    reward = "my_task.py:reward"     or a list; without it, the attribute `reward` of the instance

- `Shop()` is one episode. `reset(**row)` begins it and returns text that follows the prompt, or None: the same for the
  same row. All other public methods are tools.
- The episode ends with a turn without tool calls. An exception of a tool is its result, for the policy to read.
- The number of calls, and of those that failed, become components of the reward.
- A reward function gets lists of one: `prompts`, `completions`, `environments`, and each column of the row.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coordinator.environments.adapting import (
    Row,
    ToolCalls,
    ToolResult,
    messages,
    operator_object,
    settled,
    source_rows,
)
from coordinator.environments.interface import Message
from coordinator.environments.tool_calls import parse
from coordinator.environments.tool_schemas import schema_of
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem

Tools = Mapping[str, Callable[..., Any]]


def problems(split: str, seed: int, size: int, *, data: str | Mapping[str, str], **parameters: Any) -> Iterator[Row]:
    """Return the rows of a split, with what `reset` adds to the prompt and the schemas of the tools."""
    for row in source_rows(data, split, seed, size):
        if "prompt" not in row:
            raise ConfigInvalid(f"A row of {data} has no prompt: its columns are {', '.join(row)}.")
        opened = _Opened(row, **parameters)
        said = messages(row["prompt"])
        said[-1] = said[-1] | {"content": said[-1]["content"] + opened.opening}
        schemas = [schema_of(each) for each in opened.tools.values()]
        yield {
            "prompt": said, "answer": row.get("answer"), "tools": schemas, "row": row, "opening": opened.opening
        }  # fmt: skip


class _Opened:
    """An instance after its reset, or functions without an instance."""

    def __init__(self, row: Row, factory: str = "", tools: Sequence[str] = (), reward: Any = ()) -> None:
        if bool(factory) == bool(tools):
            raise ConfigInvalid("Tools in TRL's convention need `factory` or `tools`, and not both.")
        if tools and not reward:
            raise ConfigInvalid("`tools` have no state to read a reward from.", hint='Set reward = "file.py:function".')
        self.instance = operator_object(factory)() if factory else None
        self.opening = ""
        if self.instance is None:
            self.tools: Tools = {each.__name__: each for each in map(operator_object, tools)}
            return
        opening = self.instance.reset(**row)
        if not isinstance(opening, str | None):
            raise ConfigInvalid(f"{factory}: reset returned {type(opening).__name__}, not text or None.")
        self.opening = opening or ""
        public = inspect.getmembers(self.instance, inspect.ismethod)
        self.tools = {name: each for name, each in public if not name.startswith("_") and name != "reset"}


class TrlEpisode:
    """An episode of an environment class, or of tools without state."""

    def __init__(self, problem: Problem, data: Any = None, reward: str | Sequence[str] = (), **parameters: Any) -> None:
        self._row: Row = dict(problem.columns["row"])
        opened = _Opened(self._row, reward=reward, **parameters)
        if opened.opening != problem.columns["opening"]:
            raise RuntimeError("reset must return the same text for the same row, or no episode can be played again.")
        self._instance, self._tools = opened.instance, opened.tools
        self._rewards = [operator_object(each) for each in ([reward] if isinstance(reward, str) else reward) if each]
        self._prompt, self._schemas = messages(problem.prompt), problem.columns["tools"]
        self._said = list[dict[str, Any]]()
        self._calls = ToolCalls(self._call)

    async def step(self, text: str) -> list[Message] | None:
        turn = parse(text, tools=self._schemas)
        calls = [
            {"type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
            for each in turn.calls
        ]
        said = {"role": "assistant", "content": turn.content}
        self._said.append(said | ({"tool_calls": calls} if calls else {}))
        read = await self._calls.messages(turn)
        self._said += read or []
        return list(read) if read is not None else None

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._tools:
            return ToolResult(str({"error": f"There is no tool {name}. Tools: {', '.join(self._tools)}."}), failed=True)
        try:
            return ToolResult(str(await settled(self._tools[name](**arguments))))
        except Exception as error:  # the convention: whatever a tool raises, the policy reads
            return ToolResult(str({"error": str(error)}), failed=True)

    async def reward(self) -> dict[str, float]:
        counts = self._calls.components
        if not self._rewards:
            return {"score": float(self._instance.reward)} | counts  # type: ignore[union-attr]  # there is an instance
        given: dict[str, Any] = {name: [value] for name, value in self._row.items() if name != "prompt"}
        given |= {"prompts": [self._prompt], "completions": [self._said]}
        if self._instance is not None:
            given["environments"] = [self._instance]
        earned = {each.__name__: float((await settled(each(**given)))[0]) for each in self._rewards}
        return {"score": sum(earned.values())} | counts | (earned if len(earned) > 1 else {})


Environment = TrlEpisode
