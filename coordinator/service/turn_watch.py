"""Requests that wait for an environment's answer to the turns that they have submitted.

- The next turns are leased in the transaction that records the last answer to a request: a transaction of their own
  would cost each turn another sync of the disk.
- If not all answers are there in time, the request makes its offer itself.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

import sqlalchemy as sa

from protocol.work.lease import Lease

PATIENCE_S = 0.25
"""The time that a submission waits: most environments answer in a hundredth of it, and the verdicts wait, too."""

Offer = Callable[[sa.Connection], tuple[Lease, ...]]
"""An effect that leases next turns to a node."""


class TurnRequest:
    """A request that waits for the answers to some claims."""

    def __init__(self, claims: Collection[str], offer: Offer) -> None:
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
        self, claims: Collection[str], offer: Offer, *, patience_s: float = PATIENCE_S
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
