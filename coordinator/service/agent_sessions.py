"""Agents that use one node's key at the same time, found by the session that each heartbeat names.

- An agent that restarts names a new session, and the old one never returns. A session that returns after another one
  therefore has a second agent beside it, such as one in a copy of the home.
- More than `SESSIONS_KEPT` sessions within `CONFLICT_S` are several agents, too, also if none has returned yet: copies
  of one image send their heartbeats in turn.
- All are refused with `KeyInUse` until no session has returned for `CONFLICT_S`; what their heartbeats say counts.
- The state is in memory only: after a restart of the coordinator, two agents are found again within two heartbeats.
- Times are those of a clock that nobody sets: a step of the machine's time refuses no agent.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from protocol.errors import KeyInUse
from protocol.ids import NodeId

CONFLICT_S = 60.0
"""A few heartbeats: as long as one of two agents may be late."""

SESSIONS_KEPT = 8
"""Last sessions of a node; an agent that crashes at each start has fewer in a minute."""

NODES_KEPT = 65_536
"""Nodes whose sessions are kept, those heard last; about 35 MB, and 80 MB if each has all its sessions."""


@dataclass
class _Sessions:
    heard_s: dict[str, float] = field(default_factory=dict)
    """The time of each session's last heartbeat, the newest at the end."""
    conflict_s: float = -inf
    """The end of the time in which agents are refused."""


class AgentSessions:
    """The last sessions of each node."""

    def __init__(self) -> None:
        self._of: OrderedDict[NodeId, _Sessions] = OrderedDict()

    def require_only(self, node: NodeId, session: str, now_s: float) -> None:
        """Record a heartbeat at a monotonic time; raise `KeyInUse` if two agents use this node's key."""
        known = self._of.setdefault(node, _Sessions())
        self._of.move_to_end(node)
        if len(self._of) > NODES_KEPT:
            self._of.popitem(last=False)
        is_newest = session == next(reversed(known.heard_s), None)
        returns = known.heard_s.pop(session, None) is not None and not is_newest
        known.heard_s[session] = now_s
        if len(known.heard_s) > SESSIONS_KEPT:
            oldest = next(iter(known.heard_s))
            returns |= now_s - known.heard_s.pop(oldest) < CONFLICT_S
        if returns:
            known.conflict_s = now_s + CONFLICT_S
        if now_s < known.conflict_s:
            raise KeyInUse(
                "Another agent uses this node's key at the same time: each takes the other's work away.",
                hint="Stop one of the two, or start it with another --home, where it gets a key of its own.",
            )
