"""The usage of each API key by day.

- A day is one of UTC, and has a row if a query of the key was answered on it. Rows are kept as long as their key, which
  is for ever: ten years of daily use are 3,650.
- The row is written in the transaction that charges the key (`coordinator.transactions.api_keys`), so the days of a key
  add up to its totals. Answers whose queries were deleted before days were counted are in the totals alone.
- A refund is taken off the day of the answer, not of the audit: no day has less than nothing.
"""

from datetime import date
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import api_keys, key_days
from ledger.prepared import Prepared
from protocol import limits

DAY_MS = 86_400_000


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


def record(connection: sa.Connection, api_key: int, usage: KeyUsage, answered_ms: int) -> None:
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
