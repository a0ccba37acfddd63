"""Rows of finished turns, kept so that the next turn of the episode computes only the tokens that are new.

- A row belongs to one sample, named by the seed of its lease and its number, and to the exact tokens that it holds: a
  next turn with other tokens finds nothing. A row is used once.
- Bounded in bytes and in time: the oldest rows go first, and all of them when memory is short or the version changes.
- The time is checked whenever the engine does something; an idle engine keeps at most `size_max_bytes`.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from protocol import limits

if TYPE_CHECKING:
    from swarm_node.engine.decoder import SavedRow

TURNS_MIB = 1024
"""The default of the owner's limit. In bfloat16, 1,000 tokens of a policy with 0.6 billion parameters take 115 MB."""

SIZE_MAX_BYTES = TURNS_MIB * limits.MIB

KEPT_S = 120.0
"""Far longer than an environment takes to answer a turn."""


class _Kept(NamedTuple):
    tokens: list[int]
    row: "SavedRow"
    since: float


class TurnCache:
    """The kept rows of one engine and version."""

    def __init__(self, size_max_bytes: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._size_max_bytes, self._now = size_max_bytes, now
        self._kept: dict[tuple[int, int], _Kept] = {}
        """The oldest first."""
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, seed: int, number: int, tokens: list[int], row: "SavedRow") -> None:
        """Keep the row with the tokens of a sample."""
        self._remove((seed, number))
        self._kept[seed, number] = _Kept(tokens, row, self._now())
        self._size_bytes += row.size_bytes
        self.shrink()

    def take(self, seed: int, number: int, tokens: list[int]) -> "SavedRow | None":
        """Remove and return the row of a sample if it holds the first of these tokens, but not all of them."""
        kept = self._remove((seed, number))
        if kept is None or len(kept.tokens) >= len(tokens) or tokens[: len(kept.tokens)] != kept.tokens:
            return None
        return kept.row

    def shrink(self) -> None:
        """Drop the rows that are too old, and the oldest while there are too many bytes."""
        oldest = self._now() - KEPT_S
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.since >= oldest and self._size_bytes <= self._size_max_bytes:
                break
            self._remove(name)

    def clear(self) -> bool:
        """Drop all rows; return True if there were any."""
        had = bool(self._kept)
        self._kept.clear()
        self._size_bytes = 0
        return had

    def _remove(self, name: tuple[int, int]) -> _Kept | None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._size_bytes -= kept.row.size_bytes
        return kept
