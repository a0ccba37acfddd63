"""Routes of the standings as files for scripts and statistics sites: CSV, JSON, and XML in the format of BOINC.

- `nodes.csv`, `nodes.json`, the same for owners and teams: one row per line of the leaderboard, amounts in millionths.
- `tables.xml`, `user.xml`, `team.xml`, `host.xml` and the compressed `user.gz`, `team.gz`, `host.gz`: the files
  that BOINC projects publish below `/stats/`. A user is an owner, a host a node, and credit is in whole units.
- Tags of tables: `update_time`, `nusers_total`, `nteams_total`, `nhosts_total`, `total_credit`. Of a user: `id`, `name`
  (the nickname and the end of the id), `cpid`, `create_time`, `total_credit`, `expavg_credit`, `expavg_time`. Of a
  team: `id`, `name`, `nusers` (its nodes), then as of a user without `cpid`. Of a host: `id`, `userid`, `host_cpid`,
  `domain_name`, then as of a user, and `rpc_time`.
- `id` is the first 52 bits of SHA-256 of the node's or owner's id, or of the team's name in small letters, `cpid` the
  first 128 bits. `expavg_credit` is the score times ln 2 / 7 days.
- A cell that a spreadsheet would take for a formula begins with an apostrophe.
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

from coordinator.api.snapshot import Page
from coordinator.api.watch import WATCH
from coordinator.pages import words
from coordinator.pages.board import BoardFigures
from coordinator.reports.ranking import HALF_LIFE_MS, RankingLine
from protocol.limits import DAY_MS
from protocol.people.names import nickname

routes = web.RouteTableDef()

MICROS = 1_000_000

PER_DAY = math.log(2) * DAY_MS / HALF_LIFE_MS
"""Factor from a score to credit per day, for a node with a constant rate."""

XML = "application/xml; charset=utf-8"


@routes.get("/stats/{file:(nodes|owners|teams)[.](csv|json)|tables[.]xml|(user|team|host)[.](xml|gz)}")
async def stats(request: web.Request) -> web.Response:
    """Return the standings as a file."""
    file = request.match_info["file"]
    moment = await request.app[WATCH].board.get()
    return moment.page(f"/stats/{file}", FILES[file]).reply(request)


def row(line: RankingLine) -> dict[str, Any]:
    """Return a line of the leaderboard as plain figures."""
    low, high = line.accept_interval or (None, None)
    return {
        "node_id": line.node_id,
        "owner": line.owner,
        "name": words.readable(line.name, line.node_id),
        "nickname": nickname(line.node_id),
        "team": line.team,
        "nodes": line.nodes,
        "state": line.state,
        "score_micros": round(line.score_micros),
        "posted_micros": line.posted_micros,
        "pending_micros": line.pending_micros,
        "voided_micros": line.voided_micros,
        "escrow_share": line.escrow_share,
        "trust": line.trust,
        "validated_tokens": line.validated_tokens,
        "accepted": line.accepted,
        "rejected": line.rejected,
        "accept_ratio": line.accept_ratio,
        "accept_low": low,
        "accept_high": high,
        "lag_updates": line.lag,
        "cost_micros_per_mtok": line.cost_micros_per_mtok,
        "price_micros_per_mtok": line.price_micros_per_mtok,
        "uploaded_bytes": line.uploaded_bytes,
        "tokens_per_s": line.tokens_per_s,
        "version": line.version,
        "last_seen_ms": line.last_seen_ms,
        "registered_ms": line.registered_ms,
    }


def _csv(lines: Sequence[RankingLine]) -> Page:
    rows = [row(line) for line in lines]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else ["node_id"])
    writer.writerows([_cell(value) for value in values.values()] for values in rows)
    return Page(text.getvalue().encode(), "text/csv; charset=utf-8")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _json(board: BoardFigures, lines: Sequence[RankingLine]) -> Page:
    value = {"ledger_size": board.ledger_size, "at_ms": board.now_ms, "rows": [row(line) for line in lines]}
    return Page(json.dumps(value).encode(), "application/json")


def _xml(tag: str, values: dict[str, Any]) -> str:
    inside = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())
    return f"<{tag}>{inside}</{tag}>"


def _tables(board: BoardFigures) -> Page:
    values = {
        "update_time": board.now_ms // 1000,
        "nusers_total": len(board.owners),
        "nteams_total": len(board.teams),
        "nhosts_total": len(board.nodes),
        "total_credit": _units(sum(line.posted_micros for line in board.nodes)),
    }
    return Page(f'<?xml version="1.0" encoding="UTF-8"?>\n{_xml("tables", values)}\n'.encode(), XML)


def _users(board: BoardFigures) -> Iterator[str]:
    for line in board.owners:
        yield _xml("user", {"id": number(line.owner), "name": words.owner(line.owner), "cpid": _digest(line.owner),
                            **_credit(line, board.now_ms)})  # fmt: skip


def _teams(board: BoardFigures) -> Iterator[str]:
    for line in board.teams:
        yield _xml("team", {"id": number(line.team.casefold()), "name": line.team, "nusers": line.nodes,
                            **_credit(line, board.now_ms)})  # fmt: skip


def _hosts(board: BoardFigures) -> Iterator[str]:
    for line in board.nodes:
        yield _xml("host", {"id": number(line.node_id), "userid": number(line.owner),
                            "host_cpid": _digest(line.node_id), "domain_name": words.readable(line.name, line.node_id),
                            **_credit(line, board.now_ms), "rpc_time": line.last_seen_ms // 1000})  # fmt: skip


def _credit(line: RankingLine, now_ms: int) -> dict[str, Any]:
    return {
        "create_time": line.registered_ms // 1000,
        "total_credit": _units(line.posted_micros),
        "expavg_credit": _units(line.score_micros * PER_DAY),
        "expavg_time": now_ms // 1000,
    }


def number(name: str) -> int:
    """Return the integer that these files require as an id; a float represents it exactly."""
    return int(_digest(name)[:13], 16)


def _digest(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:32]


def _units(micros: float) -> str:
    return f"{micros / MICROS:.6f}"


def _list(tag: str, make: Callable[[BoardFigures], Iterator[str]]) -> Callable[[BoardFigures], Page]:
    def page(board: BoardFigures) -> Page:
        text = "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', f"<{tag}>", *make(board), f"</{tag}>", ""])
        return Page(text.encode(), XML)

    return page


def _packed(make: Callable[[BoardFigures], Page]) -> Callable[[BoardFigures], Page]:
    return lambda board: Page(gzip.compress(make(board).body, mtime=0), "application/gzip")


_USERS, _TEAMS, _HOSTS = _list("users", _users), _list("teams", _teams), _list("hosts", _hosts)

FILES: dict[str, Callable[[BoardFigures], Page]] = {
    "nodes.csv": lambda board: _csv(board.nodes),
    "owners.csv": lambda board: _csv(board.owners),
    "teams.csv": lambda board: _csv(board.teams),
    "nodes.json": lambda board: _json(board, board.nodes),
    "owners.json": lambda board: _json(board, board.owners),
    "teams.json": lambda board: _json(board, board.teams),
    "tables.xml": _tables,
    "user.xml": _USERS,
    "team.xml": _TEAMS,
    "host.xml": _HOSTS,
    "user.gz": _packed(_USERS),
    "team.gz": _packed(_TEAMS),
    "host.gz": _packed(_HOSTS),
}
