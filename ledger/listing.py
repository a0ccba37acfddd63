"""A listing: what a round says of itself to strangers, signed by its ledger's key, with payouts that its log proves.

    {"signed": {Listing}, "signature": "…", "roots": ["<1.root.json>", …]}

1. The form and every bound of the fields; texts are one visible line each.
2. The roots are a chain from the one that the round id names; so a listing cannot be copied to another round.
3. The ledger key that the last root names has signed the listing, under the domain `listing`.
4. A ledger key of the chain has signed the checkpoint.
5. Sizes, times and amounts of the payments never fall, nor exceed the checkpoint's size, `made_ms` and the total paid.

- These checks need no network. That the totals are those of the log is shown by reading its first entries, as many as
  the checkpoint has (`LogTotals`): a listing that says something else is a lie, and its signature shows whose.
- The log proves amounts and their order, not times. A directory's sightings bound the times (`ledger.directory`).
- The unit is that of the root. Money is in micro-units.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ledger.accounts import OUTSIDE, AccountKind
from ledger.book import BookState
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.entry import DEPOSITS_MAX_MICROS, Deposit, Entry
from ledger.gaps import Gap, Keys
from ledger.note import NOTE_MAX_BYTES
from ledger.tree import TREE_SIZE_MAX
from ledger.witness import WITNESSES_MAX
from protocol import ids, limits
from protocol.errors import MalformedMessage, MetadataExpired, ProofInvalid, RolledBack, UntrustedMetadata
from protocol.policy import root_document
from protocol.policy.description import Fact, RoundDescription
from protocol.text.money import Unit
from protocol.wire.message import Message
from protocol.wire.signing import check_signed

KIND: Final = "echo-swarm/listing"

LIFETIME_MS = 7 * 24 * 3_600_000
"""The time for which a listing is valid: prices and payouts of last month say little about today."""

PAYMENTS_MAX = 64
"""Payout batches in a listing, the newest: one a day for two months."""

CLOCKS_DIFFER_MS = 3_600_000
"""Difference between the clocks of a round and of a reader that proves nothing."""

Micros = Annotated[int, Field(ge=0, le=DEPOSITS_MAX_MICROS)]
Price = Annotated[int, Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)]
Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[int, Field(ge=0, le=TREE_SIZE_MAX)]
Count = Annotated[int, Field(ge=0, le=limits.VERSION_MAX)]
NoteText = Annotated[str, Field(max_length=NOTE_MAX_BYTES)]
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_ADDRESS = rf"^https?://({_LABEL}(\.{_LABEL})*\.?|\[([0-9A-Fa-f:.]+)\])(:([0-9]{{1,5}}))?(/[A-Za-z0-9._~:/-]*)?$"


def _require_address(url: str) -> str:
    """Return `url`; raise `ValueError` if it has an impossible host or port, or brackets without an IPv6 address."""
    found = re.match(_ADDRESS, url)
    if found is None or not 0 < int(found[5] or 80) < 2**16 or re.search(r"(^|\.)-|-(\.|$)", found[1]):
        raise ValueError("must be the address of a server")
    if found[3]:
        IPv6Address(found[3])
    return url


Url = Annotated[
    str,
    StringConstraints(max_length=limits.ROUND_FACT_MAX_CHARS, pattern=_ADDRESS),
    AfterValidator(_require_address),
]
"""A URL that every client can connect to: one that makes a reader fail would hide all other rounds from it."""


class ListedModel(Message):
    """The model of a round: where it comes from, its architecture, and the size of its weights."""

    name: Fact
    architecture: Fact
    weights_bytes: int = Field(ge=0, le=2**50)
    """0 while no version is published."""


class ListedPrices(Message):
    """Prices in micro-units per million tokens: of the nodes that work now, and the highest that the round pays."""

    lowest: Price
    highest: Price
    """0 and 0 if no node works now."""
    maximum: Price


class ListedTotals(Message):
    """Totals of the log's entries under the checkpoint."""

    deposited_micros: Micros
    gifts_micros: Micros
    """The part of the deposits that others gave."""
    owed_micros: Micros
    """Credit that is final and not paid yet."""
    paid_micros: Micros


class ListedPayment(Message):
    """The end of a payout batch: after the first `size` entries, so much was paid in total; the time is the round's."""

    size: Size
    ms: Milliseconds
    paid_micros: Micros


