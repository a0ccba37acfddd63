"""The leaderboard's figures: the contribution of each node, owner and day, and their ranks.

- The score is validated credit with a half-life of seven days: a node that stops falls, and one that starts late can
  still rise.
- It is a fold over the ledger's posts, kept in memory and continued where it stopped; a restart folds all posts again.
  Two scores keep their ratio as time passes, so no post is read again to age it.
- Of the last day, the fold keeps each node's credit by the hour; without it, the score is that of a day ago.
- All other figures are read again each time from the store's totals (`coordinator.reports.summary`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.reports import summary
from coordinator.reports.health import percentile
from coordinator.rules.scores import wilson
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import LEFT, fleet, nodes, rollouts
from ledger import store
from ledger.entry import MTOK
from ledger.tables import claims_table, entries_table
from protocol.ids import NodeId
from protocol.limits import DAY_MS, HOUR_MS, NAME_MAX_CHARS
from protocol.people import names
from protocol.people.names import nickname
from protocol.text.plain import visible

HALF_LIFE_MS = 7 * DAY_MS


@dataclass(frozen=True)
class Day:
    """The totals of the credit posted on one day."""

    credit_micros: int = 0
    tokens: int = 0
    groups: int = 0
    first_entry: int = 0
    nodes: int = 0


@dataclass(frozen=True)
class RankingLine:
    """A line of the leaderboard: a node, or all nodes of an owner or a team."""

    node_id: NodeId
    owner: str
    name: str
    state: str
    score_micros: float
    posted_micros: int
    pending_micros: int
    voided_micros: int
    validated_tokens: int
    accepted: int
    rejected: int
    lag: int | None
    version: int
    tokens_per_s: float
    price_micros_per_mtok: int
    uploaded_bytes: int
    last_seen_ms: int
    registered_ms: int
    trust: str = "new"
    nodes: int = 1
    hours: tuple[int, ...] = ()
    """Credit of each of the last 24 hours in micro-units, the newest last."""
    earlier_micros: float = 0.0
    """The score without the credit of the last 24 hours: it ranks as the score of that time did."""

    @property
    def team(self) -> str:
        """Return the part after the last @ of the name, which anybody can choose; "" for the operator's name."""
        team = names.without_id(self.name).rpartition("@")[2].strip() if "@" in self.name else ""
        return "" if names.is_office(team) else visible(team, NAME_MAX_CHARS)

    @cached_property
    def searched(self) -> str:
        """The text in which a search looks; made once, since strangers search as often as they like."""
        owner = names.with_id(nickname(self.owner), self.owner)
        return f"{self.name} {self.node_id} {self.owner} {owner}".casefold()

    @property
    def accept_ratio(self) -> float | None:
        return self.accepted / tried if (tried := self.accepted + self.rejected) else None

    @property
    def accept_interval(self) -> tuple[float, float] | None:
        return wilson(self.accepted, self.accepted + self.rejected)

    @property
    def cost_micros_per_mtok(self) -> float | None:
        """Return the cost of a million validated tokens of this node."""
        return self.posted_micros * MTOK / self.validated_tokens if self.validated_tokens else None

    @property
    def escrow_share(self) -> float | None:
        """Return the share of the credit earned and not voided that still waits."""
        earned = self.posted_micros + self.pending_micros
        return self.pending_micros / earned if earned else None


class _Hour(NamedTuple):
    """Shares of the posts of one hour in a node's credit, and in its score."""

    credit_micros: int = 0
    weight: float = 0.0


