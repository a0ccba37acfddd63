"""The requests that wait in this process, each kind with what wakes it.

- All that they wait for is in the store. What another process of the round has accepted sets no event here, so callers,
  the learner and the group scorer look again at intervals: a missed event costs them time, and nothing else.
- Idle nodes do not look again: after a missed call they wait until `lease_hold_s` is over, and then request anew.
- A request for next turns whose offer has begun waits without a time-out: whoever began the offer must settle it.
"""

import asyncio

from coordinator.service.idle_nodes import IdleNodes
from coordinator.service.query_watch import QueryWatch
from coordinator.service.turn_watch import TurnWatch
from coordinator.store.state import Database


class WaitingRequests:
    """The waiting requests of nodes, callers and the learner, and the group scorer, which waits as they do."""

    def __init__(self, database: Database) -> None:
        self.idle_nodes = IdleNodes()
        """Nodes that wait for work."""
        self.turns = TurnWatch()
        """Nodes that wait for the next turns of their episodes."""
        self.queries = QueryWatch(database)
        """Callers that wait for answers."""
        self.batch_ready = asyncio.Event()
        """Set when the learner's next batch may be complete."""
        self.unscored = asyncio.Event()
        """Set when a group was accepted whose rewards need a process."""

    def wake_for_rollouts(self) -> None:
        """Wake those that wait for accepted rollouts."""
        self.batch_ready.set()
        self.unscored.set()
        self.queries.check_now()
