"""The requests that wait in this process, each kind with what wakes it.

- All that they wait for is in the store. What another process of the round has accepted sets no event here, so callers,
  the learner and the group scorer look again at intervals: a missed event costs them time, and nothing else.
- Idle nodes do not look again: after a missed call they wait until `lease_hold_s` is over, and then request anew.
- A request for next turns whose offer has begun waits without a time-out: whoever began the offer must settle it.

Idle nodes wait for leases (`IdleNodes`), until there is work for them.

- A call for work goes to the nodes that wait the longest, one for each query; the others sleep on.
- While a query is being recorded, its node's offer waits directly behind it for the store: the query and its lease are
  one commit. If the query is not recorded, the node waits on in its place, as if it had not been called.
- A node that finds nothing, since it holds another version than the one asked for, or that hangs up, passes the call on
  to the next of those that waited when the call was made. So a call ends.

Nodes wait for an environment's answer to the turns that they have submitted (`TurnWatch`).

- The next turns are leased in the transaction that records the last answer to a request: a transaction of their own
  would cost each turn another sync of the disk.
- If not all answers are there in time, the request makes its offer itself.

Callers of the endpoint wait for answers to their queries, and read them while they grow (`QueryWatch`).

- One task looks for the answers of all of them: with a thousand callers, one statement reads what has come for all.
- A query that no node will answer, since the round is finished, gets an error in the place of its answer.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice

import sqlalchemy as sa

from coordinator.store.state import Database, FollowingEffect
from coordinator.transactions.queries import read_abandoned, round_finished
from coordinator.transactions.query_answers import Growth, QueryAnswer, ReadUntil, read_answers, read_growth
from protocol.errors import NotFound
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""Time between two looks: what another API process has accepted sets no event here."""

ASKS_AT_ONCE = 32
"""Requests whose queries are recorded at once; others wait here, and not in the line of the nodes' requests."""

NEWS_MAX = 64
"""News of a request that it has not read; for a slow reader, growth beyond it stays in the store."""

News = asyncio.Queue[tuple[int, Growth | QueryAnswer | NotFound]]
"""The queue of a request: the growth of its queries, then each one's answer or error, once, with the query's number."""