class Fold:
    """The totals of the ledger and the batches so far; `read` adds new rows."""

    def __init__(self) -> None:
        self.days: dict[int, Day] = {}
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._ages: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._last_days: dict[str, int] = {}
        self._earlier: defaultdict[str, float] = defaultdict(float)
        self._lately: dict[str, dict[int, _Hour]] = {}
        self._began_ms: int | None = None
        self._entries = self._batches = 0

    def read(self, connection: sa.Connection) -> None:
        end = store.size(connection)
        entry = entries_table.c
        posts = connection.execute(
            sa.select(entry.index, entry.recorded_ms, claims_table.c.node_id, claims_table.c.amount_micros,
                      claims_table.c.tokens)
            .join(claims_table, claims_table.c.claim_id == sa.func.substr(entry.effect, len("settle:") + 1))
            .where(entry.index >= self._entries, entry.index < end, entry.kind == "post")
            .order_by(entry.index)
        ).all()  # fmt: skip
        age = rollouts.c.batch - 1 - rollouts.c.policy_update
        trained = connection.execute(
            sa.select(rollouts.c.node_id, age, sa.func.count(), sa.func.max(rollouts.c.batch))
            .where(rollouts.c.batch > self._batches)
            .group_by(rollouts.c.node_id, age)
        ).all()
        for post in posts:
            self._post(*post)
        for node_id, old, count, _ in trained:
            self._ages[node_id][old] += count
        self._entries = end
        self._batches = max((newest for *_, newest in trained), default=self._batches)

    def score(self, node_id: str, now_ms: int) -> float:
        """Return a node's validated credit in micro-units, halved after every half-life."""
        return self._aged(self._weights.get(node_id, 0.0), now_ms)

    def lately(self, node_id: str, now_ms: int) -> tuple[tuple[int, ...], float]:
        """Return a node's credit in each of the last 24 hours, and its score without them."""
        newest = now_ms // HOUR_MS
        hours = self._last_hours(node_id, newest)
        credit = tuple(hours.get(hour, _Hour()).credit_micros for hour in range(newest - 23, newest + 1))
        return credit, self._aged(self._earlier.get(node_id, 0.0), now_ms)

    def _last_hours(self, node_id: str, newest: int) -> "dict[int, _Hour]":
        """Return a node's hours of the day that ends with `newest`; what is older counts as earlier from now on."""
        hours = self._lately.setdefault(node_id, {})
        for hour in [hour for hour in hours if hour <= newest - 24]:
            self._earlier[node_id] += hours.pop(hour).weight
        return hours

    def _aged(self, weight: float, now_ms: int) -> float:
        began_ms = now_ms if self._began_ms is None else self._began_ms
        return weight * float(0.5 ** ((now_ms - began_ms) / HALF_LIFE_MS))

    def lag(self, node_id: str) -> int | None:
        """Return the median age in updates at which a node's groups were trained on."""
        ages = self._ages.get(node_id)
        return percentile(ages, 0.5) if ages else None

    def _post(self, index: int, recorded_ms: int, node_id: str, amount_micros: int, tokens: int) -> None:
        if self._began_ms is None:
            self._began_ms = recorded_ms
        weight = amount_micros * 2.0 ** ((recorded_ms - self._began_ms) / HALF_LIFE_MS)
        self._weights[node_id] += weight
        hour = recorded_ms // HOUR_MS
        hours = self._last_hours(node_id, hour)
        credit_micros, earlier = hours.get(hour, _Hour())
        hours[hour] = _Hour(credit_micros + amount_micros, earlier + weight)
        number = recorded_ms // DAY_MS
        day = self.days.get(number, Day(first_entry=index))
        is_first = self._last_days.get(node_id) != number
        self._last_days[node_id] = number
        self.days[number] = Day(
            credit_micros=day.credit_micros + amount_micros,
            tokens=day.tokens + tokens,
            groups=day.groups + 1,
            first_entry=day.first_entry,
            nodes=day.nodes + is_first,
        )


def by_node(
    connection: sa.Connection, fold: Fold, levels: Mapping[str, str], *, silent_after_ms: int, now_ms: int
) -> list[RankingLine]:
    """Return a line per node, the highest score first; `levels` has the trust of each owner."""
    standby = set(connection.execute(sa.select(fleet.c.node_id).where(fleet.c.works.is_(False))).scalars())
    joined = sa.select(nodes.c.node_id, nodes.c.owner, nodes.c.registered_ms)
    registered = {row.node_id: row for row in connection.execute(joined)}
    absent = LEFT if get_fact(connection, FINISHED) else "silent"
    lines = []
    for row in summary.leaderboard(connection):
        node_id = row["node_id"]
        is_silent = row["last_seen_ms"] < now_ms - silent_after_ms
        if row["phase"] == LEFT:
            state = LEFT
        else:
            state = absent if is_silent else "standby" if node_id in standby else row["phase"]
        hours, earlier_micros = fold.lately(node_id, now_ms)
        lines.append(
            RankingLine(
                node_id=node_id,
                owner=registered[node_id].owner,
                state=state,
                score_micros=fold.score(node_id, now_ms),
                accepted=row["accepted_rollouts"],
                rejected=row["rejected_rollouts"],
                lag=fold.lag(node_id),
                registered_ms=registered[node_id].registered_ms,
                trust=levels.get(registered[node_id].owner, "new"),
                hours=hours,
                earlier_micros=earlier_micros,
                **{name: row[name] for name in _TAKEN},
            )
        )
    return sorted(lines, key=lambda line: (-line.score_micros, -line.pending_micros, line.node_id))