class Listing(Message):
    """The statements of a round about itself."""

    kind: Literal["echo-swarm/listing"] = KIND
    url: Url
    """The part of the join string before the #."""
    description: RoundDescription
    task: Fact
    model: ListedModel
    prices: ListedPrices
    budget_micros: Micros
    """The rest of the budget."""
    update: Count
    """The learner's last update."""
    max_updates: Count
    nodes: Count
    """Nodes that work now."""
    waiting_permille: int = Field(ge=0, le=1000)
    """The share of its time for which training waited for samples lately."""
    finished: bool
    made_ms: Milliseconds
    expires_ms: Milliseconds
    checkpoint: NoteText
    cosigned: Annotated[tuple[NoteText, ...], Field(max_length=WITNESSES_MAX)]
    """The last checkpoint that each witness of the round has signed."""
    totals: ListedTotals
    payments: Annotated[tuple[ListedPayment, ...], Field(max_length=PAYMENTS_MAX)]
    """The newest, in their order."""


@dataclass(frozen=True)
class OpenListing:
    """A listing whose signatures are checked."""

    listing: Listing
    checkpoint: Checkpoint
    unit: Unit
    document: Mapping[str, Any]
    """The document, as it was read."""
    gaps: tuple[Gap, ...] = ()
    """Gaps after which the log was resumed, as the root keys have signed."""
    ledger_key: bytes = b""
    """The key that has signed it."""
    root_version: int = 1
    """The number of the last root of its chain."""

    def require_made_by(self, now_ms: int) -> None:
        """Raise `MetadataExpired` if the listing was made in the future: it would never expire."""
        if self.listing.made_ms > now_ms + CLOCKS_DIFFER_MS:
            raise MetadataExpired(
                f"The listing of {self.name} was made in the future.", hint="Check this machine's clock."
            )

    def require_valid_at(self, now_ms: int) -> None:
        """Raise `MetadataExpired` if the listing was made in the future or has expired."""
        self.require_made_by(now_ms)
        if self.listing.expires_ms <= now_ms:
            raise MetadataExpired(f"The listing of {self.name} has expired.", hint="Check this machine's clock.")

    def require_no_older_than(self, seen: "OpenListing") -> None:
        """Raise `RolledBack` if the listing is of a time before the round replaced the keys that were seen."""
        if self.root_version < seen.root_version:
            raise RolledBack(
                f"The listing of {self.name} is signed under root {self.root_version}, and root {seen.root_version} "
                "was seen before: it is an old one.",
                hint="Try again later; if it does not change, report it to the operator and other participants.",
            )

    def still_has(self, size: int) -> bool:
        """Return True if no gap lost an entry of a log of this size that was seen before."""
        return all(size <= gap.size for gap in self.gaps)

    @property
    def round_id(self) -> str:
        return self.listing.description.round_id

    @property
    def title(self) -> str:
        """Return the round's title; its address if it has none."""
        return self.listing.description.title or self.listing.url.partition("://")[2]

    @property
    def name(self) -> str:
        """Return the title with the beginning of the round id, which no other round has."""
        return f"{self.title} ({self.round_id[:8]})"

    @property
    def join_string(self) -> str:
        return f"{self.listing.url}#{self.round_id}"

    def paid_since(self, since_ms: int) -> int:
        """Return what was paid since a time by the round's clock; at least that, if older payments are left out."""
        before = [payment.paid_micros for payment in self.listing.payments if payment.ms < since_ms]
        if before or len(self.listing.payments) < PAYMENTS_MAX:
            return self.listing.totals.paid_micros - (before[-1] if before else 0)
        return self.listing.totals.paid_micros - self.listing.payments[0].paid_micros


def open_listing(document: Mapping[str, Any]) -> OpenListing:
    """Check the signatures of a listing (1 to 5)."""
    signed = document.get("signed")
    listing = Listing.from_value(signed if isinstance(signed, dict) else {})  # (1)
    roots = _roots(document.get("roots"))
    keys = Keys(roots, listing.description.round_id)  # (2)
    key = root_document.ledger_key(roots[-1])
    check_signed("listing", document, ids.node_id(key))  # (3)
    checkpoint = open_checkpoint(listing.checkpoint.encode(), keys.newest_first)  # (4)
    _require_consistent(listing, checkpoint)
    gaps = tuple(keys.gaps)
    return OpenListing(listing, checkpoint, root_document.unit_of(roots[0]), document, gaps, key, len(roots))


