"""Client of the running agent's control socket."""

import json
from pathlib import Path
from typing import Any

import trio

from protocol.errors import SwarmError
from swarm_node.owner.control_socket import NoAgent, knock, read_line

PATIENCE_S = 10.0


async def ask(home: Path, do: str) -> dict[str, Any]:
    """Send an order to the agent of a home; return its status right after."""
    with trio.move_on_after(PATIENCE_S):
        stream, token = await knock(home)
        async with stream:
            try:
                await stream.send_all(json.dumps({"do": do, "token": token}).encode() + b"\n")
                answer = await read_line(stream)
            except trio.BrokenResourceError:
                answer = b""
        if not answer:
            raise NoAgent(f"The agent in {home} is stopping.", hint="Try again in a few seconds.")
        said = json.loads(answer)
        if not said.pop("ok"):
            raise SwarmError.from_wire(said)
        status: dict[str, Any] = said["status"]
        return status
    raise NoAgent(
        f"The agent in {home} did not respond within {PATIENCE_S:g} s.",
        hint="It may be busy or suspended; `ps` shows its state.",
    )
