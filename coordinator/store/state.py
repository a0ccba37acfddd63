"""The coordinator's database: one writer at a time, and every change as one effect.

- An *effect* is a plain function `(connection, …) → outcome`. It is applied completely, and is durable when
  `Database.run` returns, or not at all.
- Effects that wait together are committed together: each in a savepoint of its own, so that one that fails leaves the
  others as they are, and all of them share one transaction and one sync of the disk. Each is answered after the commit.
  One that is alone needs no savepoint.
- A `FollowingEffect` belongs to another request, and uses what an effect records. It waits directly behind that effect,
  and is skipped if that effect fails.
- Writers run one after the other, on SQLite as on PostgreSQL, where they may be several processes (decision 2): an
  effect never sees another half done, and its counts stay valid until it ends.
- A payout command is `alone` over many effects, since it calls the rail between them.
- The effects of the operator and of timers go first, and are never refused. Those of nodes are refused as `Overloaded`
  once `WAITING_MAX` of them wait: so the queue stays short, and those in it are answered in time.
- `Database.read` is for effects that only read, and take long: it has a thread of its own, and the writer goes on.
- `Database.read_for_stranger` has another one, for requests that anybody may send, also with a key of a node, which
  costs nothing: a crowd of strangers never delays what the round, its nodes' work and the endpoint's callers read.
  `coordinator.api.strangers` bounds how many of these reads wait.
- SQLite runs in WAL mode with synchronous=FULL: acknowledged effects survive `kill -9` and a power cut.
- A store of another schema than this software's is refused (`coordinator.store.schema`).
- Effects take `now_ms` and random values as arguments; none of them reads a clock.
"""

import asyncio
import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import sqlalchemy as sa

from coordinator.base.files import open_private
from coordinator.store import schema
from ledger.prepared import say
from protocol.errors import ConfigInvalid, Overloaded, PayoutFailed

P = ParamSpec("P")
T = TypeVar("T")

GROUP_MAX = 64
"""Effects in one transaction: enough that many share a sync of the disk, and few enough for a short wait."""

WAITING_MAX = 256
"""Effects of nodes that wait: a fraction of a second's work, which is the longest wait of the learner's requests."""

READS_WAITING_MAX = 256
"""Reads that wait, each for the ones before it."""

STRANGERS_READS_MAX = 64
"""Reads of strangers that wait: the dearest take 50 ms each, so that an answer comes within a few seconds."""

DURABLE = ("journal_mode=WAL", "synchronous=FULL")

ROOMY = ("cache_size=-16384", "wal_autocheckpoint=4000", "temp_store=MEMORY")
"""Pages in memory (KiB) and in the log (of 4 KiB): names are hashes, so each batch of entries touches pages all over an
index. With SQLite's own 2 MiB and 1,000 pages, they leave the cache before the commit, and each commit copies its whole
log into the file. The pages that a savepoint would restore stay in memory, too: an effect changes more pages than fit
into 64 KiB, and the rest would go to a temporary file. None of these settings affects durability."""


@dataclass(frozen=True)
class Dialect:
    """The statements that differ between the two databases; all others are the same SQL."""

    begin: tuple[str, ...]
    """Statements that begin the only transaction that may write."""
    begin_reading: tuple[str, ...]
    end_reading: tuple[str, ...]


