"""An episode: which game the samples of a group play, as a lease names it, and how its text is framed.

- It names a built-in environment, its parameters and a seed: never code, and nothing that a node would have to fetch.
- All samples of a group play the same episode from the same seed; they differ by what their own draws make them say.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.wire.message import Message

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Setting = int | Annotated[str, StringConstraints(max_length=40)]
FrameText = Annotated[str, StringConstraints(max_length=limits.FRAME_MAX_CHARS)]


class Framing(Message):
    """What the policy's chat template puts around what the environment says; nothing, for a policy without one."""

    opening: FrameText = ""
    """Before the first words."""
    before: FrameText = ""
    """Before any later words: from the end of a turn on, but for its end token."""
    after: FrameText = ""
    """After any words: up to where a turn begins."""


PLAIN = Framing()


class Episode(Message):
    """What to play."""

    environment: Name
    parameters: dict[Name, Setting] = Field(max_length=limits.PARAMETERS_MAX)
    seed: int = Field(ge=0, lt=2**63)
    turn_tokens_max: int = Field(ge=1, le=limits.TOKENS_MAX)
    """A turn that has not ended by then is cut, and stands as it is."""
    framing: Framing = PLAIN

    def opening(self, text: str) -> str:
        """What stands before the first turn."""
        return self.framing.opening + text + self.framing.after

    def observation(self, text: str) -> str:
        """What stands between two turns."""
        return self.framing.before + text + self.framing.after
