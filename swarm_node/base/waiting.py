"""Waiting: for whichever comes first, and for the end of the program that started this node."""

import os
import signal
import sys
import threading
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


async def heard_out(act: Callable[[], Awaitable[T]], *, patience_s: float) -> T:
    """What this returns. Where it is cancelled meanwhile, it goes on for so long, so that it can keep what it hears.

    For a question that has an effect elsewhere, of which only the answer tells.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    async def hurry() -> None:
        try:
            await trio.sleep_forever()
        finally:
            acting.deadline = trio.current_time() + patience_s

    async with trio.open_nursery() as nursery:
        with trio.CancelScope(shield=True) as acting:
            nursery.start_soon(hurry)
            try:
                found.append(await act())
            except Exception as error:  # raised below, outside of the nursery, which would wrap it
                failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return found[0]


READ_BYTES = 4096


def leave_with_parent() -> None:
    """Watch standard input from now on."""
    threading.Thread(target=_leave_after_input, name="parent", daemon=True).start()


def _leave_after_input() -> None:
    # A plain read: the interpreter may end while it waits, and a buffered one would hold a lock.
    while os.read(sys.stdin.fileno(), READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGINT)
