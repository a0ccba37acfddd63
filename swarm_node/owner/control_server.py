"""The agent's side of the control socket: one line of JSON in, one line out.

    {"do": "status" | "pause" | "resume" | "finish" | "leave" | "move",
     "card": 1, "minutes": 30, "round_name": "…", "token": "…"}
    → {"ok": true, "status": {…}}  or  {"ok": false, "code": "…", "message": "…", "hint": "…"}

- The protocol is local, not part of the swarm's protocol: both ends come from one installation.
- `card` is only for `pause` and `resume`, `minutes` only for `pause`, `round_name` for these, `finish` and `leave`; all
  may be absent. `move` needs `join_string`.
- Every wait has a deadline and the number of connections is limited: a program that keeps one open blocks nobody.
- The answer is sent when the order is accepted; the next `status` shows its effect.
- The owner's page carries out its orders by the same function.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from protocol.errors import MalformedMessage, NotAuthorised, SwarmError
from swarm_node.allowance.governor import Governor
from swarm_node.coordinator_api.join_string import parse
from swarm_node.owner.control_socket import Door, open_door, read_line, remove

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
PATIENCE_S = 2.0

ORDERS = ("status", "pause", "resume", "finish", "leave", "move")
OPTIONS = {
    "pause": ("card", "minutes", "round_name"),
    "resume": ("card", "round_name"),
    "finish": ("round_name",),
    "leave": ("round_name",),
    "move": ("join_string",),
}

SNOOZE_MAX_MINUTES = 7 * 24 * 60
"""A week; a longer pause is one without an end."""


@asynccontextmanager
async def listening(home: Path, governor: Governor, status: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
    """Answer orders for the duration of the block."""
    door = await open_door(home)
    room = trio.CapacityLimiter(CONNECTIONS_MAX)
    try:
        async with trio.open_nursery() as nursery:
            answer = partial(_answer, door, governor, status, room)
            nursery.start_soon(partial(trio.serve_listeners, answer, [door.listener]))
            yield
            nursery.cancel_scope.cancel()
    finally:
        remove(home)


async def _answer(
    door: Door,
    governor: Governor,
    status: Callable[[], dict[str, Any]],
    room: trio.CapacityLimiter,
    stream: trio.SocketStream,
) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stream, room:
            with trio.move_on_after(PATIENCE_S):
                asked = await read_line(stream)
                await stream.send_all(json.dumps(_obey(door, governor, status, asked)).encode() + b"\n")


def carry_out(governor: Governor, do: str, options: Mapping[str, Any]) -> None:
    """Check an order and its options, and carry it out; `status` changes nothing."""
    if do not in ORDERS:
        raise MalformedMessage(f"{do!r:.50} is not a valid order.", hint=f"Valid orders: {', '.join(ORDERS)}.")
    if not _are_valid(options) or options.keys() - set(OPTIONS.get(do, ())):
        raise MalformedMessage("The order has an option that it does not know, or an invalid one.")
    if do == "move":
        parse(str(options.get("join_string")))  # raises
    if do != "status":
        getattr(governor, do)(**options)  # raises if the order names no round or card of this agent
        log.info("asked to %s %s", do, " ".join(f"{name}={value}" for name, value in options.items()))


def _obey(door: Door, governor: Governor, status: Callable[[], dict[str, Any]], asked: bytes) -> dict[str, Any]:
    try:
        carry_out(governor, *_order(door, asked))
        return {"ok": True, "status": status()}
    except SwarmError as error:
        return {"ok": False, **error.to_wire()}


def _order(door: Door, asked: bytes) -> tuple[str, dict[str, Any]]:
    """Return the order and its options, once the token is checked."""
    try:
        said = json.loads(asked)
        do, token = said.pop("do"), said.pop("token", "")
        options = {name: value for name, value in said.items() if value is not None}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MalformedMessage("The request is not one line of JSON with the field `do`.") from None
    if not door.admits(token):
        raise NotAuthorised("The token is wrong.", hint="The token is in control/port.json in the node's folder.")
    return do, options


def _are_valid(options: Mapping[str, Any]) -> bool:
    card, minutes, name = options.get("card", 0), options.get("minutes", 1), options.get("round_name", "")
    is_time = type(minutes) in (int, float) and 0 < minutes <= SNOOZE_MAX_MINUTES
    return type(card) is int and is_time and isinstance(name, str)