def _roots(value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= limits.ROOT_ROTATIONS_MAX:
        raise MalformedMessage("The listing has no roots.")
    if not all(isinstance(root, str) and len(root) <= limits.METADATA_MAX_BYTES for root in value):
        raise MalformedMessage("The roots of the listing are not texts.")
    return tuple(root.encode(errors="surrogatepass") for root in value)


def _require_consistent(listing: Listing, checkpoint: Checkpoint) -> None:
    """Step 5: require that the listing does not contradict itself."""
    totals, payments = listing.totals, listing.payments
    steps = [(payment.size, payment.ms, payment.paid_micros) for payment in payments]
    steps.append((checkpoint.size, listing.made_ms, totals.paid_micros))
    rises = all(all(map(int.__le__, before, after)) for before, after in pairwise(steps))
    if not rises or not listing.made_ms < listing.expires_ms <= listing.made_ms + LIFETIME_MS:
        raise ProofInvalid(
            f"The listing of {listing.description.round_id[:8]} contradicts itself: payments or times are not in order."
        )


class LogTotals:
    """Totals of a log, entry by entry, to compare with what a listing says of it.

    Differences are reported only when all entries have given the signed root: entries that somebody has changed on the
    way say nothing about the round.
    """

    def __init__(self, said: OpenListing) -> None:
        self._said = said
        self._gifts_micros = 0
        self._lies: list[ProofInvalid] = []

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the log at which `reach` must be called, in order."""
        return sorted({payment.size for payment in self._said.listing.payments} | {self._said.checkpoint.size})

    def add(self, entry: Entry) -> None:
        """Count the next entry."""
        if isinstance(entry, Deposit) and entry.is_gift:
            self._gifts_micros += entry.amount_micros

    def reach(self, size: int, book: BookState) -> None:
        """Compare the book after the first `size` entries with what the listing says of them."""
        held = dict.fromkeys(AccountKind, 0)
        for account, micros in book.balances.items():
            held[account.kind] += micros
        paid, listing = held[AccountKind.PAID], self._said.listing
        for payment in listing.payments:
            if payment.size == size and payment.paid_micros != paid:
                self._lies.append(self._lie("paid", payment.paid_micros, paid, size))
        if size != self._said.checkpoint.size:
            return
        proved = {
            "paid": paid,
            "owed": held[AccountKind.PAYABLE] + held[AccountKind.PAYING],
            "deposited": -book.balance(OUTSIDE),
            "gifts": self._gifts_micros,
        }
        for what, micros in proved.items():
            if (said := getattr(listing.totals, f"{what}_micros")) != micros:
                self._lies.append(self._lie(what, said, micros, size))

    def finish(self, root: bytes) -> None:
        """Raise `ProofInvalid` if the listing lies, once the entries have given the root that is signed for them."""
        if root != self._said.checkpoint.root:
            raise UntrustedMetadata(
                f"The entries that are served for {self._said.name} are not those that its ledger's key has signed.",
                hint="Try again; if it does not change, report it to the operator and other participants.",
            )
        if self._lies:
            raise self._lies[0]

    def _lie(self, what: str, said: int, proved: int, size: int) -> ProofInvalid:
        unit = self._said.unit
        verb = {"owed": "owes ", "paid": "has paid ", "deposited": "has a deposit of ", "gifts": "was given "}[what]
        return ProofInvalid(
            f"{self._said.name} says that it {verb}{unit.exact(said)}; the first {size} entries of its own log say "
            f"{unit.exact(proved)}."
        )


def contradiction(earlier: OpenListing, later: OpenListing) -> ProofInvalid | None:
    """Return what two listings of one round cannot both say; None if they may both be true.

    Only listings of the same ledger key accuse a round: a replaced key may be stolen. Entries that a later gap has lost
    say nothing: the log goes on without them, as the root keys have signed.
    """
    if earlier.ledger_key != later.ledger_key:
        return None
    size = earlier.checkpoint.size
    if later.still_has(size) and size == later.checkpoint.size and earlier.checkpoint.root != later.checkpoint.root:
        return ProofInvalid(f"{later.name} shows two logs of {later.checkpoint.size} entries: its ledger has a fork.")
    paid = {each.size: each.paid_micros for each in earlier.listing.payments if later.still_has(each.size)}
    for payment in later.listing.payments:
        if paid.get(payment.size, payment.paid_micros) != payment.paid_micros:
            return ProofInvalid(f"{later.name} says two things about what its first {payment.size} entries pay.")
    return None
