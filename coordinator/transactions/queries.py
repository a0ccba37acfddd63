"""Queries: prompts that callers of the endpoint want completed, as effects.

    open ──a node's rollout is accepted──▶ answered
        └──its caller waits no more──────▶ withdrawn

- A query is one group, below zero like those of evaluations: leased, signed, paid and audited as any other, and never
  trained on. Where a query names a version, only that one answers it; else the version of whichever node takes it.
- Queries go before other groups (`coordinator.transactions.offers`). The key with the fewest queries under way goes
  first, then the oldest query: a key with a thousand queries does not delay a key with one. Its caller may give
  queries a priority, which orders those of one key and nobody else's.
- A query may name the highest price at which it is sampled: nodes that ask more do not get it, and it reserves less.
- If a node is lost, another one continues from its fragments. Reading these costs more where the round pays for
  contexts: if the key's budget does not cover it, the answer begins anew. A query with `report_every_ms` has fragments
  from the start: its caller reads the tokens while they are sampled (`coordinator.transactions.query_answers`).
- In a finished round, a query is refused as soon as no node works on it.
- An ended query is deleted after `store.queries_d` days, once every claim for it is settled: no audit can change any
  more what its key was charged. Leases, claims, audits and the ledger stay: they prove what nodes were paid.
- An open lease of a withdrawn query is surplus: its node may stop, and is paid by the key if it does not. Such a query
  has no `ended_ms` until its last lease has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import GroupState, RolloutState
from coordinator.rules.prompt_refs import QUERY
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import (
    IN_NO_BATCH,
    IS_OPEN,
    QUERY_OPEN,
    audits,
    groups,
    is_alive,
    leases,
    nodes,
    parts,
    queries,
    rollouts,
)
from coordinator.transactions import admission, api_keys
from coordinator.transactions.api_keys import KeyUsage
from coordinator.transactions.leases import LeaseTerms
from ledger.entry import Pending, amount
from ledger.prepared import Prepared
from protocol.errors import NotFound, OutOfOrder, Overloaded
from protocol.work.lease import Lease
from protocol.work.rollout import pack_tokens

OPEN_MAX = 4096
"""Open queries of all keys: more would wait for hours, and their callers are told to come back."""

KEY_OPEN_MAX = 1024
"""Open queries of one key."""

FORGOTTEN_AT_ONCE = 4000
"""Queries that one transaction deletes: nodes wait for it, but each step reads all answers."""


class WaitingQuery(NamedTuple):
    """A query that waits for a node, and the ended lease that the node may continue."""

    group_no: int
    begun: str | None
    begun_version: int | None
    samples: int
    tokens_max: int


class QueryRow(NamedTuple):
    """A query as it is stored."""

    number: int
    api_key: int
    group_no: int
    state: str
    version: int | None
    prompt: bytes
    samples: int
    tokens_max: int
    seed: int | None
    reserved_micros: int
    asked_ms: int
    until_ms: int
    ended_ms: int | None
    temperature: float | None
    report_every_ms: int | None
    priority: int
    max_price: int | None


class OpenQueries(NamedTuple):
    """The numbers of open queries."""

    everybody: int
    own: int


class NumberEnds(NamedTuple):
    """The last number of a query, and the lowest of a group; None without any."""

    last: int | None
    lowest: int | None


class AnswerCost(NamedTuple):
    """The credit of the nodes that gave an answer, and its tokens; those of the parts that it continues, too."""

    credit_micros: int
    tokens: int


# Built once: making a statement costs more than running it, and these run while queries wait.
_asked = queries.alias("asked")
_under_way = (
    sa.select(_asked.c.api_key, sa.func.count().label("leased"))
    .join_from(_asked, groups, groups.c.group_no == _asked.c.group_no)
    .where(_asked.c.state == sa.text("'open'"), groups.c.state == GroupState.LEASED.value)
    .group_by(_asked.c.api_key)
    .subquery()
)
_own_order = (queries.c.priority, queries.c.number)
_place = sa.func.row_number().over(partition_by=queries.c.api_key, order_by=_own_order)
_waiting = Prepared(
    sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version, queries.c.samples, queries.c.tokens_max)
    .join_from(queries, groups, groups.c.group_no == queries.c.group_no)
    .outerjoin(_under_way, _under_way.c.api_key == queries.c.api_key)
    .where(QUERY_OPEN, groups.c.state.in_(sa.bindparam("states", expanding=True)))
    .where(queries.c.until_ms > sa.bindparam("now", type_=sa.BigInteger))
    .where(queries.c.version.is_(None) | (queries.c.version == sa.bindparam("version", type_=sa.BigInteger)))
    .where(queries.c.max_price.is_(None) | (queries.c.max_price >= sa.bindparam("price", type_=sa.BigInteger)))
    .order_by(groups.c.state == sa.text("'trial'"), sa.func.coalesce(_under_way.c.leased, 0) + _place, queries.c.number)
    .limit(sa.bindparam("count", type_=sa.Integer)),
    WaitingQuery,
)
_asked_for = Prepared(sa.select(queries).where(queries.c.number == sa.bindparam("number")), QueryRow)
_open_query_of = Prepared(sa.select(queries).where(queries.c.group_no == sa.bindparam("group"), QUERY_OPEN), QueryRow)
_unleased = Prepared(
    sa.select(queries.c.number)
    .join_from(queries, groups, groups.c.group_no == queries.c.group_no)
    .where(queries.c.number.in_(sa.bindparam("numbers", expanding=True)), QUERY_OPEN)
    .where(groups.c.state == GroupState.OPEN.value)
)
_change_reserved = Prepared(
    sa.update(queries)
    .where(queries.c.number == sa.bindparam("which"))
    .values(reserved_micros=sa.bindparam("micros", type_=sa.BigInteger))
)
_forgotten = Prepared(
    sa.select(queries.c.number).where(QUERY_OPEN, queries.c.until_ms <= sa.bindparam("now", type_=sa.BigInteger))
)
_of_key = queries.c.api_key == sa.bindparam("key", type_=sa.Integer)
_counts: list[Any] = [sa.func.count().label("everybody"), sa.func.count().filter(_of_key).label("own")]
_open_now = Prepared(sa.select(*_counts).where(QUERY_OPEN), OpenQueries)
_ends: list[Any] = [
    sa.select(sa.func.max(queries.c.number)).scalar_subquery().label("last"),
    sa.select(sa.func.min(groups.c.group_no)).scalar_subquery().label("lowest"),
]
_ends_of_numbers = Prepared(sa.select(*_ends), NumberEnds)
_record = Prepared(sa.insert(queries))
_record_group = Prepared(sa.insert(groups))
_end_open = Prepared(
    sa.update(queries)
    .where(queries.c.number == sa.bindparam("which"), QUERY_OPEN)
    .values(state=sa.bindparam("ended_as", type_=sa.String), ended_ms=sa.bindparam("now", type_=sa.BigInteger))
)
_of_parts = [
    sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(parts.c.whole == rollouts.c.claim_id).scalar_subquery()
    for column in (parts.c.credit_micros, parts.c.tokens)
]
_answer_of = Prepared(
    sa.select(
        (rollouts.c.credit_micros + _of_parts[0]).label("credit_micros"),
        (rollouts.c.tokens + _of_parts[1]).label("tokens"),
    )
    .where(rollouts.c.group_no == sa.bindparam("group"), IN_NO_BATCH)
    .where(rollouts.c.state.in_((RolloutState.SERVED.value, RolloutState.RETRACTED.value)))
    .order_by(rollouts.c.accepted_ms)
    .limit(1),
    AnswerCost,
)


_credits: list[sa.Select[Any]] = [
    sa.select(rollouts.c.claim_id, rollouts.c.group_no, rollouts.c.credit_micros, rollouts.c.accepted_ms),
    sa.select(parts.c.claim_id, rollouts.c.group_no, parts.c.credit_micros, rollouts.c.accepted_ms).where(
        rollouts.c.claim_id == parts.c.whole
    ),
]
"""The credit of whole answers, and of their parts."""
_charged = [
    credits.add_columns(queries.c.api_key, queries.c.reserved_micros).where(
        queries.c.group_no == rollouts.c.group_no, queries.c.state == "withdrawn"
    )
    for credits in _credits
]


@dataclass(frozen=True)
class Query:
    """A prompt to complete, and what its answer may be."""

    prompt: Sequence[int]
    samples: int
    tokens_max: int
    version: int | None = None
    """The only version that may answer; None: any that nodes hold."""
    seed: int | None = None
    temperature: float | None = None
    """The temperature of its leases; None: that of the version that answers."""
    report_every_ms: int | None = None
    """The interval at which its caller reads the tokens while they are sampled; None: it waits for the whole answer."""
    priority: int = 0
    """The place among the waiting queries of its key: the lowest is first."""
    max_price: int | None = None
    """The highest price of a node that may answer, in micro-units per million tokens; None: the round's."""

    def max_cost_micros(self, terms: LeaseTerms, dearest_price: int) -> int:
        """Return the cost of the dearest answer at a price, or at its own highest price if that is lower.

        It is at least 1 in a round that pays: a used-up budget opens no query at all.
        """
        price = dearest_price if self.max_price is None else min(dearest_price, self.max_price)
        context = terms.context_tokens_paid(pack_tokens(list(self.prompt)), ())
        return max(amount(self.samples * self.tokens_max + context, price), min(1, dearest_price))