SQLITE = Dialect(
    ("BEGIN IMMEDIATE",),
    ("PRAGMA temp_store=DEFAULT", "PRAGMA query_only=ON", "BEGIN"),  # a long read may have much to sort
    ("ROLLBACK", "PRAGMA query_only=OFF", "PRAGMA temp_store=MEMORY"),
)
POSTGRESQL = Dialect(
    # A stricter level, if it is the server's default, would show the store as it was before the lock was granted.
    ("BEGIN ISOLATION LEVEL READ COMMITTED", "SELECT pg_advisory_xact_lock(1)"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",),
    ("ROLLBACK",),
)

PAYING = 2
"""The advisory lock of the payout command; the writer's is 1."""


class PayoutBusy(PayoutFailed):
    """Another payout command uses this store; two could call a rail at the same moment."""

    code = "payout_busy"


@dataclass(frozen=True)
class FollowingEffect(Generic[T]):
    """An effect that is called directly after another one, if that one succeeds."""

    effect: Callable[[sa.Connection], T]
    answer: "asyncio.Future[T | None]"
    """The outcome after the commit; None if it was not called. If it is cancelled before, the effect is not called."""


@dataclass
class _Call:
    """An effect that waits, and then its outcome or failure."""

    effect: Callable[[sa.Connection], Any]
    answer: asyncio.Future[Any]
    follows: "_Call | None" = None
    has_succeeded: bool = False
    outcome: Any = None
    failure: BaseException | None = None


class _Reader:
    """A thread that reads, and the number of reads that wait for it."""

    def __init__(self, name: str, waiting_max: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting, self._waiting_max = 0, waiting_max

    async def run(self, read: Callable[[], T]) -> T:
        """Call `read` on the thread, unless too many wait already."""
        if self._waiting >= self._waiting_max:
            raise _overloaded()
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the thread after the reads that wait."""
        self._thread.shutdown(wait=True)


class Database:
    """The store of one round: an SQLite file, or a PostgreSQL database by its URL."""

    def __init__(self, where: Path | str, *, any_schema: bool = False) -> None:
        """Open a store; `any_schema` is for code that copies or upgrades one."""
        self._where = where
        self._dialect = SQLITE if isinstance(where, Path) else POSTGRESQL
        self._engine = engine(where)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._reader = _Reader("reader", READS_WAITING_MAX)
        self._strangers_reader = _Reader("strangers", READS_WAITING_MAX)
        self._lock = threading.Lock()
        """The lock of the two queues and of `_is_writing`."""
        self._first: deque[_Call] = deque()
        self._line: deque[_Call] = deque()
        self._is_writing = False
        self.waiting = 0
        """The number of nodes' effects that are not answered yet."""
        if not any_schema:
            self._refuse_other_schemas()

    async def run(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an effect of the operator or of the coordinator itself, before those of the nodes."""
        return await self._queue(self._first, lambda connection: effect(connection, *args, **kwargs))

    async def run_for_node(
        self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an effect for a node's request, unless too many wait already."""
        return await self.run_followed(lambda connection: effect(connection, *args, **kwargs), ())

    async def run_followed(self, effect: Callable[[sa.Connection], T], followers: Sequence[FollowingEffect[Any]]) -> T:
        """Call an effect for a node's request, unless too many wait already, and then its followers."""
        try:
            self.require_room()
        except Overloaded:
            for follower in followers:
                follower.answer.set_result(None)
            raise
        self.waiting += 1 + len(followers)
        try:
            return await self._queue(self._line, effect, followers)
        finally:
            self.waiting -= 1 + len(followers)

    def require_room(self) -> None:
        """Refuse a request that would have to wait for long; call it before any work for the request."""
        if self.waiting >= WAITING_MAX:
            raise _overloaded()

    async def read(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an effect that changes nothing; it sees the store as it was at its start and waits for earlier reads."""
        return await self._reader.run(lambda: self._read_now(effect, *args, **kwargs))

    async def read_for_stranger(
        self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an effect that changes nothing for a request that anybody may send; it waits for those of strangers."""
        return await self._strangers_reader.run(lambda: self._read_now(effect, *args, **kwargs))

    def run_now(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an effect without an event loop, for start-up and commands."""
        with self._transaction() as connection:
            return effect(connection, *args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the only right to pay out of this store, on any machine; other payout commands are refused.

        Writers go on. If the process dies, its lock is free again: that of the file, or that of its connection.
        """
        with self._hand() as is_ours:
            if not is_ours:
                raise PayoutBusy("Another payout command is at work on this round.", hint="Wait for it to end.")
            yield

    @contextmanager
    def _hand(self) -> Iterator[bool]:
        if isinstance(self._where, Path):
            with open_private(self._where.with_name("payouts.lock")) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                else:
                    yield True
            return
        with self._engine.connect() as connection:
            try:
                yield bool(connection.execute(sa.select(sa.func.pg_try_advisory_lock(PAYING))).scalar_one())
            finally:
                connection.invalidate()  # the lock ends with its connection, whatever happened meanwhile

    def close(self) -> None:
        """Close the store after all waiting effects are done."""
        self._writer.shutdown(wait=True)
        self._reader.close()
        self._strangers_reader.close()
        self._engine.dispose()

    def _refuse_other_schemas(self) -> None:
        try:
            self.run_now(schema.open_store)
        except BaseException as error:
            self.close()
            if type(error) is sa.exc.DatabaseError:  # SQLite's other errors, such as a lock, have classes below it
                raise ConfigInvalid(
                    f"{self._where} cannot be read: {error.orig}.",
                    hint="Restore the last backup into a new folder with `swarm-coordinator restore`.",
                ) from error
            raise

    async def _queue(
        self, line: deque[_Call], effect: Callable[[sa.Connection], T], followers: Sequence[FollowingEffect[Any]] = ()
    ) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        call = _Call(effect, answer)
        with self._lock:
            line.append(call)
            line.extend(_Call(follower.effect, follower.answer, follows=call) for follower in followers)
            idle, self._is_writing = not self._is_writing, True
        if idle:
            self._writer.submit(self._work_off, loop)
        return await answer

    def _work_off(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit group after group on the writer's thread, until no effect waits."""
        while group := self._next_group():
            self._commit(group)
            with suppress(RuntimeError):  # the loop has ended, and with it all who waited
                loop.call_soon_threadsafe(_settle, group)

    def _next_group(self) -> list[_Call]:
        with self._lock:
            group: list[_Call] = []
            for line in (self._first, self._line):
                while line and len(group) < GROUP_MAX:
                    group.append(line.popleft())
            self._is_writing = bool(group)
            return group

    def _commit(self, group: list[_Call]) -> None:
        """Run the calls in one transaction; if that fails as a whole, none of them has an effect."""
        try:
            with self._transaction() as connection:
                for call in group:
                    _do(connection, call, alone=len(group) == 1)
        except BaseException as failure:  # the thread goes on; each caller gets the failure
            for call in group:
                call.failure, call.has_succeeded = failure, False

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            try:
                say(connection, *self._dialect.begin, waits=True)
                yield connection
                say(connection, "COMMIT")
            except BaseException:  # raised again
                with suppress(sa.exc.DBAPIError):  # SQLite has rolled back by itself if the disk was full
                    say(connection, "ROLLBACK")
                raise

    def _read_now(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._engine.connect() as connection:
            try:
                say(connection, *self._dialect.begin_reading, waits=True)
                return effect(connection, *args, **kwargs)
            finally:
                self._end_reading(connection)

    def _end_reading(self, connection: sa.Connection) -> None:
        """Let a connection write again, or remove it from the pool if that fails.

        SQLite has rolled back by itself if the disk failed during the read, and refuses to do so again.
        """
        try:
            say(connection, *self._dialect.end_reading)
        except BaseException as error:  # whatever it is, the writer might use this connection next
            connection.invalidate()
            if not isinstance(error, sa.exc.DBAPIError):
                raise


def _do(connection: sa.Connection, call: _Call, *, alone: bool) -> None:
    """Run one effect of a group; if it fails, it is undone, and the others go on."""
    if call.answer.done() or (call.follows is not None and not call.follows.has_succeeded):
        return  # the caller has gone, or there is nothing to follow
    if alone:
        call.outcome, call.has_succeeded = call.effect(connection), True  # a failure ends the transaction
        return
    say(connection, "SAVEPOINT effect")
    try:
        call.outcome, call.has_succeeded = call.effect(connection), True
    except Exception as failure:  # the caller gets it
        call.failure = failure
        say(connection, "ROLLBACK TO SAVEPOINT effect")
    say(connection, "RELEASE SAVEPOINT effect")


def _settle(group: list[_Call]) -> None:
    """Set the outcome of each call that still waits, on the event loop."""
    for call in group:
        if call.answer.done():
            continue
        if call.failure is None:
            call.answer.set_result(call.outcome)
        else:
            call.answer.set_exception(call.failure)


def _overloaded() -> Overloaded:
    return Overloaded("The coordinator is overloaded.", hint="Try again after the time in Retry-After.")


def engine(where: Path | str) -> sa.Engine:
    """Return an engine for a store; it begins no transaction, since `Database` begins and ends each one."""
    if isinstance(where, str):
        try:
            from coordinator.store import postgresql
        except ModuleNotFoundError:
            raise ConfigInvalid("PostgreSQL needs its driver.", hint="pip install 'echo-swarm[postgres]'") from None
        return postgresql.engine(where)
    if not where.exists():
        open_private(where).close()  # SQLite gives its other files the same mode
    require_usable(where, os.R_OK | os.W_OK)
    made = sa.create_engine(f"sqlite:///{where}", isolation_level="AUTOCOMMIT")
    sa.event.listen(made, "connect", _tune_sqlite)
    return made


def require_usable(file: Path, mode: int) -> None:
    """Raise an error that names the store's file if this user may not use it; SQLite's error does not."""
    if file.exists() and not os.access(file, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def _tune_sqlite(connection: Any, _record: object) -> None:
    for pragma in (*DURABLE, "foreign_keys=ON", "busy_timeout=10000", *ROOMY):
        connection.execute(f"PRAGMA {pragma}")
