"""Requests that wait for an environment's answer to the turns that they have submitted."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

PATIENCE_S = 0.25
"""The time that a submission waits: most environments answer in a hundredth of it, and the verdicts wait, too."""


class TurnWatch:
    """The claims whose answers somebody waits for."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    async def wait(self, claims: Collection[str], *, patience_s: float = PATIENCE_S) -> None:
        """Wait until all these claims are answered, or for `patience_s`."""
        events = [self._waiting.setdefault(claim_id, asyncio.Event()) for claim_id in claims]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    for event in events:
                        await event.wait()
        finally:
            for claim_id in claims:
                self._waiting.pop(claim_id, None)

    def answered(self, claim_id: str) -> None:
        """Wake the request that waits for a claim."""
        if (event := self._waiting.get(claim_id)) is not None:
            event.set()