def ask(
    connection: sa.Connection,
    key: str,
    asked: Sequence[Query],
    *,
    terms: LeaseTerms,
    dearest_price: int,
    patience_ms: int,
    now_ms: int,
    open_max: int = OPEN_MAX,
    key_open_max: int = KEY_OPEN_MAX,
) -> list[int]:
    """Record the queries of one request by an API key, all or none, and return their numbers.

    `dearest_price` is the highest price that the round pays, any bonus included.
    """
    number = api_keys.number_of(connection, key, now_ms=now_ms)
    if get_fact(connection, FINISHED):
        raise round_finished()
    _end_forgotten(connection, now_ms)
    _require_room(connection, number, len(asked), open_max, key_open_max)
    ends = _ends_of_numbers(connection).single_row()
    last, lowest = ends.last or 0, min(0, ends.lowest or 0)
    numbers = list[int]()
    for place, query in enumerate(asked, 1):
        cost = query.max_cost_micros(terms, dearest_price)
        api_keys.reserve(connection, number, cost, terms.unit, now_ms=now_ms)
        row = {
            "number": last + place,
            "api_key": number,
            "group_no": lowest - place,
            "state": "open",
            "version": query.version,
            "prompt": pack_tokens(list(query.prompt)),
            "samples": query.samples,
            "tokens_max": query.tokens_max,
            "seed": query.seed,
            "temperature": query.temperature,
            "report_every_ms": query.report_every_ms,
            "priority": query.priority,
            "max_price": query.max_price,
            "reserved_micros": cost,
            "asked_ms": now_ms,
            "until_ms": now_ms + patience_ms,
        }
        _record(connection, **row)
        group = {"group_no": lowest - place, "state": GroupState.OPEN.value, "split": QUERY, "prompt": last + place}
        _record_group(connection, **group)
        numbers.append(last + place)
    return numbers


