"""API keys: who may query the endpoint, and for how much, as effects.

- A key is shown once, when it is made. The store has only its digest.
- Each open query reserves what its dearest answer costs, at least 1 micro-unit in a round that pays; when it ends, the
  key is charged what nodes were credited. So a key never spends more than its budget, which is a part of the round's.
- If a caller leaves while nodes sample its query, the reservation stays until their leases end, and pays them if they
  answer: else whoever hangs up after each lease would spend the round's budget instead of the key's.
- A revoked or expired key asks nothing more. Its open queries are answered and charged.
- The usage of a key is counted at the key and by day, when an answer is accepted or retracted: its queries are deleted
  some day. Both are written in one transaction, so the days of a key add up to its totals. Answers whose queries were
  deleted before days were counted are in the totals alone.
- A day is one of UTC, and has a row if a query of the key was answered on it. Rows are kept as long as their key, which
  is for ever: ten years of daily use are 3,650. A refund is taken off the day of the answer, not of the audit: no day
  has less than nothing.
"""

import secrets
from datetime import date
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import IS_OPEN, QUERY_OPEN, api_keys, key_days, leases, queries
from ledger.prepared import Prepared
from protocol import limits
from protocol.errors import ConfigInvalid, KeyBudgetUsed, KeyRefused, NotAuthorised, NotFound
from protocol.limits import DAY_MS
from protocol.policy import chunks
from protocol.text.money import Unit


class KeyUsage(NamedTuple):
    """Answered queries, the tokens of their prompts and of their answers, and what these cost."""

    answered_queries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    spent_micros: int = 0


_which = (key_days.c.api_key == sa.bindparam("which", type_=sa.Integer)) & (
    key_days.c.day == sa.bindparam("on", type_=sa.Integer)
)
_counted = (key_days.c.answered_queries, key_days.c.prompt_tokens, key_days.c.tokens, key_days.c.spent_micros)
# Built once: making a statement costs more than running it, and the first one runs for every answer.
_add = Prepared(
    sa.update(key_days)
    .where(_which)
    .values({column: column + sa.bindparam(f"more_{column.name}", type_=column.type) for column in _counted})
)
_begin = Prepared(sa.insert(key_days))


def record_day(connection: sa.Connection, api_key: int, usage: KeyUsage, answered_ms: int) -> None:
    """Add to the usage of a key on the day of an answer; what is refunded is negative."""
    day, more = answered_ms // DAY_MS, usage._asdict()
    if not _add(connection, which=api_key, on=day, **{f"more_{name}": count for name, count in more.items()}).rowcount:
        _begin(connection, api_key=api_key, day=day, **more)


