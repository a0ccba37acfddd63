"""The client of the swarm for code without an event loop: the methods of `AsyncSwarm`, which wait for their result."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from threading import Thread
from typing import Any, TypeVar

from echo_swarm.asynchronous import CONNECTIONS, PATIENCE_S, AsyncSwarm, Prompt
from echo_swarm.rollouts import Budget, Rollout, Versions

T = TypeVar("T")


class Swarm:
    """A round of the swarm, for the holder of an API key. Its requests run on a thread of their own."""

    def __init__(self, url: str, key: str, *, patience_s: float = PATIENCE_S, connections: int = CONNECTIONS) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="echo-swarm", daemon=True)
        self._thread.start()
        self._swarm = AsyncSwarm(url, key, patience_s=patience_s, connections=connections)

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the thread."""
        if self._thread.is_alive():
            self._wait(self._swarm.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        version: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        priority: int | None = None,
        max_price_micros_per_mtok: int | None = None,
    ) -> list[Rollout]:
        """Return `n` samples of each prompt, in the order of the prompts; see `AsyncSwarm.sample`."""
        sampling = self._swarm.sample(
            prompts,
            n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
            version=version,
            tools=tools,
            priority=priority,
            max_price_micros_per_mtok=max_price_micros_per_mtok,
        )
        return self._wait(sampling)

    def publish(self, weights: Any, *, updates: int = 1, patch: bool = True) -> int:
        """Publish weights as the next version, and return its number; see `AsyncSwarm.publish`."""
        return self._wait(self._swarm.publish(weights, updates=updates, patch=patch))

    def versions(self) -> Versions:
        """Return the round's newest version, and which versions nodes hold."""
        return self._wait(self._swarm.versions())

    def held(self, version: int, nodes: int = 1) -> None:
        """Wait until so many nodes hold a version, or newer ones."""
        self._wait(self._swarm.held(version, nodes))

    def budget(self) -> Budget:
        """Return the budget of the key, and what it has spent."""
        return self._wait(self._swarm.budget())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread, and return its result; Ctrl-C ends it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
