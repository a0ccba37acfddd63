"""A node's page: its figures, days, rejections by reason, and receipts, which the browser can check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.pages import charts, words
from coordinator.pages.layout import Column, Screen, Site, document, live, table
from coordinator.pages.pictures import Contribution, portrait
from coordinator.reports.earning_rates import OwnerPayouts, RoundPayouts
from coordinator.reports.ranking import RankingLine
from protocol.people.names import nickname
from protocol.text.html import Markup, el
from protocol.text.money import MICROS, EarningPace, Unit, next_payout, pace_text

DAY_COLUMNS = (
    Column("day", is_text=True),
    Column("groups", screen=Screen.TABLET),
    Column("tokens"),
    Column("credit"),
    Column("pending"),
    Column("void", screen=Screen.TABLET),
)
REFUSAL_COLUMNS = (
    Column("code", is_text=True),
    Column("times"),
    Column("last", is_text=True, screen=Screen.TABLET),
    Column("message", is_text=True),
)
CLAIM_COLUMNS = (
    Column("claim", is_text=True),
    Column("accepted", is_text=True, screen=Screen.TABLET),
    Column("version", screen=Screen.TABLET),
    Column("tokens"),
    Column("credit"),
    Column("state", is_text=True),
    Column("proof", is_text=True),
)


@dataclass(frozen=True)
class NodeFigures:
    """The figures of a node at one moment."""

    line: RankingLine
    days: Sequence[Mapping[str, int]]
    refusals: Sequence[Mapping[str, Any]]
    claims: Sequence[Mapping[str, Any]]
    round_id: str
    now_ms: int
    site: Site
    unit: Unit
    pace: EarningPace
    paid: OwnerPayouts
    payouts: RoundPayouts
    rank: int
    nodes: int
    finished: bool = False
    """True if the round is finished: nothing can be earned."""


def render(node: NodeFigures) -> str:
    """Return the node's page as HTML."""
    line = node.line
    return document(
        words.readable(line.name, line.node_id),
        "",
        node.site,
        el("p", portrait(line.node_id), el("code", line.node_id)),
        live("node", _facts(node)),
        live("earnings", _earnings(node), heading="Earnings"),
        live("days", _days(node.days, node.unit), heading="By day"),
        live("refusals", _refusals(node.refusals), heading="Rejections"),
        el("section", el("h2", "Receipts", id="receipts-heading"), _receipts(node), id="receipts",
           aria_labelledby="receipts-heading"),
        el("section", el("h2", "Show it elsewhere", id="show-heading"), _pictures(node), id="show",
           aria_labelledby="show-heading"),
        about=f"Place {node.rank} of {node.nodes}, with {words.counted(line.validated_tokens, 'verified token')}.",
    )  # fmt: skip


def contribution(line: RankingLine, rank: int, nodes: int, site: Site, unit: Unit) -> Contribution:
    """Return the figures for a node's badge and card."""
    return Contribution(
        node_id=line.node_id,
        name=line.name,
        title=site.title,
        rank=rank,
        nodes=nodes,
        tokens=line.validated_tokens,
        credit=words.sum_of(unit, line.posted_micros),
        unit=unit.name,
        hours=line.hours,
    )


def _pictures(node: NodeFigures) -> Any:
    """Show the badge and the card, with the text that puts the badge on another page."""
    page = f"{node.site.home}/nodes/{node.line.node_id}"
    name = words.readable(node.line.name, node.line.node_id)
    copied = f"[![Echo Swarm]({page}/badge.svg)]({page})"
    return (
        el("p", el("img", src=f"/nodes/{node.line.node_id}/badge.svg", alt=f"Badge of {name}", height=20), " ",
           el("a", "Card, 1200 × 630", href=f"/nodes/{node.line.node_id}/card.svg")),
        el("p", "In Markdown: ", el("code", copied), class_="soft"),
    )  # fmt: skip