def list_days(
    connection: sa.Connection, days: int = limits.USAGE_DAYS, *, api_key: int | None = None, now_ms: int
) -> list[dict[str, Any]]:
    """Return the usage of a key, or the sum of all, on each of the last `days` days that has any; the oldest is first.

    The last day is today: it has not ended.
    """
    sums: list[Any] = [sa.func.sum(column).label(column.name) for column in _counted]
    stmt = sa.select(key_days.c.day, *sums).where(key_days.c.day > now_ms // DAY_MS - days)
    # The primary key finds the days of a named key, so those of all are named: the rows of all years are many.
    named = key_days.c.api_key.in_(sa.select(api_keys.c.number)) if api_key is None else key_days.c.api_key == api_key
    stmt = stmt.where(named)
    rows = connection.execute(stmt.group_by(key_days.c.day).order_by(key_days.c.day))
    return [{"day": _date(day), **KeyUsage(*map(int, counts))._asdict()} for day, *counts in rows]


def _date(day: int) -> str:
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()


PREFIX = "es-"
"""The beginning of every key, so that scanners of leaked secrets find it."""

SECRET_BYTES = 24

NAME_MAX_CHARS = 64


class ApiKeyRow(NamedTuple):
    """An API key as it is stored."""

    number: int
    name: str
    digest: str
    budget_micros: int
    spent_micros: int
    reserved_micros: int
    made_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    publishes: bool
    answered_queries: int
    tokens: int
    """The sampled tokens of its answers that no audit has rejected."""
    used_ms: int | None
    """The time of its last query; None if it has none."""


class LeftQuery(NamedTuple):
    """The key of a query that was withdrawn, and what the query still reserves."""

    api_key: int
    reserved_micros: int


# Built once: making a statement costs more than running it, and these run for every query.
_of_digest = Prepared(sa.select(api_keys).where(api_keys.c.digest == sa.bindparam("of")), ApiKeyRow)
_more = sa.bindparam("micros", type_=sa.BigInteger)
_left = api_keys.c.budget_micros - api_keys.c.spent_micros - api_keys.c.reserved_micros
_reserve = Prepared(
    sa.update(api_keys)
    .where(api_keys.c.number == sa.bindparam("which"), _left >= _more)
    .values(
        reserved_micros=api_keys.c.reserved_micros + _more,
        used_ms=sa.bindparam("now", type_=sa.BigInteger),
    )
)
_reserve_more = Prepared(
    sa.update(api_keys)
    .where(api_keys.c.number == sa.bindparam("which"), _left >= _more)
    .values(reserved_micros=api_keys.c.reserved_micros + _more)
)
_settle = Prepared(
    sa.update(api_keys)
    .where(api_keys.c.number == sa.bindparam("which"))
    .values(
        reserved_micros=api_keys.c.reserved_micros - sa.bindparam("freed", type_=sa.BigInteger),
        spent_micros=api_keys.c.spent_micros + sa.bindparam("spent", type_=sa.BigInteger),
        answered_queries=api_keys.c.answered_queries + sa.bindparam("answered", type_=sa.Integer),
        tokens=api_keys.c.tokens + sa.bindparam("got", type_=sa.BigInteger),
    )
)

_end_left = Prepared(
    sa.update(queries)
    .where(queries.c.group_no == sa.bindparam("group"), queries.c.state == "withdrawn", queries.c.ended_ms.is_(None))
    .where(~sa.exists().where(leases.c.group_no == queries.c.group_no, IS_OPEN))
    .values(ended_ms=sa.bindparam("now", type_=sa.BigInteger))
    .returning(queries.c.api_key, queries.c.reserved_micros),
    LeftQuery,
)


def make(
    connection: sa.Connection,
    name: str,
    budget_micros: int,
    *,
    expires_ms: int | None = None,
    publishes: bool = False,
    now_ms: int,
) -> str:
    """Make a key with a budget, and return it."""
    if not name or len(name) > NAME_MAX_CHARS or not name.isprintable():
        raise ConfigInvalid(f"The name of a key has 1 to {NAME_MAX_CHARS} printable characters.")
    if connection.execute(sa.select(api_keys.c.number).where(api_keys.c.name == name)).first() is not None:
        raise ConfigInvalid(f"There is a key {name!r} already.", hint="Choose another name, or revoke that key.")
    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    number = 1 + (connection.execute(sa.select(sa.func.max(api_keys.c.number))).scalar() or 0)
    row: dict[str, Any] = {
        "number": number,
        "name": name,
        "digest": _digest(key),
        "budget_micros": budget_micros,
        "made_ms": now_ms,
    }
    row |= {"spent_micros": 0, "reserved_micros": 0, "expires_ms": expires_ms, "publishes": publishes}
    connection.execute(sa.insert(api_keys).values(**row))
    return key


def revoke(connection: sa.Connection, name: str, *, now_ms: int) -> None:
    """Revoke a key for ever."""
    which = (api_keys.c.name == name) & api_keys.c.revoked_ms.is_(None)
    if not connection.execute(sa.update(api_keys).where(which).values(revoked_ms=now_ms)).rowcount:
        raise NotFound(f"There is no key {name!r} to revoke.", hint="See `swarm-coordinator api-keys list`.")


def set_budget(connection: sa.Connection, name: str, budget_micros: int) -> None:
    """Change the budget of a key; what it has spent stays spent."""
    stmt = sa.update(api_keys).where(api_keys.c.name == name).values(budget_micros=budget_micros)
    if not connection.execute(stmt).rowcount:
        raise NotFound(f"There is no key {name!r}.", hint="See `swarm-coordinator api-keys list`.")


def usage_of(connection: sa.Connection, key: str, days: int = limits.USAGE_DAYS, *, now_ms: int) -> dict[str, Any]:
    """Return what the holder of a key has spent and got, what is left, its open queries, and its last `days` days."""
    row = _usable(connection, key, now_ms)
    waiting = sa.select(sa.func.count()).where(queries.c.api_key == row.number, QUERY_OPEN)
    names = ("name", "budget_micros", "spent_micros", "reserved_micros", "expires_ms")
    shown = {name: getattr(row, name) for name in (*names, "answered_queries", "tokens", "used_ms")}
    shown["open_queries"] = connection.execute(waiting).scalar_one()
    shown["days"] = list_days(connection, days, api_key=row.number, now_ms=now_ms)
    return _with_left(shown)


def list_keys(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all keys, the oldest first, with what they have used, what is left, and their open queries."""
    waiting = sa.select(sa.func.count()).where(queries.c.api_key == api_keys.c.number, QUERY_OPEN).scalar_subquery()
    shown = [column for column in api_keys.c if column.name not in ("number", "digest")]
    rows = connection.execute(sa.select(*shown, waiting.label("open_queries")).order_by(api_keys.c.number))
    return [_with_left(dict(row)) for row in rows.mappings()]


def list_keys_and_days(
    connection: sa.Connection, days: int = limits.USAGE_DAYS, *, now_ms: int
) -> dict[str, list[dict[str, Any]]]:
    """Return all keys, and the sums of their usage on each of the last `days` days."""
    return {"keys": list_keys(connection), "days": list_days(connection, days, now_ms=now_ms)}


def days_of(
    connection: sa.Connection, name: str | None, days: int = limits.USAGE_DAYS, *, now_ms: int
) -> list[dict[str, Any]]:
    """Return the usage of a key, or the sum of all for None, on each of the last `days` days."""
    if name is None:
        return list_days(connection, days, now_ms=now_ms)
    number = connection.execute(sa.select(api_keys.c.number).where(api_keys.c.name == name)).scalar()
    if number is None:
        raise NotFound(f"There is no key {name!r}.", hint="See `swarm-coordinator api-keys list`.")
    return list_days(connection, days, api_key=number, now_ms=now_ms)


def _with_left(row: dict[str, Any]) -> dict[str, Any]:
    left = row["budget_micros"] - row["spent_micros"] - row["reserved_micros"]
    return row | {"left_micros": max(0, left)}


def number_of(connection: sa.Connection, key: str, *, now_ms: int) -> int:
    """Return the number of a key that may be used now."""
    return _usable(connection, key, now_ms).number


def publisher(connection: sa.Connection, key: str, *, now_ms: int) -> int:
    """Return the number of a key whose holder may publish versions now."""
    row = _usable(connection, key, now_ms)
    if not row.publishes:
        raise NotAuthorised(
            f"The API key {row.name!r} may not publish versions.",
            hint="The operator makes a key for a trainer with `swarm-coordinator api-keys create --publishes`.",
        )
    return row.number


def state_of(connection: sa.Connection, key: str, *, now_ms: int) -> dict[str, Any]:
    """Return what the holder of a key may know about it."""
    row = _usable(connection, key, now_ms)
    names = ("name", "budget_micros", "spent_micros", "reserved_micros", "expires_ms", "publishes")
    return {name: getattr(row, name) for name in names}


def _usable(connection: sa.Connection, key: str, now_ms: int) -> ApiKeyRow:
    """Return the row of a key that may be used now."""
    row = _of_digest(connection, of=_digest(key)).first()
    if row is None:
        raise KeyRefused("This API key is not known in this round.", hint="Ask the operator for a key.")
    if row.revoked_ms is not None or (row.expires_ms is not None and row.expires_ms <= now_ms):
        ended = "revoked" if row.revoked_ms is not None else "valid until a time that is over"
        raise KeyRefused(f"The API key {row.name!r} was {ended}.", hint="Ask the operator for a new key.")
    return row


def reserve(connection: sa.Connection, number: int, micros: int, unit: Unit, *, now_ms: int) -> None:
    """Reserve what a query costs at its dearest; raise `KeyBudgetUsed` if the budget does not cover it."""
    if not _reserve(connection, which=number, micros=micros, now=now_ms).rowcount:
        row = connection.execute(sa.select(_left.label("left")).where(api_keys.c.number == number)).one()
        left_over = unit.exact(max(0, row.left))
        raise KeyBudgetUsed(
            f"This query may cost {unit.exact(micros)}, and {left_over} are left of the key's budget.",
            hint="Ask for fewer tokens, wait for open queries to end, or ask the operator for a larger budget.",
        )


def reserve_more(connection: sa.Connection, number: int, micros: int) -> bool:
    """Reserve more for a query that is under way; return False if the budget does not cover it."""
    return bool(_reserve_more(connection, which=number, micros=micros).rowcount)


def charge(
    connection: sa.Connection, number: int, usage: KeyUsage, *, reserved_micros: int = 0, answered_ms: int
) -> None:
    """Charge a key for an answer, in the place of what was reserved for its query, and count it; or refund it."""
    spent, answered, tokens = usage.spent_micros, usage.answered_queries, usage.tokens
    _settle(connection, which=number, freed=reserved_micros, spent=spent, answered=answered, got=tokens)
    record_day(connection, number, usage, answered_ms)


def release(connection: sa.Connection, number: int, reserved_micros: int) -> None:
    """Release what was reserved for a query that has ended without an answer."""
    _settle(connection, which=number, freed=reserved_micros, spent=0, answered=0, got=0)


def release_left(connection: sa.Connection, group_no: int, now_ms: int) -> None:
    """Release what a withdrawn query still reserves, if no node samples its group any more."""
    left = _end_left(connection, group=group_no, now=now_ms).first()
    if left is not None:
        release(connection, left.api_key, left.reserved_micros)


def _digest(key: str) -> str:
    return chunks.digest(key.encode(errors="surrogateescape"))
