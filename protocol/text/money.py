"""Amounts of money for people: micro-units in the round's unit, rates with their trend, and the round's unit itself.

- The operator chooses a unit's name and its decimals; the first root document has them, so the round id pins them.
- A name is untrusted text: up to 12 ASCII letters, hyphens and dots, or one currency sign. So it cannot carry markup,
  control characters, digits that would read as part of the amount, or letters that imitate a known currency.
- An amount that the decimals would show as zero has two significant digits instead: 0.0038 EUR is not 0.00 EUR.
- In a sentence, an amount ends after two decimals if the others are zero: 1,000.00 EUR, not 1,000.0000 EUR. Figures in
  columns keep all decimals.
- A name promises nothing: a round pays what its ledger records as paid.
"""

import re
import unicodedata
from datetime import UTC, datetime
from typing import Any, NamedTuple

from protocol.limits import DAY_S, HOUR_S

MICROS = 1_000_000
MICRO_DECIMALS = 6
"""Decimals of an exact amount: micro-units are millionths."""

NAME_MAX_CHARS = 12
DEFAULT_NAME = "credits"
DEFAULT_DECIMALS = 4

EARLY_S = 300
"""Time of earning below which a rate would be a guess."""

STEADY_SHARE = 0.05
"""Largest difference of the last hour from the day's mean that is not called a change."""

_WORD = re.compile(r"[A-Za-z](?:[A-Za-z.-]*[A-Za-z])?")


class Unit(NamedTuple):
    """The unit in which a round states amounts: a name, and the number of decimals shown."""

    name: str = DEFAULT_NAME
    decimals: int = DEFAULT_DECIMALS

    def figure(self, micros: float, *, separator: str = ",") -> str:
        """Return an amount for a column, without the unit's name, rounded to the decimals."""
        return _decimal(round(micros), self._decimals_for(micros), separator)

    def amount(self, micros: float, *, separator: str = ",") -> str:
        """Return an amount with the unit's name, rounded to the decimals, without zeros after the second."""
        return f"{self.short_figure(micros, separator=separator)} {self.name}"

    def short_figure(self, micros: float, *, separator: str = ",") -> str:
        """Return an amount in a sentence that names the unit later: as `amount` shows it."""
        figure = self.figure(micros, separator=separator)
        return figure if self._decimals_for(micros) > self.decimals else self._short(figure)

    def between(self, low_micros: float, high_micros: float) -> str:
        """Return a range of amounts with the unit's name; one amount if both are shown alike."""
        low, high = self.short_figure(low_micros), self.amount(high_micros)
        return high if high == f"{low} {self.name}" else f"{low} to {high}"

    def exact(self, micros: int, *, separator: str = ",") -> str:
        """Return an amount with the unit's name and every decimal that is not zero, for payments and limits."""
        return f"{self.exact_figure(micros, separator=separator)} {self.name}"

    def exact_figure(self, micros: int, *, separator: str = ",") -> str:
        """Return an exact amount without the unit's name."""
        return self._short(_decimal(micros, MICRO_DECIMALS, separator))

    def price(self, micros_per_mtok: int) -> str:
        """Return a price per million tokens."""
        return f"{self.exact(micros_per_mtok)} per million tokens"

    def to_json(self) -> dict[str, Any]:
        """Return the unit as the root document and the public figures have it."""
        return {"name": self.name, "decimals": self.decimals}

    def _short(self, figure: str) -> str:
        """Return a figure without zeros at its end; those of the first two decimals that the unit has stay."""
        whole, _, part = figure.partition(".")
        part = part.rstrip("0").ljust(min(self.decimals, 2), "0")
        return f"{whole}.{part}" if part else whole

    def _decimals_for(self, micros: float) -> int:
        """Return the decimals for an amount: more than the unit's own if it would be shown as zero."""
        shown, size = self.decimals, abs(round(micros))
        if size and 2 * size < 10 ** (MICRO_DECIMALS - shown):
            return min(MICRO_DECIMALS, MICRO_DECIMALS - len(str(size)) + 2)
        return shown


CREDITS = Unit()
"""The unit of a round whose operator chose none."""


class EarningPace(NamedTuple):
    """Net credit of a node or an owner in the last hour and the last day."""

    hour_micros: int = 0
    day_micros: int = 0
    earning_s: float | None = None
    """Time since the first credit of the last day, at most a day; None without any."""

    @property
    def per_hour(self) -> float | None:
        """Micro-units per hour: those of the last hour, or the mean since the first credit; None if too early."""
        if self.earning_s is None or self.earning_s < EARLY_S:
            return None
        return self.hour_micros if self.earning_s >= HOUR_S else self.day_micros * HOUR_S / self.earning_s

    @property
    def mean_per_hour(self) -> float | None:
        """Micro-units per hour as the mean of the last day, or since the first credit; None if too early."""
        if self.earning_s is None or self.earning_s < EARLY_S:
            return None
        return self.day_micros * HOUR_S / min(DAY_S, self.earning_s)

    @property
    def trend(self) -> float | None:
        """The last hour's difference from the mean, as a share of the mean; None without two hours to compare."""
        if self.earning_s is None or self.earning_s < 2 * HOUR_S or not self.mean_per_hour:
            return None
        return self.hour_micros / self.mean_per_hour - 1

    @classmethod
    def parse(cls, value: Any) -> "EarningPace | None":
        """Parse figures of an unsigned answer; None if they are not of this form."""
        try:
            hour, day, earning_s = value["hour_micros"], value["day_micros"], value["earning_s"]
        except (LookupError, TypeError):
            return None
        numbers = isinstance(hour, int) and isinstance(day, int) and isinstance(earning_s, int | float | None)
        if not numbers or max(abs(hour), abs(day)) > 2**62:
            return None
        return cls(hour, day, None if earning_s is None else min(float(DAY_S), max(0.0, float(earning_s))))

    def __add__(self, other: object) -> "EarningPace":
        """Return the pace of two nodes together."""
        if not isinstance(other, EarningPace):
            return NotImplemented
        spans = [span for span in (self.earning_s, other.earning_s) if span is not None]
        longest = max(spans, default=None)
        return EarningPace(self.hour_micros + other.hour_micros, self.day_micros + other.day_micros, longest)