def round_finished() -> NotFound:
    """Return the error of queries that no node will answer any more."""
    return NotFound("The round is finished, and its nodes have left.", hint="Ask its operator for the exported policy.")


def read_abandoned(connection: sa.Connection, numbers: Sequence[int]) -> Sequence[int]:
    """Return those of these queries that no node works on in a finished round, which gives no more leases."""
    return _unleased(connection, numbers=numbers).scalars() if get_fact(connection, FINISHED) else ()


def versions_held(connection: sa.Connection, *, terms: LeaseTerms, alive_since_ms: int) -> dict[int, int]:
    """Return the versions that live nodes hold and may still sample, the newest first, with the number of nodes."""
    held = sa.select(nodes.c.version, sa.func.count()).where(is_alive(alive_since_ms), nodes.c.version > 0)
    found = connection.execute(held.group_by(nodes.c.version).order_by(nodes.c.version.desc())).all()
    return {version: count for version, count in found if not admission.is_past(connection, version, terms)}


def _require_room(connection: sa.Connection, key: int, more: int, open_max: int, key_open_max: int) -> None:
    everybody, own = _open_now(connection, key=key).single_row()
    if own + more > key_open_max or everybody + more > open_max:
        whose, most = ("this key", key_open_max) if own + more > key_open_max else ("all keys", open_max)
        raise Overloaded(f"The open queries of {whose} would be more than {most}.", hint="Wait for some to end.")


