"""Fluid links: active streams share them as TCP flows do, nearly max-min fair.

- Who sends and who receives in a stream is fixed; a stream that has nothing left is idle and costs next to nothing.
- What a stream does not need for the rest of its chunk goes to the chunk behind it.
"""

from collections.abc import Sequence

import numpy as np

SHARE_ROUNDS = 6
"""Rounds of sharing out what is left of each link; more change nothing that is visible."""

FULL = 1e-3
"""A link with less than this share left is full."""

DONE_BYTES = 1e-6


class Links:
    """The uplinks and downlinks of numbered parties, in bytes per second, and the streams between them."""

    def __init__(self, ups: Sequence[float], downs: Sequence[float], streams: Sequence[tuple[int, int]]) -> None:
        self._up, self._down = np.array(ups), np.array(downs)
        ends = np.array(streams, dtype=np.int64).reshape(-1, 2)
        self._source, self._target = ends[:, 0].copy(), ends[:, 1].copy()
        self._left = np.zeros(len(streams))

    def begin(self, stream: int, size_bytes: float) -> None:
        """An idle stream has this much to send."""
        self._left[stream] = max(size_bytes, 1.0)

    def stop(self, stream: int) -> None:
        """Stop a stream: whatever it still had to send is not sent."""
        self._left[stream] = 0.0

    def flow(self, seconds: float) -> list[tuple[int, float]]:
        """Let time pass; the streams that have sent all, and the bytes that they could have sent beyond."""
        active = np.flatnonzero(self._left)
        left = self._left[active] - self._rates(self._source[active], self._target[active]) * seconds
        done = left <= DONE_BYTES
        self._left[active] = np.where(done, 0.0, left)
        return list(zip(active[done].tolist(), (-left[done]).tolist(), strict=True))

    def _rates(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return rates: the remaining capacity of both ends is divided equally, several times."""
        up, down = self._up.copy(), self._down.copy()
        rates = np.zeros(len(source))
        growing = np.arange(len(source))
        for _ in range(SHARE_ROUNDS):
            up_share = up / np.maximum(np.bincount(source, minlength=len(up)), 1)
            down_share = down / np.maximum(np.bincount(target, minlength=len(down)), 1)
            share = np.minimum(up_share[source], down_share[target])
            rates[growing] += share
            up = np.maximum(up - np.bincount(source, share, minlength=len(up)), 0.0)
            down = np.maximum(down - np.bincount(target, share, minlength=len(down)), 0.0)
            rest = (up > FULL * self._up)[source] & (down > FULL * self._down)[target]
            growing, source, target = growing[rest], source[rest], target[rest]
            if not len(growing):
                break
        return rates