def pace_text(unit: Unit, pace: EarningPace, *, separator: str = ",", finished: bool = False) -> str:
    """Return the earnings per hour and per day with their trend, or why there is no rate.

    Nothing can be earned in a `finished` round, and minutes of earning are no basis for a day.
    """
    hourly, mean = pace.per_hour, pace.mean_per_hour
    if finished:
        return "none: the round is finished"
    if pace.earning_s is None:
        return "no credit counted in the last day; new credit is counted within two minutes"
    if hourly is None or mean is None:
        return "too early for a rate: the first credit is less than 5 min old"
    per_hour = f"{unit.amount(hourly, separator=separator)} per hour"
    if pace.earning_s < HOUR_S:
        return f"about {per_hour} (from {pace.earning_s / 60:.0f} min)"
    if pace.earning_s < DAY_S:
        daily = f"about {unit.amount(mean * 24, separator=separator)} per day (from {pace.earning_s / HOUR_S:.0f} h)"
    else:
        daily = f"{unit.amount(pace.day_micros, separator=separator)} in the last day"
    return f"{per_hour}, {daily}{trend_text(unit, pace, separator=separator)}"


def trend_text(unit: Unit, pace: EarningPace, *, separator: str = ",") -> str:
    """Return the trend as the end of a sentence; empty if there is none yet."""
    trend, mean = pace.trend, pace.mean_per_hour
    if trend is None or mean is None:
        return ""
    usual = f"the mean of {unit.short_figure(mean, separator=separator)} per hour"
    if abs(trend) <= STEADY_SHARE:
        return f"; the last hour is near {usual}"
    where = "above" if trend > 0 else "below"
    share = f"{abs(trend):.0%}" if abs(trend) < 10 else "far"
    return f"; the last hour is {share} {where} {usual}"


def next_payout(unit: Unit, next_ms: int | None, minimum_micros: int, now_ms: int, separator: str = ",") -> str:
    """Return when the next payout is due, and the balance that it needs."""
    least = f"(minimum balance {unit.exact(minimum_micros, separator=separator)})"
    if next_ms is None:
        return f"not scheduled {least}"
    try:
        day = f"{datetime.fromtimestamp(next_ms / 1000, UTC):%Y-%m-%d}"
    except (ValueError, OverflowError, OSError):
        return f"not scheduled {least}"
    return f"due on {day} {least}" if next_ms > now_ms else f"overdue since {day} {least}"


def unitless_price(micros_per_mtok: int) -> str:
    """Return a price per million tokens where the round's unit is not known; the text beside it says so."""
    return CREDITS.exact_figure(micros_per_mtok)


def checked_name(name: str) -> str:
    """Return a unit's name if it has a valid form, else raise `ValueError`."""
    # Signs of scripts that run from right to left would move the digits beside them.
    is_sign = len(name) == 1 and unicodedata.category(name) == "Sc" and unicodedata.bidirectional(name) == "ET"
    if not is_sign and (len(name) > NAME_MAX_CHARS or not _WORD.fullmatch(name)):
        raise ValueError(
            f"a unit is a currency sign, or at most {NAME_MAX_CHARS} letters a to z with hyphens or dots between"
        )
    return name


def parse_unit(value: Any) -> Unit:
    """Return the unit in an untrusted document, or `CREDITS` if there is none of a valid form."""
    try:
        name, decimals = value["name"], value["decimals"]
        valid = isinstance(name, str) and isinstance(decimals, int) and 0 <= decimals <= MICRO_DECIMALS
        return Unit(checked_name(name), int(decimals)) if valid else CREDITS
    except (LookupError, TypeError, ValueError):
        return CREDITS


def _decimal(micros: int, decimals: int, separator: str) -> str:
    """Return micro-units as a decimal number, rounded half away from zero; exact for every size."""
    step = 10 ** (MICRO_DECIMALS - decimals)
    size = (abs(micros) + step // 2) // step
    whole, part = divmod(size, 10**decimals)
    sign = "-" if micros < 0 and size else ""
    text = f"{sign}{whole:,}".replace(",", separator)
    return f"{text}.{part:0{decimals}d}" if decimals else text
