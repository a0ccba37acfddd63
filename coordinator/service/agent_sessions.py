"""Agents that use one node's key at the same time, found by the session that each heartbeat names.

- An agent that restarts names a new session, and the old one never returns. A session that returns after another one
  therefore has a second agent beside it, such as one in a copy of the home.
- Both are refused with `KeyInUse` until no session has returned for `CONFLICT_MS`; what their heartbeats say counts.
- The state is in memory only: after a restart of the coordinator, two agents are found again within two heartbeats.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from protocol.errors import KeyInUse
from protocol.ids import NodeId

CONFLICT_MS = 60_000
"""A few heartbeats: as long as one of two agents may be late."""

SESSIONS_KEPT = 4
"""Last sessions of a node."""

NODES_KEPT = 65_536
"""Nodes whose sessions are kept, those heard last; about 30 MB."""


@dataclass
class _Sessions:
    last: deque[str] = field(default_factory=lambda: deque(maxlen=SESSIONS_KEPT))
    """Sessions in order of their last heartbeats, the newest at the end."""
    conflict_ms: int = 0
    """The end of the time in which agents are refused."""


class AgentSessions:
    """The last sessions of each node."""

    def __init__(self) -> None:
        self._of: OrderedDict[NodeId, _Sessions] = OrderedDict()

    def require_only(self, node: NodeId, session: str, now_ms: int) -> None:
        """Record a heartbeat; raise `KeyInUse` if two agents use this node's key."""
        known = self._of.setdefault(node, _Sessions())
        self._of.move_to_end(node)
        if len(self._of) > NODES_KEPT:
            self._of.popitem(last=False)
        if session in known.last and session != known.last[-1]:
            known.last.remove(session)
            known.conflict_ms = now_ms + CONFLICT_MS
        if not known.last or session != known.last[-1]:
            known.last.append(session)
        if now_ms < known.conflict_ms:
            raise KeyInUse(
                "Another agent uses this node's key at the same time: each takes the other's work away.",
                hint="Stop one of the two, or start it with another --home, where it gets a key of its own.",
            )
