"""What the operator ordered: an order is recorded with its reason, in the transaction that carries it out."""

import getpass
import os
import socket
from contextlib import suppress
from typing import Any, Literal

import sqlalchemy as sa

from coordinator.store.tables import orders

Action = Literal["pause", "resume", "ban", "unban", "publish", "rollback", "restore"]

LISTED = 50
REASON_MAX_CHARS = 300


def record(
    connection: sa.Connection, action: Action, subject: str, reason: str, *, given_by: str = "", now_ms: int
) -> None:
    """Write an order down; by the user of this process, if nobody else is named."""
    values = {"action": action, "subject": subject, "reason": reason, "given_by": given_by or whoami()}
    connection.execute(sa.insert(orders).values(given_ms=now_ms, **values))


def about(connection: sa.Connection, *subjects: str) -> list[dict[str, Any]]:
    """The orders about a node, its owner or a version, the newest first; all of them if nobody is named."""
    here = orders.c.subject.in_(subjects) if subjects else sa.true()
    rows = connection.execute(sa.select(orders).where(here).order_by(orders.c.number.desc()).limit(LISTED))
    return [dict(row) for row in rows.mappings()]


def standing_ban(connection: sa.Connection, owner: str) -> dict[str, Any] | None:
    """The order by which an owner is banned; None if the last one let them in, or there never was one."""
    here = sa.select(orders).where(orders.c.subject == owner, orders.c.action.in_(("ban", "unban")))
    given = connection.execute(here.order_by(orders.c.number.desc()).limit(1)).mappings().first()
    return dict(given) if given and given["action"] == "ban" else None


def whoami() -> str:
    """Who gives orders from this machine."""
    name = str(os.getuid())
    with suppress(KeyError, OSError):
        name = getpass.getuser()
    return f"{name}@{socket.gethostname()}"[:100]