def waiting(
    connection: sa.Connection, version: int, count: int, *, price: int, on_trial: bool, now_ms: int
) -> list[WaitingQuery]:
    """Return up to `count` queries that wait for a node with this version and price, those that go first before others.

    Those that only newcomers work on come last; another newcomer gets none of them.
    """
    states = [GroupState.OPEN.value] if on_trial else [GroupState.OPEN.value, GroupState.TRIAL.value]
    return list(_waiting(connection, version=version, price=price, now=now_ms, count=count, states=states))


def first_lease(
    connection: sa.Connection,
    number: int,
    *,
    lease_id: str,
    version: int,
    seed: int,
    price: int,
    terms: LeaseTerms,
    now_ms: int,
) -> Lease:
    """Return a lease that answers a query from the start; `seed` is used if the query has none."""
    row = _asked_for(connection, number=number).single_row()
    return Lease(
        lease_id=lease_id,
        version=version,
        seed=seed if row.seed is None else row.seed,
        samples=row.samples,
        prompt=row.prompt,
        price_micros_per_mtok=price,
        expires_ms=now_ms + terms.timeout_ms,
        context_tokens_paid=terms.context_tokens_paid(row.prompt, ()),
        temperature=row.temperature,
        tokens_max=row.tokens_max if row.tokens_max < terms.max_new_tokens else 0,
        report_every_ms=row.report_every_ms or 0,
    )


def is_covered(connection: sa.Connection, group_no: int, cost_micros: int) -> bool:
    """Return True if a continued answer may cost this much: reserve what is missing, if the key's budget has it.

    It is True, too, for a group that is no open query.
    """
    row = _open_query_of(connection, group=group_no).first()
    more = 0 if row is None else cost_micros - row.reserved_micros
    if row is None or more <= 0:
        return True
    if not api_keys.reserve_more(connection, row.api_key, more):
        return False
    _change_reserved(connection, which=row.number, micros=cost_micros)
    return True


