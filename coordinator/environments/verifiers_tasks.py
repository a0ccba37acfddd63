"""Environments of verifiers (0.4, `verifiers.v1`): tasks with tools and users, scored by their own rewards.

    [task.parameters]
    id = "textarena"       an installed taskset
    args = {}              its settings
    environment = ""       an installed environment for it, if not its own
    config = {}            settings of the environment, such as the model of a judge: {judge = {client = {…}}}

- verifiers plays an episode as one program that calls a model. Here the model is a desk: the call waits there until
  `step` brings the policy's turn, and what the next call adds is what the policy reads.
- One seat is the policy's: the only one without a client of its own.
- A tenth of the tasks, by their numbers, is held out, another tenth is for validation.
- An episode that is cut off is scored as it stands. A failure of the environment is no reward of zero.
"""

import asyncio
import json
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from aiohttp import web

from coordinator.environments.adapting import Row, later, library, on_loop, run, split_of
from coordinator.environments.interface import Message
from coordinator.environments.tool_calls import parse
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

HARNESS = "echo_swarm_desk"
"""The name by which verifiers finds our program: it imports programs by a name without dots."""

REQUEST_MAX_BYTES = 64 << 20


def problems(split: str, seed: int, size: int, *, id: str, **parameters: Any) -> Iterator[Row]:
    """Return the tasks of a split, each with the messages and tools of its first model call."""
    stage = _stage(id, json.dumps(parameters, sort_keys=True))
    numbers = (number for number in stage.numbers() if split_of([id, number]) == split)
    as_written, tools = False, list[Row]()
    for place, number in enumerate(islice(numbers, size)):
        task = stage.task(number)
        written = _written(task)
        if place == 0 or not (as_written and written):
            opened, tools = run(stage.opening(task))
            as_written, written = opened == written, opened
        yield {"prompt": written, "tools": tools, "task": number, "key": task.key}


def _written(task: Any) -> list[Message]:
    """Return the first messages of a task as its data has them; none if the environment makes them."""
    prompt, system = task.data.prompt, task.data.system_prompt
    first = [{"role": "system", "content": system}] if system else []
    said = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [_plain(vars(each)) for each in prompt or []]
    )
    return [*first, *said] if said else []


def _plain(message: Mapping[str, Any]) -> Message:
    """Return a message with its text only."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "\n".join(part["text"] if isinstance(part, dict) else part.text for part in parts)
    named = {"name": message["name"]} if message.get("name") else {}
    return {"role": message["role"], "content": text} | named


class _Desk:
    """The model calls of an episode, which wait for the policy's turns."""

    def __init__(self) -> None:
        self.calls = asyncio.Queue[Row | None]()  # None: the episode is over
        self.turns = asyncio.Queue[Row | None]()  # None: it is cut off
        self.traces = list[Any]()
        self.play: asyncio.Task[Any] | None = None

    async def answer(self, call: Row) -> Row | None:
        self.calls.put_nowait(call)
        return await self.turns.get()

    def cut(self) -> None:
        """End the episode without a score."""
        if self.play is not None:
            self.play.cancel()


