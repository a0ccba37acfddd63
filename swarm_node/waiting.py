"""Waiting for whichever comes first."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def first_of(*waits: Callable[[], Awaitable[T]]) -> T:
    """What the first of these returns; the others are cancelled. A failure of any is raised as it is."""
    found: list[T] = []
    failed: list[BaseException] = []

    async def wait_for(one: Callable[[], Awaitable[T]]) -> None:
        try:
            found.append(await one())
        except Exception as error:  # raised below, outside of the nursery, which would wrap it
            failed.append(error)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for one in waits:
            nursery.start_soon(wait_for, one)
    if found:
        return found[0]
    raise failed[0]