def record_answer(connection: sa.Connection, number: int, credited: Sequence[Pending], now_ms: int) -> None:
    """Record that a rollout of a query was accepted, and charge its key what nodes were credited.

    The answer to a withdrawn query is charged up to what the query reserved; no caller has it.
    """
    row = _asked_for(connection, number=number).single_row()
    micros, tokens = sum(each.amount_micros for each in credited), sum(each.tokens for each in credited)
    if _end(connection, number, "answered", now_ms):
        usage = KeyUsage(1, len(row.prompt) // 4, tokens, micros)
        api_keys.charge(connection, row.api_key, usage, reserved_micros=row.reserved_micros, answered_ms=now_ms)
    elif row.state == "withdrawn" and row.ended_ms is None:
        micros = min(micros, row.reserved_micros)
        _change_reserved(connection, which=number, micros=row.reserved_micros - micros)
        usage = KeyUsage(0, 0, 0, micros)
        api_keys.charge(connection, row.api_key, usage, reserved_micros=micros, answered_ms=now_ms)
        api_keys.release_left(connection, row.group_no, now_ms)


def withdraw_open(connection: sa.Connection, numbers: Sequence[int], *, now_ms: int) -> None:
    """Withdraw those of these queries that are still open; the usual case is that none is."""
    still = sa.select(queries.c.number).where(queries.c.number.in_(numbers), QUERY_OPEN)
    withdraw(connection, connection.execute(still).scalars().all(), now_ms=now_ms)


def withdraw(connection: sa.Connection, numbers: Sequence[int], *, now_ms: int) -> int:
    """End open queries that nobody waits for, and return how many there were."""
    ended = 0
    for number in numbers:
        row = _asked_for(connection, number=number).single_row()
        if not _end(connection, number, "withdrawn", None):
            continue
        ended += 1
        which = IS_OPEN & (leases.c.group_no == row.group_no)
        connection.execute(sa.update(leases).where(which).values(surplus=sa.true()))
        api_keys.release_left(connection, row.group_no, now_ms)
    return ended


def _end_forgotten(connection: sa.Connection, now_ms: int) -> None:
    """End the open queries whose callers waited at a process that was killed."""
    withdraw(connection, _forgotten(connection, now=now_ms).scalars(), now_ms=now_ms)


def refund(connection: sa.Connection, group_no: int) -> None:
    """Give a key back what it was charged for an answer that was retracted for a fault."""
    row = connection.execute(sa.select(queries).where(queries.c.group_no == group_no)).first()
    if row is not None and row.state == "answered":
        cost, prompt_tokens = _cost(connection, group_no), len(row.prompt) // 4
        refunded = KeyUsage(0, -prompt_tokens, -cost.tokens, -cost.credit_micros)
        api_keys.charge(connection, row.api_key, refunded, answered_ms=row.ended_ms)


def refund_void(connection: sa.Connection, claim_ids: Sequence[str]) -> None:
    """Give keys back what they were charged for claims that are void now and answered withdrawn queries.

    A query reserves the cost of its dearest answer, so only several answers together may have cost more than it
    reserved. Then it has nothing left, and what is certain is refunded: what the claim cost more than all others.
    """
    for charged, claim in zip(_charged, (rollouts.c.claim_id, parts.c.claim_id), strict=True):
        for row in connection.execute(charged.where(claim.in_(claim_ids))).all():
            own = (each.where(rollouts.c.group_no == row.group_no, IN_NO_BATCH) for each in _credits)
            of_group = sa.union_all(*own).subquery()
            total = connection.execute(sa.select(sa.func.sum(of_group.c.credit_micros))).scalar_one()
            certain = row.credit_micros if row.reserved_micros else 2 * row.credit_micros - int(total)
            micros = max(certain, 0)
            api_keys.charge(connection, row.api_key, KeyUsage(0, 0, 0, -micros), answered_ms=row.accepted_ms)


def find_old(connection: sa.Connection, ended_before_ms: int, most: int = FORGOTTEN_AT_ONCE) -> tuple[int, ...]:
    """Return the numbers of up to `most` queries that ended before a time and that no audit can change any more.

    It reads much, so it does not belong into a writer's transaction. The newest query stays: it keeps its number taken.
    """
    unsettled = sa.select(leases.c.group_no).join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
    at_work = sa.select(leases.c.group_no).where(IS_OPEN)
    old = (
        sa.select(queries.c.number)
        .where(~QUERY_OPEN, queries.c.ended_ms < ended_before_ms)
        .where(queries.c.number < sa.select(sa.func.max(queries.c.number)).scalar_subquery())
        .where(queries.c.group_no.not_in(unsettled.where(~audits.c.settled)), queries.c.group_no.not_in(at_work))
        .order_by(queries.c.number)
        .limit(most)
    )
    return tuple(connection.execute(old).scalars())


def forget(connection: sa.Connection, numbers: Sequence[int]) -> None:
    """Delete queries."""
    deleted = connection.execute(sa.delete(queries).where(queries.c.number.in_(numbers))).rowcount
    if deleted != len(numbers):
        raise OutOfOrder(f"{len(numbers) - deleted} of {len(numbers)} queries were deleted meanwhile.")


def _end(connection: sa.Connection, number: int, state: str, now_ms: int | None) -> bool:
    return bool(_end_open(connection, which=number, ended_as=state, now=now_ms).rowcount)


def _cost(connection: sa.Connection, group_no: int) -> AnswerCost:
    """Return what nodes were credited for the answer of a group, and its tokens, parts included."""
    answered = _answer_of(connection, group=group_no).first()
    return AnswerCost(0, 0) if answered is None else AnswerCost(int(answered.credit_micros), int(answered.tokens))
