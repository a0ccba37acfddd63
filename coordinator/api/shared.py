"""An answer that everybody asks for, computed once in a moment: whoever asks meanwhile gets the same.

- The cost is that of one computation in `KEEP_S`, however many ask.
- A failed computation is nobody's answer: the next in line tries again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

KEEP_S = 0.5
"""How old an answer may be: people look every few seconds, and nodes take nothing from it."""


class Shared(Generic[T]):
    """One answer and its age."""

    def __init__(self, compute: Callable[[], Awaitable[T]], *, keep_s: float = KEEP_S) -> None:
        self._compute = compute
        self._keep_s = keep_s
        self._lock = asyncio.Lock()
        self._answer: tuple[T, float] | None = None

    async def get(self) -> T:
        """The answer, not older than a moment."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._answer is None or now >= self._answer[1] + self._keep_s:
                self._answer = await self._compute(), now
            return self._answer[0]
