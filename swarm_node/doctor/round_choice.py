"""The choice of a round for this machine: which rounds it can work for, in which order, and why.

- Pure: listings are checked before, and live figures are fetched before; what they say is the rounds' own claim.
- `earnings`: the highest expected credit per hour (`swarm_node.doctor.forecast`), among rounds of one unit: amounts of
  different units are not compared. Rounds without an estimate come last, the one that waits the most for samples first.
- `cause`: the rounds whose texts have the wanted words; the one whose training waits the most for samples first, then
  the one with the fewest nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ledger.directory import KnownRound
from protocol.errors import ConfigInvalid
from protocol.limits import DAY_MS
from protocol.text.money import Unit
from protocol.text.plain import counted
from swarm_node.doctor.forecast import Forecast, hourly_text
from swarm_node.engine.capacity import Capacity

LATELY_DAYS = 30


Aim = Literal["earnings", "cause"]
"""An owner's aim in the choice of a round."""

NOT_ASKED = Forecast(unknown="its coordinator was not asked")


@dataclass(frozen=True)
class RoundOption:
    """A round that this machine may join."""

    known: KnownRound
    forecast: Forecast = NOT_ASKED

    @property
    def expected(self) -> float:
        """Return the middle of the expected earnings per hour in micro-units; below 0 if unknown."""
        return -1.0 if self.forecast.unknown else (self.forecast.low + self.forecast.high) / 2

    @property
    def waits(self) -> tuple[int, int]:
        """Return how much the round needs another node: its waiting time, then how few nodes it has."""
        listing = self.known.listing.listing
        return listing.waiting_permille, -listing.nodes


def why_unfit(known: KnownRound, capacity: Capacity, price: int, now_ms: int) -> str:
    """Return why this machine cannot work for a round; empty if nothing speaks against it."""
    listing, unit = known.listing.listing, known.listing.unit
    if listing.finished:
        return "it is finished"
    if listing.expires_ms <= now_ms:
        return "its listing has expired"
    if price > listing.prices.maximum:
        return f"it pays at most {unit.price(listing.prices.maximum)}"
    if not listing.budget_micros and price:
        return "its budget is used up"
    return capacity.why_too_large(listing.model.weights_bytes)


def has_words(known: KnownRound, words: str) -> bool:
    """Return True if all words occur in what a round says of its purpose."""
    listing = known.listing.listing
    about = listing.description
    text = " ".join((about.title, about.purpose, about.description, listing.task)).casefold()
    return all(word in text for word in words.casefold().split())


def matching(rounds: Sequence[KnownRound], words: str = "", unit: str = "") -> list[KnownRound]:
    """Return the rounds whose texts have all words and that pay in a unit; empty: any."""
    return [known for known in rounds if has_words(known, words) and unit in ("", known.listing.unit.name)]


def ranked(options: Sequence[RoundOption], aim: Aim) -> list[RoundOption]:
    """Return the rounds in the order in which they serve an aim, the best first."""
    if aim == "cause":
        return sorted(options, key=lambda option: option.waits, reverse=True)
    units = sorted({option.known.listing.unit.name for option in options})
    if len(units) > 1:
        raise ConfigInvalid(
            f"The rounds pay in different units: {', '.join(units)}. Their amounts cannot be compared.",
            hint="Choose the unit with --unit.",
        )
    return sorted(options, key=lambda option: (option.expected, option.waits), reverse=True)


def reasons(option: RoundOption, aim: Aim, now_ms: int) -> Iterator[str]:
    """Yield why a round is proposed, a line each."""
    said, unit = option.known.listing, option.known.listing.unit
    listing, estimate = said.listing, option.forecast
    if aim == "cause" and listing.description.purpose:
        yield f"Purpose: {listing.description.purpose}"
    nodes = counted(listing.nodes, "node works", "nodes work")
    yield f"Demand: its training waits for samples {listing.waiting_permille / 10:.0f}% of the time; {nodes} for it"
    yield earnings_line(estimate, unit)
    yield f"Payouts: {paid_line(option.known, now_ms)}"


def paid_line(known: KnownRound, now_ms: int) -> str:
    """Return what a round has paid, lately and in total."""
    said, unit = known.listing, known.listing.unit
    lately = unit.exact(said.paid_since(now_ms - LATELY_DAYS * DAY_MS))
    total, owed = unit.exact(said.listing.totals.paid_micros), unit.exact(said.listing.totals.owed_micros)
    return f"{lately} in the last {LATELY_DAYS} days, {total} in total; it owes {owed}"


def earnings_line(estimate: Forecast, unit: Unit) -> str:
    """Return the expected earnings as a line of text."""
    if estimate.unknown:
        return f"Earnings: unknown: {estimate.unknown}"
    return f"Earnings: {hourly_text(estimate, unit)}, {estimate.basis}"
