"""The interface of environments: the same for a file of the operator, for a library's environments, and for our games.

A module with an environment has two names:

    def problems(split, seed): …           yields rows, as a task file does: "prompt" is what the policy reads first
    class Environment:                     one instance is one episode
        def __init__(self, problem, **parameters): …
        def step(self, turn): …            what the policy reads next, or None at the end
        def reward(self): …                the reward of the episode so far

- `step` gets the text of a turn without its end token; markers such as those around tool calls are visible.
- It returns text, or chat messages if the prompt has messages. Text after a prompt of messages is a user's message.
- The samples of a group are episodes of the same problem, each with its own instance.
- All chance comes from the problem: an episode that is played again with the same turns must answer the same. So it
  can go on in another process after a crash.
- Both methods may be coroutines. An exception costs the group, never the node that sampled it.
- An optional attribute `tools` of the rows, a list of JSON schemas, goes to the policy's chat template.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from protocol.tasks import Reward

Message = Mapping[str, Any]
"""A chat message: `role` and `content`, and what else the policy's chat template knows."""

Observation = str | Sequence[Message]

Earned = float | Mapping[str, float] | Reward
"""A score; or a score with components, `{"score": 1.0, "moves": 12}`; or a whole reward."""


class Environment(Protocol):
    """An episode in progress."""

    def step(self, turn: str) -> Observation | Awaitable[Observation | None] | None:
        """Take a turn; return what the policy reads next, or None if this turn was the last."""

    def reward(self) -> Earned | Awaitable[Earned]:
        """Return the reward of the episode so far; an episode that was cut off is judged as it stands."""


MakesEnvironment = Callable[..., Environment]
"""The class of a module: called with a problem, and with the parameters by their names."""