def _facts(node: NodeFigures) -> Markup:
    line, unit = node.line, node.unit
    owner: Any = words.owner(line.owner) if line.owner != line.node_id else "itself"
    interval = line.accept_interval
    facts = {
        "nickname": nickname(line.node_id),
        "owner": owner,
        "state": el("span", line.state, class_=f"state {line.state}"),
        "last seen": words.ago(node.now_ms - line.last_seen_ms),
        "recent credit": words.money(unit, line.score_micros),
        "credit": words.money(unit, line.posted_micros),
        "pending": words.money(unit, line.pending_micros),
        "revoked credit": words.money(unit, line.voided_micros),
        "validated tokens": words.whole(line.validated_tokens),
        "accepted": f"{words.whole(line.accepted)} of {words.whole(line.accepted + line.rejected)}",
        "share accepted (95\u202f% interval)": f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}\u202f%"
        if interval
        else words.DASH,
        "staleness": words.DASH if line.lag is None else words.counted(line.lag, "update"),
        "price per million tokens": words.exact(unit, line.price_micros_per_mtok),
        "credit per million validated tokens": words.money(unit, line.cost_micros_per_mtok),
        "uploaded": words.size(line.uploaded_bytes),
        "tokens/s": words.figure(line.tokens_per_s),
        "version": line.version,
    }
    return el("dl", (el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="facts")


def _earnings(node: NodeFigures) -> Markup:
    """Build the rate with its trend, what the owner was paid, and when the next payout is due."""
    unit, paid, payouts = node.unit, node.paid, node.payouts
    rate = pace_text(unit, node.pace, separator=words.NARROW, finished=node.finished)
    facts: dict[str, Any] = {
        "rate": f"{rate[0].upper()}{rate[1:]}.",
        "paid to the owner": words.exact(unit, paid.paid_micros) if paid.payouts else "nothing yet",
        "last payout": words.moment(paid.last_ms),
        "next payout": next_payout(unit, payouts.next_ms, payouts.minimum_micros, node.now_ms, words.NARROW),
    }
    return el("dl", (el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="facts")


def _days(days: Sequence[Mapping[str, int]], unit: Unit) -> Any:
    rows = [
        [
            words.day(day["day"]),
            *(words.whole(day[name]) for name in ("groups", "tokens")),
            *(words.sum_of(unit, day[name]) for name in ("posted", "pending", "voided")),
        ]
        for day in days
    ]
    points = [(float(day["day"] - days[0]["day"]), day["posted"] / MICROS) for day in reversed(days)]
    chart = (
        charts.bars("credit-by-day", f"validated credit, in {unit.name}", "day (0: the last one)", points)
        if len(points) > 1
        else None
    )
    return chart, table(
        f"Claims by the day of their acceptance; amounts in {unit.name}", DAY_COLUMNS, rows, empty="No claims yet."
    )


def _refusals(refusals: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        [
            el("code", refusal["code"]),
            words.whole(refusal["count"]),
            words.moment(refusal["last_ms"]),
            words.line(refusal["last_message"]),
        ]
        for refusal in refusals
    ]
    return table("Rejected requests, by error code", REFUSAL_COLUMNS, rows, empty="None.")


def _receipts(node: NodeFigures) -> Any:
    rows = [
        [
            el("code", f"{claim['claim_id'][:12]}…", title=claim["claim_id"]),
            words.moment(claim["accepted_ms"]),
            claim["version"],
            words.whole(claim["tokens"]),
            _entry(claim["entry"], words.sum_of(node.unit, claim["credit_micros"])),
            _entry(claim["settled_entry"], claim["state"]),
            [el("button", "check", type="button", data_claim=claim["claim_id"]), " ",
             el("a", "file", href=f"/v1/receipts/{claim['claim_id']}", download=f"{claim['claim_id']}.receipt")],
        ]
        for claim in node.claims
    ]  # fmt: skip
    about = el(
        "p",
        "A receipt proves a credit. Your browser checks it without trusting this server: the chain of root keys "
        "from the round id, the signature of the ledger's checkpoint, and the inclusion proof of the entry. "
        "Compare the round id with the end of your join string: ",
        el("code", node.round_id),
        class_="soft",
    )
    script = el("script", type="module", src="/static/check.js")
    checking = el(
        "div",
        about,
        el("p", "", id="checked", role="status"),
        data_round=node.round_id,
        data_node=node.line.node_id,
        data_unit=node.unit.name,
    )
    return (
        checking,
        table(f"The last claims; credit in {node.unit.name}", CLAIM_COLUMNS, rows, empty="No claims yet."),
        script,
    )


def _entry(index: int | None, text: str) -> Any:
    return text if index is None else el("a", text, href=f"/entries/{index}")
