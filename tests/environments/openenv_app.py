"""A server of OpenEnv with two environments, a program of its own: `python openenv_app.py words|tools SOCKET`."""

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    ListToolsObservation,
    Observation,
    State,
    Tool,
    create_fastapi_app,
)
from openenv.core.env_server.mcp_types import ToolError, ToolErrorType


class GuessAction(Action):  # type: ignore[misc]  # OpenEnv is not in the environment that is type-checked
    """A guess."""

    word: str


class GuessObservation(Observation):  # type: ignore[misc]  # as above
    """The answer to a guess."""

    prompt: str
    tries: int = 0


class Words(Environment):  # type: ignore[misc]  # as above
    """A word of the seed is to be guessed; each guess costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word, self._tries = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> GuessObservation:
        self._word, self._tries = random.Random(seed).choice(["apple", "pear", "plum"]), 0
        return GuessObservation(prompt=f"Guess a fruit of {len(self._word)} letters.")

    def step(self, action: GuessAction, timeout_s: float | None = None, **others: Any) -> GuessObservation:
        if not action.word.isalpha():
            raise ValueError("a guess has only letters")
        self._tries += 1
        right = action.word == self._word
        said = "Right." if right else f"It is not {action.word}."
        reward = (1.0 if right else 0.0) - 0.1
        return GuessObservation(prompt=said, tries=self._tries, done=right, reward=reward)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


class Tools(Environment):  # type: ignore[misc]  # as above
    """A counter with one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Observation:
        self._count = 0
        return Observation(metadata={"note": "kept back"})

    def step(self, action: Action, timeout_s: float | None = None, **others: Any) -> Observation:
        if not isinstance(action, CallToolAction):
            schema = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
            return ListToolsObservation(tools=[Tool(name="count", description="Count on.", input_schema=schema)])
        if action.tool_name != "count" or "by" not in action.arguments:
            error = ToolError(error_type=ToolErrorType.INVALID_ARGS, message=f"cannot call {action.tool_name}")
            return CallToolObservation(tool_name=action.tool_name, result=None, error=error)
        self._count += action.arguments["by"]
        done = self._count >= 10
        return CallToolObservation(tool_name="count", result={"data": self._count}, done=done, reward=float(done))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kinds = {"words": (Words, GuessAction, GuessObservation), "tools": (Tools, Action, Observation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=8)
    listening = socket.socket(fileno=int(sys.argv[2]))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