_TAKEN = (
    "name", "posted_micros", "pending_micros", "voided_micros", "validated_tokens", "version", "tokens_per_s",
    "price_micros_per_mtok", "uploaded_bytes", "last_seen_ms",
)  # fmt: skip


def by_owner(lines: Iterable[RankingLine]) -> list[RankingLine]:
    """Return a line per owner; lag, price and version are those of the owner's best node."""
    by_id: dict[str, RankingLine] = {}
    for line in lines:
        known = by_id.get(line.owner)
        by_id[line.owner] = line if known is None else _together(known, line)
    return sorted(by_id.values(), key=lambda line: (-line.score_micros, -line.pending_micros, line.owner))


def by_team(lines: Iterable[RankingLine]) -> list[RankingLine]:
    """Return a line per team; names that look the same are one team, and nodes without a team are in no line."""
    by_name: dict[str, RankingLine] = {}
    for line in lines:
        if team := names.skeleton(line.team):
            known = by_name.get(team)
            by_name[team] = line if known is None else _teamed(known, line)
    return sorted(by_name.values(), key=lambda line: (-line.score_micros, -line.pending_micros, line.team.casefold()))


def _teamed(first: RankingLine, second: RankingLine) -> RankingLine:
    """Return the sum of both lines under the older one's name: a later member does not rename the team."""
    older = min(first, second, key=lambda line: (line.registered_ms, line.node_id))
    return replace(_together(first, second), name=older.name)


_SUMMED = (
    "score_micros", "posted_micros", "pending_micros", "voided_micros", "validated_tokens", "accepted", "rejected",
    "tokens_per_s", "uploaded_bytes", "nodes", "earlier_micros",
)  # fmt: skip


def _together(first: RankingLine, second: RankingLine) -> RankingLine:
    sums: dict[str, Any] = {name: getattr(first, name) + getattr(second, name) for name in _SUMMED}
    newer = max(first, second, key=lambda line: line.last_seen_ms)
    return replace(
        first,
        **sums,
        hours=tuple(map(sum, zip(first.hours, second.hours, strict=True))),
        state=newer.state,
        version=max(first.version, second.version),
        last_seen_ms=newer.last_seen_ms,
        registered_ms=min(first.registered_ms, second.registered_ms),
    )


def risen(lines: Sequence[RankingLine]) -> list[int | None]:
    """Return the places that each of the ranked `lines` rose within a day; None for one without credit before."""
    earlier = sorted(
        (place for place, line in enumerate(lines) if line.earlier_micros > 0),
        key=lambda place: -lines[place].earlier_micros,
    )
    changes: list[int | None] = [None] * len(lines)
    for before, place in enumerate(earlier):
        changes[place] = before - place
    return changes


SORTS: dict[str, Callable[[RankingLine], float]] = {
    "score": lambda line: line.score_micros,
    "credit": lambda line: line.posted_micros,
    "pending": lambda line: line.pending_micros,
    "tokens": lambda line: line.validated_tokens,
    "accepted": lambda line: (line.accept_interval or (-1.0,))[0],
    "lag": lambda line: -(10**9 if line.lag is None else line.lag),
    "uploaded": lambda line: line.uploaded_bytes,
    "cost": lambda line: -(10.0**18 if line.cost_micros_per_mtok is None else line.cost_micros_per_mtok),
    "rate": lambda line: line.tokens_per_s,
}
"""The sort keys of the board, the best first; an accept ratio is sorted by the lower end of its interval."""
