"""Episodes: the game that the samples of a group play, as a lease names it, and the framing of its text.

- It names a built-in environment, its parameters and a seed: never code, and nothing that a node would have to fetch.
- All samples of a group play the same episode from the same seed; only the sampled turns differ.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.wire.message import Message

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Setting = int | Annotated[str, StringConstraints(max_length=40)]
FrameText = Annotated[str, StringConstraints(max_length=limits.FRAME_MAX_CHARS)]


class Framing(Message):
    """The text that the policy's chat template puts around the environment's text; empty without a template."""

    opening: FrameText = ""
    """The text before the first message."""
    before: FrameText = ""
    """The text before any later message: from the end of a turn on, except for its end token."""
    after: FrameText = ""
    """The text after any message, up to the begin of a turn."""


PLAIN = Framing()


class Episode(Message):
    """The game of a lease: an environment with its parameters, a seed and the framing."""

    environment: Name
    parameters: dict[Name, Setting] = Field(max_length=limits.PARAMETERS_MAX)
    seed: int = Field(ge=0, lt=2**63)
    turn_tokens_max: int = Field(ge=1, le=limits.TOKENS_MAX)
    """A longer turn is cut here and counts as it is."""
    framing: Framing = PLAIN

    def opening(self, text: str) -> str:
        """Return the framed text before the first turn."""
        return self.framing.opening + text + self.framing.after

    def observation(self, text: str) -> str:
        """Return the framed text between two turns."""
        return self.framing.before + text + self.framing.after