class _Stage:
    """An environment of verifiers that is served, with its tasks and the desks of its episodes."""

    def __init__(self, id: str, args: Any = None, environment: str = "", config: Any = None) -> None:
        self._library = library("verifiers.v1", "verifiers")
        self._id = id
        sys.modules.setdefault(HARNESS, library("coordinator.environments.verifiers_harness", "verifiers"))
        library("coordinator.environments.verifiers_runtime", "verifiers").replace_local_runtime()
        asked = (config or {}) | {
            "taskset": {"id": id} | (args or {}),
            "id": environment,
            "interception": {"type": "server"},
        }
        try:
            settings = self._library.resolve_env_config(asked)
            self.seat = self._seat(settings)
            self.environment = self._library.load_environment(settings)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigInvalid(
                f"verifiers cannot load {id!r}: {said}", hint="Install the package of the taskset, and check its args."
            ) from error
        self._loading, self._tasks = iter(self.environment.taskset), list[Any]()
        self._desks = dict[str, _Desk]()
        run(self._serve())

    def _seat(self, settings: Any) -> str:
        """Return the name of the policy's seat, and seat our program there."""
        seats = {name: seat for name, seat in settings if isinstance(seat, self._library.AgentConfig)}
        free = [name for name, seat in seats.items() if seat.client is None]
        if len(free) != 1:
            raise ValueError(f"one seat must be the policy's, the others need a client; without one: {', '.join(free)}")
        harness, runtime = self._library.HarnessConfig(id=HARNESS), self._library.SubprocessConfig()
        setattr(settings, free[0], seats[free[0]].model_copy(update={"harness": harness, "runtime": runtime}))
        return str(free[0])

    async def _serve(self) -> None:
        app = web.Application(client_max_size=REQUEST_MAX_BYTES)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = self._library.EvalClientConfig(
            base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var="NONE"
        )
        self._context = self._library.ModelContext(model="policy", client=client)
        self._serving = self.environment.serving()  # until the process ends
        await self._serving.__aenter__()

    async def _answer(self, request: web.Request) -> web.Response:
        desk = self._desks[request.headers["X-Session-ID"]]
        said = await desk.answer(await request.json())
        if said is None:
            return web.json_response({"error": {"message": "the episode is cut off"}}, status=400)
        ends = "tool_calls" if said.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": ends, "message": said}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        made = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(made | {"choices": [choice], "usage": usage})

    def numbers(self) -> Iterator[int]:
        """Yield the number of each task; a taskset may be endless."""
        number = 0
        while self._load(number):
            yield number
            number += 1

    def _load(self, number: int) -> bool:
        self._tasks += islice(self._loading, max(0, number + 1 - len(self._tasks)))
        return number < len(self._tasks)

    def task(self, number: int) -> Any:
        if not self._load(number):
            raise ConfigInvalid(f"{self._id} has only {len(self._tasks)} tasks: it has changed since the round began.")
        return self._tasks[number]

    def begin(self, task: Any) -> _Desk:
        """Return the desk of a new episode."""
        desk = _Desk()
        desk.play = asyncio.get_running_loop().create_task(self._play(task, desk))
        return desk

    async def _play(self, task: Any, desk: _Desk) -> Any:
        def minted(trace: Any) -> None:
            if trace.agent.name == self.seat:
                self._desks[trace.id] = desk
                desk.traces.append(trace)

        try:
            return await self.environment.run_episode(task, self._context, on_trace=minted)
        finally:
            desk.calls.put_nowait(None)
            for trace in desk.traces:
                del self._desks[trace.id]

    async def opening(self, task: Any) -> tuple[list[Message], list[Row]]:
        """Return the messages and the tools of the first model call of a task."""
        desk = self.begin(task)
        assert desk.play is not None
        if (call := await desk.calls.get()) is None:
            raise ConfigInvalid(f"{self._id}: task {task.data.idx} cannot be played: {_fault(await desk.play)}")
        desk.cut()
        await asyncio.wait([desk.play])
        return [_plain(each) for each in call["messages"]], call.get("tools") or []


@lru_cache(maxsize=8)
def _stage(id: str, parameters: str) -> _Stage:
    return _Stage(id, **json.loads(parameters))


def _fault(episode: Any) -> str:
    """Return the first error of an episode."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "it asked for no turn"


class VerifiersEpisode:
    """An episode of a task, whose model is the policy."""

    def __init__(self, problem: Problem, id: str, **parameters: Any) -> None:
        self._stage = _stage(id, json.dumps(parameters, sort_keys=True))
        self._task = self._stage.task(int(problem.columns["task"]))
        if self._task.key != problem.columns["key"]:
            raise ConfigInvalid(f"Task {problem.columns['task']} of {id} has changed since the round began.")
        self._schemas = problem.columns["tools"]
        self._desk: _Desk | None = None
        self._known = list[Message]()
        self._turns = 0

    async def step(self, turn: str) -> list[Message] | None:
        return await on_loop(self._step(turn))

    async def reward(self) -> Reward:
        return await on_loop(self._score())

    async def _step(self, turn: str) -> list[Message] | None:
        if self._desk is None:
            self._desk = self._stage.begin(self._task)
            weakref.finalize(self, later, self._desk.cut).atexit = False
            if (call := await self._desk.calls.get()) is None:
                return None  # the reward says why
            self._known = [_plain(each) for each in call["messages"]]
        said = self._said(turn)
        self._desk.turns.put_nowait(said)
        if (call := await self._desk.calls.get()) is None:
            return None
        messages = [_plain(each) for each in call["messages"]]
        new = messages[len(self._known) + 1 :]
        if messages[: len(self._known)] != self._known or not new:
            raise RuntimeError("The environment rewrote what the policy had read; such episodes cannot be played here.")
        self._known = messages
        return new

    def _said(self, turn: str) -> Row:
        """Return a turn as a message of a model."""
        from coordinator.environments.verifiers_harness import UNREADABLE

        self._turns += 1
        read = parse(turn, tools=self._schemas)
        named = [(each.name, dict(each.arguments)) for each in read.calls]
        named += [(UNREADABLE, {"error": each}) for each in read.errors]
        calls = [
            {
                "id": f"call_{self._turns}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(each)},
            }
            for number, (name, each) in enumerate(named)
        ]
        return {"role": "assistant", "content": read.content} | ({"tool_calls": calls} if calls else {})

    async def _score(self) -> Reward:
        if self._desk is None or self._desk.play is None:
            return Reward(0.0, "invalid")
        self._desk.turns.put_nowait(None)
        episode = await self._desk.play
        if not episode.ok or not self._desk.traces:
            return Reward(0.0, "verifier_error", reason=_fault(episode))
        trace = self._desk.traces[-1]
        parts = {name: each.value for name, each in trace.rewards.items() if each is not None}
        measured = {name: float(each) for name, each in trace.metrics.items() if each is not None}
        return Reward(float(trace.reward), "ok", measured | parts)


Environment = VerifiersEpisode
