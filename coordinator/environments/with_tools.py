"""Environments with tools: the calls in a turn are run, and their results are what the policy reads next.

    class Environment:                      or, without a class:
        tools = [search, "look"]                tools = [search]
        def look(self, at: str): …              def reward(problem, completion): …
        def reward(self): …                     Environment = tool_environment(tools, reward)
    Environment = with_tools(Environment)

- A tool is a function or a method, asynchronous or not; a method may be given by its name.
- A turn with calls is answered by a message of the role `tool` for each, in their order; a prompt that is plain text
  is answered by text. A call that cannot be read, is wrong, raises or takes too long is answered by the error's text.
- A turn without calls goes to the environment's `step`; without one it ends the episode.
- Tools of an episode run one after another. Tools that are not asynchronous run in a thread: those of different
  episodes may run at the same time, and one that takes too long goes on in its thread until the process ends.
- The number of calls, and of those that failed, become components of the reward.
"""

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from coordinator.environments.interface import Earned, Message, Observation
from coordinator.environments.tool_calls import ToolCall, Turn, parse
from coordinator.environments.tool_schemas import BadArguments, Tool, arguments_for, name_of, schema_of
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The limits of one episode, and the format of its calls."""

    turns: int = 16
    """The turns with calls; the episode ends with the last of them."""
    calls_per_turn: int = 8
    result_chars: int = 8192
    """The length of one answer; the middle of a longer one is left out."""
    call_s: float = 10.0
    format: str = "auto"


class ToolEpisode:
    """An episode of an environment with tools."""

    tools: ClassVar[Sequence[Tool | str]] = ()
    limits: ClassVar[ToolLimits] = ToolLimits()
    make: ClassVar[Callable[..., Any]]
    """The class of the environment, which may have no `step`."""

    def __init__(self, problem: Problem, **parameters: Any) -> None:
        self._inner = type(self).make(problem, **parameters)
        self._tools = {name: _bound(self._inner, tool) for name, tool in named_tools(self.make, self.tools).items()}
        self._schemas = [schema_of(tool) for tool in self._tools.values()]
        self._plain = isinstance(problem.prompt, str)
        self._turns = self._calls = self._failed = 0

    async def step(self, turn: str) -> Observation | None:
        """Run the calls of a turn and return their results; a turn without calls goes to the environment."""
        said = parse(turn, self.limits.format, self._schemas)
        if not said.calls and not said.errors:
            step = getattr(self._inner, "step", None)
            return await _awaited(step(turn)) if step else None
        self._turns += 1
        results = await self._results(said)
        if isinstance(self._inner, _LastTurn):
            self._inner.record(turn, results)
        return (_as_text(results) if self._plain else results) if self._turns < self.limits.turns else None

    async def reward(self) -> Earned:
        """Return the environment's reward, with the number of calls as components."""
        earned = await _awaited(self._inner.reward())
        counts = {"tool_calls": float(self._calls), "tool_errors": float(self._failed)}
        if isinstance(earned, Reward):
            return replace(earned, components=counts | dict(earned.components))
        if isinstance(earned, Mapping):
            return counts | dict(earned)
        return {"score": earned} | counts

    async def _results(self, said: Turn) -> list[Message]:
        allowed = self.limits.calls_per_turn
        results: list[Message] = []
        for call in said.calls[:allowed]:
            results.append(await self._result(call))
        errors = list(said.errors)
        if left := len(said.calls) - allowed:
            errors += [f"{left} more calls were not run: a turn may have {allowed}."] * (left > 0)
        self._failed += len(errors)
        return results + [{"role": "tool", "content": f"Error: {text}"} for text in errors]

    async def _result(self, call: ToolCall) -> Message:
        self._calls += 1
        tool = self._tools[call.name]
        try:
            content = _text(await _called(tool, arguments_for(tool, call.arguments), self.limits.call_s))
        except _TooSlow:
            content = f"Error: {call.name} took more than {self.limits.call_s:g} s."
        except BadArguments as error:
            content = f"Error: {error}"
        except (Exception, SystemExit) as error:  # any failure of the operator's tool is an answer to the policy
            content = f"Error: {type(error).__name__}: {_text(error)}"
        self._failed += content.startswith("Error: ")
        return {"role": "tool", "name": call.name, "content": _shortened(content, self.limits.result_chars)}


