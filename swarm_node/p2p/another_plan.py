"""When to ask for another plan: while nobody of the one in hand is at the other end of a stream.

- The first time after `FIRST_S`, give or take half of it: who restarts may be back by then, and a crowd that has lost
  the same peer does not ask at the same moment.
- Each further time after twice as long, up to `LONGEST_S`, until somebody was there again.
"""

from collections.abc import Awaitable, Callable, Iterator
from random import Random

import trio

FIRST_S, LONGEST_S = 3.0, 60.0
"""A thousand nodes that lost everybody ask within three seconds, as they do when a version is published."""


def pauses_s(rng: Random) -> Iterator[float]:
    """Before each question, as long as nobody is there."""
    pause_s = FIRST_S
    while True:
        yield pause_s * rng.uniform(0.5, 1.5)
        pause_s = min(2 * pause_s, LONGEST_S)


async def ask_while_alone(is_alone: Callable[[], bool], ask: Callable[[], Awaitable[object]], rng: Random) -> None:
    """Look again and again, for ever."""
    pauses = pauses_s(rng)
    while True:
        await trio.sleep(next(pauses))
        if is_alone():
            await ask()
        else:
            pauses = pauses_s(rng)
