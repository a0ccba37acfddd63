"""Waiting for the first of several events, and for the end of the program that started this node."""

import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


async def first_of(*waits: Callable[[], Awaitable[T]]) -> T:
    """Return the result of the first wait that ends, and cancel the others; raise its error unchanged if it fails."""
    results: list[T] = []
    failed: list[BaseException] = []

    async def wait_for(wait: Callable[[], Awaitable[T]]) -> None:
        try:
            results.append(await wait())
        except Exception as error:  # raised below, outside of the nursery, which would wrap it
            failed.append(error)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(wait_for, wait)
    if results:
        return results[0]
    raise failed[0]


class Interrupt(Protocol):
    """An event that ends a wait early."""

    def is_set(self) -> bool: ...

    async def wait(self) -> None: ...


class EitherEvent:
    """An event that is set once one of several is."""

    def __init__(self, *events: trio.Event) -> None:
        self._events = events

    def is_set(self) -> bool:
        """Return True if one is set."""
        return any(event.is_set() for event in self._events)

    async def wait(self) -> None:
        """Wait for the first of them."""
        await first_of(*(event.wait for event in self._events))


class Stoppable:
    """A run that another task may stop, and whose end it then awaits."""

    def __init__(self) -> None:
        self._scope, self._ended = trio.CancelScope(), trio.Event()

    @property
    def is_stopped(self) -> bool:
        """True once `stop` was called."""
        return self._scope.cancel_called

    async def run(self, act: Callable[[], Awaitable[None]], at_end: Callable[[], Awaitable[None]]) -> None:
        """Do `act` until it ends or is stopped, and then `at_end`, also when cancelled."""
        try:
            with self._scope:
                await act()
        finally:
            try:
                await at_end()
            finally:
                self._ended.set()

    async def stop(self) -> None:
        """End the run; return when its end is done."""
        self._scope.cancel()
        await self._ended.wait()


async def finish_when_cancelled(act: Callable[[], Awaitable[T]], *, patience_s: float) -> T:
    """Return the result of `act`. When cancelled, continue for `patience_s`, so that the answer can be recorded.

    For a request with a remote effect that only its answer reports.
    """
    results: list[T] = []
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
                results.append(await act())
            except Exception as error:  # raised below, outside of the nursery, which would wrap it
                failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return results[0]


READ_BYTES = 4096


def leave_with_parent() -> None:
    """Stop this process when standard input ends."""
    threading.Thread(target=_leave_after_input, name="parent", daemon=True).start()


def _leave_after_input() -> None:
    # A plain read: the interpreter may end while it waits, and a buffered one would hold a lock.
    while os.read(sys.stdin.fileno(), READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGINT)
