"""The owner's orders about single rounds of an agent, beside the limits and orders that hold for the whole node.

- A round may work while the node may, and while its owner has neither paused nor finished it.
- A round that finishes or leaves ends alone; the agent ends with its last round.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import trio

from protocol.errors import ConfigInvalid
from swarm_node.allowance.rules import Decision, LimitReason, with_others
from swarm_node.coordinator_api.join_string import JoinString

ROUND_ID_CHARS_MIN = 6
"""Shortest beginning of a round's id that names the round."""


@dataclass
class OwnerPause:
    """The owner's pause of the node, of a card or of a round."""

    paused: bool = False
    until: datetime | None = None
    """End of the pause; None: it ends with `resume`."""

    def end_if_over(self, now: datetime) -> None:
        if self.until is not None and now >= self.until:
            self.paused, self.until = False, None


class NodeGate(Protocol):
    """The owner's permission for the whole node."""

    @property
    def decision(self) -> Decision: ...

    @property
    def finishing(self) -> bool: ...

    async def changes(self) -> None:
        """Return when the decision about the node, or an order about a round, has changed."""


class RoundGate:
    """The owner's permission for the work in one round."""

    def __init__(self, node: NodeGate, join: JoinString) -> None:
        self._node = node
        self.join = join
        self.pause = OwnerPause()
        self.is_finishing = False
        """True if the owner has ordered this round alone to finish."""
        self.leaving = trio.Event()
        """Set when the owner has ordered this round alone to be left now."""

    @property
    def name(self) -> str:
        """The name by which the owner gives orders about this round."""
        return self.join.url.partition("://")[2]

    @property
    def decision(self) -> Decision:
        """The decision about the node, with the orders about this round."""
        node, own = self._node.decision, list[LimitReason]()
        if self.pause.paused:
            until = f" until {self.pause.until:%H:%M}" if self.pause.until else ""
            paused = LimitReason("paused", f"round paused by you{until}; `swarm-node resume {self.name}` continues")
            own.append(with_others(paused, bool(node.reasons)))
        if self.is_finishing:
            own.append(LimitReason("finishing", "finishing: the agent leaves this round after the current groups"))
        return node._replace(reasons=(*node.reasons, *own)) if own else node

    @property
    def finishing(self) -> bool:
        """True if no more work is accepted, and the round is left once the running groups have ended."""
        return self.is_finishing or self._node.finishing

    @property
    def is_ended_by_owner(self) -> bool:
        """True if the owner has ordered this round alone to end."""
        return self.is_finishing or self.leaving.is_set()

    async def changes(self) -> None:
        """Return when the decision may have changed."""
        await self._node.changes()

    async def opened(self) -> None:
        """Return when work in this round is permitted, or must finish."""
        while not (self.decision.may_work or self.finishing):
            await self.changes()

    async def closed(self) -> None:
        """Return when work in this round is not permitted."""
        while self.decision.may_work:
            await self.changes()

    async def finishes(self) -> None:
        """Return when the owner wants this round to finish."""
        while not self.finishing:
            await self.changes()


def find_round(gates: Iterable[RoundGate], text: str) -> RoundGate:
    """Return the round that an owner names by its join string, its address, or the beginning of its id."""
    gates = tuple(gates)
    url, _, round_id = text.partition("#")
    address = url.rpartition("://")[2].rstrip("/")
    named = [gate for gate in gates if address == gate.name and round_id in ("", gate.join.round_id)]
    if not named and len(text) >= ROUND_ID_CHARS_MIN:
        named = [gate for gate in gates if gate.join.round_id.startswith(text.lower())]
    if len(named) == 1:
        return named[0]
    names = ", ".join(gate.name for gate in named or gates) or "none"
    if named:
        raise ConfigInvalid(f"{text[:100]} names several rounds.", hint=f"Name one by its address: {names}.")
    raise ConfigInvalid(f"This agent takes part in no round {text[:100]}.", hint=f"Its rounds: {names}.")
