"""Orders of the operator: each is recorded with its reason, in the transaction that carries it out."""

import getpass
import os
import socket
from contextlib import suppress
from typing import Any, Literal

import sqlalchemy as sa

from coordinator.store.tables import orders

Action = Literal["pause", "resume", "ban", "unban", "publish", "rollback", "retract", "restore"]

LISTED = 50
REASON_MAX_CHARS = 300


def record(
    connection: sa.Connection, action: Action, subject: str, reason: str, *, given_by: str = "", now_ms: int
) -> None:
    """Record an order; it is given by the user of this process unless `given_by` names another."""
    values = {"action": action, "subject": subject, "reason": reason, "given_by": given_by or whoami()}
    connection.execute(sa.insert(orders).values(given_ms=now_ms, **values))


def about(connection: sa.Connection, *subjects: str) -> list[dict[str, Any]]:
    """Return the orders about a node, its owner or a version, the newest first; all orders without `subjects`."""
    which = orders.c.subject.in_(subjects) if subjects else sa.true()
    rows = connection.execute(sa.select(orders).where(which).order_by(orders.c.number.desc()).limit(LISTED))
    return [dict(row) for row in rows.mappings()]


def standing_ban(connection: sa.Connection, owner: str) -> dict[str, Any] | None:
    """Return the order by which an owner is banned; None if the last one ended the ban, or there was none."""
    stmt = sa.select(orders).where(orders.c.subject == owner, orders.c.action.in_(("ban", "unban")))
    given = connection.execute(stmt.order_by(orders.c.number.desc()).limit(1)).mappings().first()
    return dict(given) if given and given["action"] == "ban" else None


def whoami() -> str:
    """Return the name for orders given from this machine: user@host."""
    name = str(os.getuid())
    with suppress(KeyError, OSError):
        name = getpass.getuser()
    return f"{name}@{socket.gethostname()}"[:100]
