"""Choice of the origin for a request, and pauses for failing origins.

- Origins are asked in a new random order each time, so that a swarm spreads over them; the coordinator comes last.
- An origin that fails, sends wrong bytes, stalls or lacks a chunk is skipped for a while, longer each time in a row.
- The list is a hint of the coordinator; an old list is better than none.
- Returned chunks are verified; only a failure of the coordinator itself is raised.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from urllib.parse import urlsplit

import trio

from protocol.errors import SwarmError
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import is_in_own_network
from swarm_node.coordinator_api.origin import STRANGERS, Origin, Patience, open_origin

log = logging.getLogger(__name__)

LEARN_S = 60.0
"""Interval of requests for the list."""

PAUSE_S, PAUSE_MAX_S = 5.0, 300.0
"""Pause after the first failure, doubled with every further one: a dead origin is tried 12 times per hour."""


@dataclass
class _Standing:
    """Failures of an origin, and the end of its pause."""

    failures: int = 0
    resumes_at: float = 0.0


class Origins:
    """The coordinator's own files, and the other origins with copies of them."""

    def __init__(self, coordinator: Coordinator, rng: Random, patience: Patience = STRANGERS) -> None:
        self.home = coordinator.origin
        self._coordinator = coordinator
        self._rng = rng
        self._patience = patience
        self._others: dict[str, Origin] = {}
        self._standing: dict[str, _Standing] = {}
        self._learnt_at = -LEARN_S

    async def learn(self) -> None:
        """Request the list from the coordinator, if the last answer is old."""
        if trio.current_time() < self._learnt_at + LEARN_S:
            return
        try:
            listed = (await self._coordinator.origins()).urls
        except SwarmError as error:
            log.debug("list of origins not available reason=%r", error.message)
            return
        self._learnt_at = trio.current_time()
        for url in self._others.keys() - set(listed):
            await self._others.pop(url).close()
        if set(listed) - self._others.keys():
            own_network = await self.at_home()
            for url in set(listed) - self._others.keys():
                self._others[url] = open_origin(url, own_network=own_network, patience=self._patience)

    async def at_home(self) -> bool:
        """Return True if the coordinator is in this machine's own network; then the origins may be, too."""
        return await is_in_own_network(urlsplit(self.home.url).hostname or "")

    def in_order(self) -> list[Origin]:
        """Return the origins besides the coordinator that may be asked now, in random order."""
        fit = [origin for origin in self._others.values() if self.fit(origin)]
        return self._rng.sample(fit, len(fit))

    def fit(self, origin: Origin) -> bool:
        """Return True if an origin may be asked now."""
        return self._standing_of(origin.url).resumes_at <= trio.current_time()

    def fetcher_for(self, manifest: PolicyManifest) -> Callable[[ChunkId], Awaitable[bytes]]:
        """Return a function that fetches chunks of a version, each with the size in its signed manifest."""
        sizes = manifest.chunk_sizes()
        return lambda chunk: self.chunk(chunk, sizes[chunk])

    async def chunk(self, chunk: ChunkId, size_bytes: int) -> bytes:
        """Return a verified chunk, from the first origin that has it."""
        for origin in self.in_order():
            started = trio.current_time()
            try:
                data = await origin.chunk(chunk, size_bytes)
            except SwarmError as error:
                self.failed(origin, error)
            except trio.Cancelled:
                if (
                    trio.current_time() > started + self._patience.grace_s
                ):  # the caller timed out, rather than having the chunk already
                    self.failed(origin, None)
                raise
            else:
                self._standing.pop(origin.url, None)
                return data
        return await self.home.chunk(chunk, size_bytes)

    def failed(self, origin: Origin, error: SwarmError | None) -> None:
        """Pause an origin; without an error, it was too slow for the caller."""
        standing, now = self._standing_of(origin.url), trio.current_time()
        if standing.resumes_at > now:  # several requests were under way when it failed
            return
        standing.resumes_at = now + min(PAUSE_S * 2**standing.failures, PAUSE_MAX_S)
        standing.failures += 1
        reason = error.message if error else "too slow"
        log.info("origin skipped url=%s for_s=%.0f reason=%r", origin.url, standing.resumes_at - now, reason)

    async def close(self) -> None:
        for origin in self._others.values():
            await origin.close()

    def _standing_of(self, url: str) -> _Standing:
        return self._standing.setdefault(url, _Standing())


@asynccontextmanager
async def open_origins(coordinator: Coordinator) -> AsyncIterator[Origins]:
    """Open the origins of a round, and close them at the end."""
    origins = Origins(coordinator, Random())
    try:
        yield origins
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await origins.close()