class QueryWatch:
    """The queries that callers of this process wait for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.asking = asyncio.Semaphore(ASKS_AT_ONCE)
        """Held while the queries of a request are recorded."""
        self._waiting: dict[int, News] = {}
        self._reading: dict[int, ReadUntil] = {}
        """The queries whose callers read them while they grow."""
        self._came = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def awaited(self, numbers: Collection[int], *, grows: bool = False) -> Iterator[News]:
        """Look for the answers to these queries, and with `grows` for parts of them; yield the queue that gets them."""
        news = News()
        self._waiting |= dict.fromkeys(numbers, news)
        self._reading |= dict.fromkeys(numbers, ReadUntil()) if grows else {}
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._check())
        try:
            yield news
        finally:
            for number in numbers:
                self._forget(number)

    def check_now(self) -> None:
        """Look at once: rollouts or fragments were accepted."""
        self._came.set()

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._reading.pop(number, None)

    async def _check(self) -> None:
        while self._waiting:
            self._came.clear()
            try:
                reading = {
                    number: until for number, until in self._reading.items() if self._waiting[number].qsize() < NEWS_MAX
                }
                grown, ends = await self._database.read(_read, list(self._waiting), reading)
            except Exception:  # the store may be available again later
                log.exception("could not read the answers to queries")
                grown, ends = {}, {}
            for number, growth in grown.items():
                if number in self._reading:
                    self._reading[number] = growth.until
                    self._waiting[number].put_nowait((number, growth))
            for number, end in ends.items():
                if number in self._waiting:
                    self._waiting[number].put_nowait((number, end))
                    self._forget(number)
            if grown:  # there may be more
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._came.wait()


def _read(
    connection: sa.Connection, waiting: Collection[int], reading: dict[int, ReadUntil]
) -> tuple[dict[int, Growth], dict[int, QueryAnswer | NotFound]]:
    abandoned = {number: round_finished() for number in read_abandoned(connection, list(waiting))}
    return read_growth(connection, reading), abandoned | read_answers(connection, list(waiting))


PATIENCE_S = 0.25
"""The time that a submission waits: most environments answer in a hundredth of it, and the verdicts wait, too."""

TurnOffer = Callable[[sa.Connection], tuple[Lease, ...]]
"""An effect that leases next turns to a node."""


class TurnRequest:
    """A request that waits for the answers to some claims."""

    def __init__(self, claims: Collection[str], offer: TurnOffer) -> None:
        self.offer = offer
        self._waits_for = set(claims)
        self._leases: asyncio.Future[tuple[Lease, ...]] = asyncio.get_running_loop().create_future()
        self._is_offering = False

    async def wait(self, patience_s: float) -> tuple[Lease, ...] | None:
        """Return the leases of the offer; None if it has not begun within `patience_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(self._leases)
        return await self._leases if self._is_offering else None

    def begins_with(self, claim_id: str) -> bool:
        """Return True if the answer to this claim is the last one, so that the offer is due with it."""
        self._waits_for.discard(claim_id)
        self._is_offering = not self._waits_for
        return self._is_offering

    def settle(self, leases: tuple[Lease, ...]) -> None:
        """Answer the request."""
        if not self._leases.done():
            self._leases.set_result(leases)


class TurnWatch:
    """The claims whose answers somebody waits for."""

    def __init__(self) -> None:
        self._waiting: dict[str, TurnRequest] = {}

    async def wait(
        self, claims: Collection[str], offer: TurnOffer, *, patience_s: float = PATIENCE_S
    ) -> tuple[Lease, ...] | None:
        """Return what `offer` leased after all these claims were answered; None if that took too long."""
        request = TurnRequest(claims, offer)
        self._waiting |= dict.fromkeys(claims, request)
        try:
            return await request.wait(patience_s)
        finally:
            for claim_id in claims:
                if self._waiting.get(claim_id) is request:
                    del self._waiting[claim_id]

    def request_due_with(self, claim_id: str) -> TurnRequest | None:
        """Return the request whose offer is due with the answer to this claim; whoever calls must settle it."""
        request = self._waiting.pop(claim_id, None)
        return request if request is not None and request.begins_with(claim_id) else None


LeaseOffer = Callable[[sa.Connection], LeaseReply]
"""The effect that answers a request with the leases that its node may have now."""


@dataclass(frozen=True)
class Call:
    """A call for work."""

    last: int
    """The number of the last request that it may reach."""
    offered: "asyncio.Future[LeaseReply | None] | None" = None
    """The outcome of the node's offer, which waits for the store; None if the node has to make one."""


class IdleNode:
    """A held request."""

    def __init__(self, nodes: "IdleNodes", make_offer: Callable[[], LeaseOffer | None]) -> None:
        self._nodes = nodes
        self._call = _no_call()
        self.make_offer = make_offer
        """Returns None if the node has left or has to load another version first."""
        self.number = 0

    @property
    def is_called(self) -> bool:
        return self._call.done()

    def call(self, call: Call) -> None:
        self._call.set_result(call)

    def follow(self, offer: LeaseOffer, last: int) -> FollowingEffect[LeaseReply]:
        """Call it with an offer that waits for the store behind a query."""
        follower = FollowingEffect(offer, asyncio.get_running_loop().create_future())
        follower.answer.add_done_callback(self._wait_on)
        self.call(Call(last, follower.answer))
        return follower

    async def called(self, patience_s: float) -> Call | None:
        """Return the call as soon as there is one; None if none comes in time."""
        call = self._call  # it is replaced at once if a query is refused
        await asyncio.wait([call], timeout=patience_s)
        return call.result() if call.done() else None

    def pass_on(self) -> None:
        """Wait again, behind all others, and have the next node answer the call."""
        last, self._call = self._call.result().last, _no_call()
        self._nodes.wait_last(self)
        self._nodes.call(1, last)

    def _wait_on(self, answer: "asyncio.Future[LeaseReply | None]") -> None:
        """Wait again in the same place, if the query of a call was not recorded."""
        if not answer.cancelled() and answer.exception() is None and answer.result() is None:
            self._call = _no_call()


def _no_call() -> asyncio.Future[Call]:
    return asyncio.get_running_loop().create_future()


class IdleNodes:
    """All held requests of this process, the longest held first."""

    def __init__(self) -> None:
        self._waiting: dict[IdleNode, None] = {}
        self._numbers = count(1)
        self._last = 0
        self.calls = 0
        """The number of calls so far: a request that makes its offer while one comes looks again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def waiting(self, make_offer: Callable[[], LeaseOffer | None]) -> Iterator[IdleNode]:
        """Hold a request for the duration of the block."""
        node = IdleNode(self, make_offer)
        self.wait_last(node)
        try:
            yield node
        except asyncio.CancelledError:
            if node.is_called:
                node.pass_on()
            raise
        finally:
            del self._waiting[node]

    def wait_last(self, node: IdleNode) -> None:
        """Place a request behind all others."""
        self._waiting.pop(node, None)
        node.number = self._last = next(self._numbers)
        self._waiting[node] = None

    def follow(self, queries: int) -> list[FollowingEffect[LeaseReply]]:
        """Call up to `queries` nodes, and return their offers, which must wait for the store behind these queries."""
        offers = ((node, offer) for node in self._free() if (offer := node.make_offer()) is not None)
        return [node.follow(offer, self._last) for node, offer in islice(offers, queries)]

    def call(self, nodes: int, last: int | None = None) -> None:
        """Call up to so many nodes that wait; those up to the number `last`, if it is given."""
        if last is None:
            last = self._last
            self.calls += 1
        for node in list(islice((node for node in self._free() if node.number <= last), nodes)):
            node.call(Call(last))

    def call_all(self) -> None:
        """Call every node that waits."""
        self.call(len(self._waiting))

    def _free(self) -> list[IdleNode]:
        return [node for node in self._waiting if not node.is_called]


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
