"""Which origin to ask, and when to leave one alone.

- Origins are asked in an order drawn anew each time, so that a swarm spreads over them; the coordinator comes last.
- One that fails, lies, stalls or lacks a chunk is passed over for a while, longer each time in a row.
- The list is a hint that the coordinator gives; an old list is better than none.
- Chunks come from here verified, or not at all; only the coordinator's own failure is the caller's.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx
import trio

from protocol.errors import SwarmError
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from swarm_node.coordinator_api.addresses import is_in_own_network
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origin import STRANGERS, Origin, Patience, open_origin

log = logging.getLogger(__name__)

LEARN_S = 60.0
"""How often the list is asked for."""

PAUSE_S, PAUSE_MAX_S = 5.0, 300.0
"""After the first failure, doubled with every further one: a dead origin is tried again twelve times an hour."""


@dataclass
class _Standing:
    """How an origin has served us."""

    failures: int = 0
    resumes_at: float = 0.0


class Origins:
    """The coordinator's own files, and whoever else holds copies of them."""

    def __init__(self, coordinator: Coordinator, rng: Random, patience: Patience = STRANGERS) -> None:
        self.home = coordinator.origin
        self._coordinator = coordinator
        self._rng = rng
        self._patience = patience
        self._others: dict[str, Origin] = {}
        self._standing: dict[str, _Standing] = {}
        self._learnt_at = -LEARN_S

    async def learn(self) -> None:
        """Ask the coordinator for the list, if the last answer is old."""
        if trio.current_time() < self._learnt_at + LEARN_S:
            return
        try:
            told = (await self._coordinator.origins()).urls
        except SwarmError as error:
            log.debug("list of origins not available reason=%r", error.message)
            return
        self._learnt_at = trio.current_time()
        for url in self._others.keys() - set(told):
            await self._others.pop(url).close()
        if set(told) - self._others.keys():
            own_network = await self.at_home()
            for url in set(told) - self._others.keys():
                self._others[url] = open_origin(url, own_network=own_network, patience=self._patience)

    async def at_home(self) -> bool:
        """Whether the coordinator lies in this machine's own network; then those whom it names may, too."""
        return await is_in_own_network(httpx.URL(self.home.url).host)

    def in_order(self) -> list[Origin]:
        """The origins besides the coordinator that may be asked now."""
        fit = [origin for origin in self._others.values() if self.fit(origin)]
        return self._rng.sample(fit, len(fit))

    def fit(self, origin: Origin) -> bool:
        """Whether an origin may be asked now."""
        return self._of(origin.url).resumes_at <= trio.current_time()

    def fetcher_for(self, manifest: PolicyManifest) -> Callable[[ChunkId], Awaitable[bytes]]:
        """Fetch chunks of a version, each with the size that its manifest signs."""
        sizes = manifest.chunk_sizes()
        return lambda chunk: self.chunk(chunk, sizes[chunk])

    async def chunk(self, chunk: ChunkId, size_bytes: int) -> bytes:
        """A chunk, verified, from the first that really has it."""
        for origin in self.in_order():
            started = trio.current_time()
            try:
                data = await origin.chunk(chunk, size_bytes)
            except SwarmError as error:
                self.failed(origin, error)
            except trio.Cancelled:
                if (
                    trio.current_time() > started + self._patience.grace_s
                ):  # the caller lost patience, and did not merely get done
                    self.failed(origin, None)
                raise
            else:
                self._standing.pop(origin.url, None)
                return data
        return await self.home.chunk(chunk, size_bytes)

    def failed(self, origin: Origin, error: SwarmError | None) -> None:
        """Leave an origin alone for a while; without an error, it was merely too slow for the caller."""
        standing, now = self._of(origin.url), trio.current_time()
        if standing.resumes_at > now:  # several requests were under way when it failed
            return
        standing.resumes_at = now + min(PAUSE_S * 2**standing.failures, PAUSE_MAX_S)
        standing.failures += 1
        reason = error.message if error else "too slow"
        log.info("origin skipped url=%s for_s=%.0f reason=%r", origin.url, standing.resumes_at - now, reason)

    async def close(self) -> None:
        for origin in self._others.values():
            await origin.close()

    def _of(self, url: str) -> _Standing:
        return self._standing.setdefault(url, _Standing())


@asynccontextmanager
async def open_origins(coordinator: Coordinator) -> AsyncIterator[Origins]:
    """The origins of a round, closed at the end."""
    origins = Origins(coordinator, Random())
    try:
        yield origins
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await origins.close()