def with_tools(make: Callable[..., Any], tools: Sequence[Tool | str] | None = None, **limits: Any) -> type[ToolEpisode]:
    """Return the class of an environment whose `tools`, or those given, are run."""
    given = tuple(getattr(make, "tools", ()) if tools is None else tools)
    for tool in named_tools(make, given).values():
        schema_of(tool)  # a function that cannot be a tool is an error now, and not in an episode
    return type("Environment", (ToolEpisode,), {"make": staticmethod(make), "tools": given, "limits": _limits(limits)})


def tool_environment(tools: Sequence[Tool], reward: Callable[..., Any], **limits: Any) -> type[ToolEpisode]:
    """Return the class of an environment that is only its tools and a reward of the last turn.

    `reward(problem, completion)` gets the text of the last turn if it has no calls, else ""; a reward with a parameter
    `messages` gets what was said after the prompt, too.
    """
    return with_tools(functools.partial(_LastTurn, reward), tools, **limits)


class _LastTurn:
    """An environment whose reward is a function of the last turn."""

    def __init__(self, reward: Callable[..., Any], problem: Problem) -> None:
        self._reward, self._problem = reward, problem
        self._wants_messages = "messages" in inspect.signature(reward).parameters
        self._completion = ""
        self._messages: list[Message] = []

    def record(self, turn: str, results: Sequence[Message]) -> None:
        """Record a turn and the results of its calls."""
        self._messages += [{"role": "assistant", "content": turn}, *results]

    def step(self, turn: str) -> None:
        """Record a turn without calls, which is the last."""
        self._completion = turn
        self.record(turn, ())

    def reward(self) -> Any:
        more = {"messages": self._messages} if self._wants_messages else {}
        return self._reward(self._problem, self._completion, **more)


def named_tools(make: Any, tools: Sequence[Tool | str]) -> dict[str, Tool]:
    """Return the tools by their names; those given by a name are methods of the class."""
    named: dict[str, Tool] = {}
    for each in tools:
        tool = getattr(make, each, None) if isinstance(each, str) else each
        if not callable(tool):
            raise ConfigInvalid(f"The environment has no method {each!r} to be a tool.", hint="Check its `tools`.")
        if name_of(tool) in named:
            raise ConfigInvalid(f"Two tools have the name {name_of(tool)!r}.", hint="Rename one of them.")
        named[name_of(tool)] = tool
    return named


def _limits(given: Mapping[str, Any]) -> ToolLimits:
    try:
        return ToolLimits(**given)
    except TypeError:
        known = ", ".join(ToolLimits.__slots__)
        raise ConfigInvalid(f"There are no such limits: {', '.join(given)}.", hint=f"Known: {known}.") from None


def _bound(inner: Any, tool: Tool) -> Tool:
    """Return a tool of the class as a method of the instance, and any other as it is."""
    name = name_of(tool)
    own: Tool = getattr(inner, name, tool)
    return own if getattr(own, "__func__", None) is tool else tool


class _TooSlow(Exception):
    """A tool reached its time limit."""


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _called(tool: Tool, arguments: Mapping[str, Any], limit_s: float) -> Any:
    """Return a tool's result; raise `_TooSlow` after `limit_s`."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments)
            return await _awaited(await _in_thread(functools.partial(tool, **arguments)))
    except TimeoutError:
        if limit.expired():
            raise _TooSlow from None
        raise


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of `work` from a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:  # passed on to the coroutine, which knows what to do with it
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed, and nobody waits for the result
            loop.call_soon_threadsafe(_settle, done, result, error)

    threading.Thread(target=run, daemon=True, name="tool").start()
    return await done


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(RuntimeError(str(error)) if isinstance(error, StopIteration) else error)


def _text(result: Any) -> str:
    """Return a result as text that every encoding accepts."""
    if not isinstance(result, str):
        try:
            result = str(result) if isinstance(result, BaseException) else json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return str(result).encode(errors="replace").decode()


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    first = limit // 2
    return f"{text[:first]}\n[{len(text) - limit} characters left out]\n{text[first - limit :]}"


def _as_text(results: Sequence[Message]) -> str:
    return "".join(f"\n{result['content']}\n" for result in results)
