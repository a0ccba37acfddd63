"""The page of the ledger's log: its entries by index, with a link to the public file that has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.pages import words
from coordinator.pages.layout import Column, Screen, Site, document, table
from ledger import tiles
from ledger.entry import (
    AppealEntry,
    Commitment,
    Deposit,
    FormedBatch,
    OwnerAct,
    Paid,
    Payout,
    PayoutBatch,
    Pending,
    Reinstate,
    RetractionEntry,
    Reveal,
    Root,
    RulingEntry,
    UpdateEntry,
    VerdictEntry,
    Version,
    Void,
)
from ledger.store import Recorded
from ledger.tiles import TILE_HASHES, Tile
from protocol.text.html import Markup, el
from protocol.text.money import Unit

SHOWN = 50

COLUMNS = (
    Column("index"),
    Column("kind", is_text=True),
    Column("content", is_text=True),
    Column("recorded", is_text=True, screen=Screen.TABLET),
    Column("content hash", is_text=True, screen=Screen.TABLET),
)


@dataclass(frozen=True)
class EntriesPage:
    """The entries from index `start` on, in a log of `size` entries."""

    start: int
    records: Sequence[Recorded]
    size: int
    names: Mapping[str, str]
    """The names of the nodes in the entries, by their ids."""
    newest_first: bool = False


def node_ids(records: Sequence[Recorded]) -> set[str]:
    """Return the ids of the nodes that entries name."""
    return {recorded.entry.node_id for recorded in records if isinstance(recorded.entry, Pending | Payout | Paid)}


def newest_start(size: int) -> int:
    """Return the first index of the newest page, which has up to `2 * SHOWN` entries.

    It is a multiple of `SHOWN`: so the page before it ends where this one starts.
    """
    return max(0, (size - 1) // SHOWN - 1) * SHOWN


def render(page: EntriesPage, site: Site, unit: Unit) -> str:
    """Return the page as HTML."""
    start, size, records = page.start, page.size, page.records
    rows = [
        [el("a", recorded.index, href=f"/entries/{recorded.index}"), recorded.entry.kind,
         _says(recorded, unit, page.names),
         words.moment(recorded.recorded_ms),
         el("code", f"{recorded.content_hash[:12]}…", title=recorded.content_hash, class_="short")]
        for recorded in (reversed(records) if page.newest_first else records)
    ]  # fmt: skip
    about = el(
        "p",
        f"{words.counted(size, 'entry', 'entries')}. A signed checkpoint covers each within seconds. ",
        el("a", "Check all of them in your browser", href="/verify.html"),
        ", or with ",
        el("code", f'swarm-node ledger verify "{site.join_string}"'),
        ". ",
        el("a", "The file with these entries", href=f"/v1/ledger/tile/{_bundle(start, size).name}")
        if records
        else None,
    )
    after = start + max(SHOWN, len(records))
    earlier = "← entries before these, oldest first" if page.newest_first else "← earlier"
    pager = el(
        "nav",
        el("a", earlier, href=f"/entries/{max(0, start - SHOWN)}", rel="prev") if start else None,
        el("a", "later →", href=f"/entries/{after}", rel="next") if after < size else None,
        el("a", "newest", href="/entries"),
        class_="pager",
        aria_label="Pages of the log",
    )
    listed = table(_caption(page), COLUMNS, rows, empty="The log ends before this index.")
    return document("Ledger", "/entries", site, about, listed, pager)


def _caption(page: EntriesPage) -> str:
    if not page.records:
        return "No entries"
    first, last = page.records[0].index, page.records[-1].index
    if first == last:
        return f"Entry {first}"
    return (
        f"Entries {last} to {first}, newest first" if page.newest_first else f"Entries {first} to {last}, oldest first"
    )


def _bundle(index: int, size: int) -> Tile:
    return tiles.tile_of(Tile.BUNDLE, index // TILE_HASHES, size)


def _node(node_id: str, names: Mapping[str, str]) -> Markup:
    shown = el("bdi", words.readable(names.get(node_id, ""), node_id))
    return el("a", shown, href=f"/nodes/{node_id}", title=node_id)


def _says(recorded: Recorded, unit: Unit, names: Mapping[str, str]) -> Any:
    entry = recorded.entry
    if isinstance(entry, Pending):
        return (
            _node(entry.node_id, names),
            f" is credited {words.exact(unit, entry.amount_micros)} for {words.whole(entry.tokens)} tokens",
            _claim(entry),
        )
    if isinstance(entry, Deposit):
        name = "Initial deposit" if entry.reference == "opening" else f"Deposit {entry.reference}"
        name = f"Gift {entry.reference.split('/')[1]}" if entry.is_gift else name
        return f"{name}: {words.exact(unit, entry.amount_micros)}"
    if isinstance(entry, Version | Root):
        digest = entry.manifest_digest if isinstance(entry, Version) else entry.root_digest
        return f"{entry.kind} {entry.version} is ", el("code", f"{digest[:16]}…", title=digest)
    if isinstance(entry, Commitment | Reveal):
        return f"audit secret of epoch {entry.epoch}: {_SECRET_STATE[type(entry)]}"
    if isinstance(entry, VerdictEntry):
        return f"audited: {entry.outcome}", _claim(entry)
    if isinstance(entry, AppealEntry | RulingEntry | Reinstate):
        return _of_appeal(entry), _claim(entry)
    if isinstance(entry, OwnerAct | PayoutBatch | Payout | Paid):
        return _of_money(entry, unit, names)
    if isinstance(entry, FormedBatch | UpdateEntry | RetractionEntry):
        return _of_training(entry)
    return f"rejected: {entry.reason_code}" if isinstance(entry, Void) else "validated", _claim(entry)


_SECRET_STATE = {Commitment: "committed", Reveal: "revealed"}


def _of_appeal(entry: AppealEntry | RulingEntry | Reinstate) -> str:
    match entry:
        case AppealEntry():
            return "appeal against a fault or ban"
        case RulingEntry():
            return f"appeal {entry.outcome}: {entry.reason_code}"
        case Reinstate():
            return f"credited after a granted appeal about claim {entry.appealed_claim_id[:12]}…"


def _of_money(entry: OwnerAct | PayoutBatch | Payout | Paid, unit: Unit, names: Mapping[str, str]) -> Any:
    if isinstance(entry, OwnerAct):
        return f"owner {words.owner(entry.owner)}: {entry.act}"
    if isinstance(entry, PayoutBatch):
        return (
            f"payout {entry.batch}: {words.exact(unit, entry.amount_micros)} for {words.counted(entry.payees, 'payee')}"
        )
    node = _node(entry.node_id, names)
    if isinstance(entry, Payout):
        return f"payout {entry.batch}: {words.exact(unit, entry.amount_micros)} to ", node
    return f"payout {entry.batch}: reference {entry.reference}, paid to ", node


def _of_training(entry: FormedBatch | UpdateEntry | RetractionEntry) -> Any:
    if isinstance(entry, RetractionEntry):
        owners = ", ".join(words.owner(owner) for owner in entry.owners)
        made = (
            f"updates {entry.first} to {entry.last} made again"
            if entry.last > entry.first
            else f"update {entry.last} made again"
        )
        left_out = f"without {words.counted(entry.left_out, 'group')} of {owners}"
        return f"{made} {left_out}: version {entry.version} has the state ", el(
            "code", f"{entry.after[:16]}…", title=entry.after
        )
    if isinstance(entry, FormedBatch):
        root = el("code", f"{entry.groups_root[:16]}…", title=entry.groups_root)
        return f"batch {entry.number} was formed of {words.counted(entry.groups, 'group')}: ", root
    made = f"update {entry.update}"
    made += f", attempt {entry.attempt}" if entry.attempt > 1 else ""
    made += f", from version {entry.replaced_by} that the operator put in its place" if entry.replaced_by else ""
    return f"{made}: the learner's state is ", el("code", f"{entry.after[:16]}…", title=entry.after)


def _claim(entry: Any) -> Markup:
    claim = entry.claim_id
    receipt = el(
        "a", el("code", f"{claim[:12]}…"), href=f"/v1/receipts/{claim}", download=f"{claim}.receipt", title=claim
    )
    return el("span", ", claim ", receipt)
