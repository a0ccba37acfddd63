"""Decision whether this node may work and upload now, from limits and readings, with every reason.

- No I/O: time, battery, power and uploaded bytes are arguments. An unknown reading (None) forbids nothing, except
  `idle_minutes` if neither input nor load is known: then the machine may be in use.
- A limit that ends by itself lets running groups finish. User input, battery power, heat and `pause` take effect at
  once: leases are returned, and other nodes continue them.
- The engine is unloaded when there is no work, except during pauses of the limits of power and heat.
- A graphics card has limits of its own, and may be paused alone. When no card may work, the node does not.
- Uploading has its own limit: a node whose upload allowance is used up still downloads, samples and earns.
"""

from collections.abc import Mapping
from datetime import datetime, time
from types import MappingProxyType
from typing import Literal, NamedTuple

from protocol import limits as bounds
from protocol.limits import GB
from protocol.text.money import unitless_price
from swarm_node.allowance.settings import CardLimits, Limits

Why = Literal["paused", "finishing", "hours", "idle", "battery", "power", "heat", "price", "upload"]

AT_ONCE: frozenset[Why] = frozenset({"paused", "idle", "battery", "heat"})
"""Reasons that do not wait for running groups."""

BREAKS: frozenset[Why] = frozenset({"power", "heat"})
"""Reasons that end within minutes, so that loading the engine again would cost more than keeping it."""


POWER_RESUME_SHARE = 0.9
"""The share of the limit to which the mean must fall before work resumes, to avoid rapid changes."""

COOLER_CELSIUS = 5.0
"""Degrees below the limit to which a card must cool before work resumes, to avoid rapid changes."""

OTHERS_LOAD_MAX = 0.25
"""Load per CPU: a machine on which other programs use more is not idle."""


class Readings(NamedTuple):
    """Readings of the machine and the agent."""

    now: datetime
    """Current time, in the time zone of the hours."""
    paused: bool = False
    paused_until: datetime | None = None
    """End of the pause, in the time zone of the hours; None: it ends with `resume`."""
    finishing: bool = False
    idle_s: float | None = None
    """Seconds since the last user input."""
    others_load: float | None = None
    """CPU load of other programs, per CPU."""
    on_battery: bool | None = None
    watts: float | None = None
    """Mean power of the card in the last minutes."""
    resting: bool = False
    """True during a pause of the power limit."""
    uploaded_bytes: int = 0
    """Bytes uploaded this month."""
    price_micros_per_mtok: int = 0


class CardReadings(NamedTuple):
    """Readings of one graphics card."""

    now: datetime
    """Current time, in the time zone of the hours."""
    paused: bool = False
    paused_until: datetime | None = None
    celsius: float | None = None
    watts: float | None = None
    """Mean power in the last minutes."""
    resting: frozenset[Why] = frozenset()
    """The reasons for which the card rests now."""


class LimitReason(NamedTuple):
    """A limit that applies now, with a text for the owner."""

    why: Why
    said: str


class Decision(NamedTuple):
    """Result: may the node work, and may it upload."""

    reasons: tuple[LimitReason, ...] = ()
    """Reasons against working; empty: it may work."""
    no_upload: str = ""
    """Reason why it may not upload; empty: it may."""

    @property
    def may_work(self) -> bool:
        return not self.reasons

    @property
    def at_once(self) -> bool:
        """True if running leases are returned at once."""
        return any(reason.why in AT_ONCE for reason in self.reasons)

    @property
    def keep_engine(self) -> bool:
        """True if the engine stays in memory."""
        return all(reason.why in BREAKS for reason in self.reasons)

    @property
    def reason_line(self) -> str:
        """All reasons in one line."""
        return "; ".join(reason.said for reason in self.reasons)


NO_CARDS: Mapping[int, Decision] = MappingProxyType({})


def decide(limits: Limits, seen: Readings, cards: Mapping[int, Decision] = NO_CARDS) -> Decision:
    """Apply the owner's limits to the readings; with `cards`, the node works if a card may."""
    power = _power(limits, seen.watts, resting=seen.resting)
    checks = (_hours(limits, seen.now, limits.zone), _idle(limits, seen), _battery(limits, seen), power)
    reasons = tuple(reason for reason in (*checks, _price(limits, seen)) if reason is not None)
    asked = _asked(seen)
    reasons = (with_others(asked, bool(reasons)), *reasons) if asked else reasons
    if cards and not any(card.may_work for card in cards.values()):
        reasons += tuple(
            LimitReason(reason.why, f"card {number}: {reason.said}")
            for number, card in cards.items()
            for reason in card.reasons
        )
    return Decision(reasons, _no_upload(limits, seen))


def decide_card(number: int, limits: Limits, seen: CardReadings) -> Decision:
    """Apply the owner's limits of one card to its readings."""
    own = limits.of_card(number)
    checks = (
        _hours(own, seen.now, limits.zone),
        _power(own, seen.watts, resting="power" in seen.resting),
        _heat(own, seen),
    )
    reasons = tuple(reason for reason in checks if reason is not None)
    paused = _paused(seen.paused, seen.paused_until, f" --card {number}")
    return Decision((with_others(paused, bool(reasons)), *reasons) if paused else reasons)


def within(hours: tuple[time, time], now: time) -> bool:
    """Return True if a time of day is in a span, which may pass midnight; the end is excluded."""
    start, end = hours
    if start <= end:
        return start <= now < end
    return now >= start or now < end


def _asked(seen: Readings) -> LimitReason | None:
    if paused := _paused(seen.paused, seen.paused_until):
        return paused
    if seen.finishing:
        return LimitReason("finishing", "finishing: the agent stops after the current groups")
    return None


def _paused(paused: bool, until: datetime | None, option: str = "") -> LimitReason | None:
    if not paused:
        return None
    when = f" until {until:%H:%M}" if until else ""
    return LimitReason("paused", f"paused by you{when}; `swarm-node resume{option}` continues")


def with_others(asked: LimitReason, has_others: bool) -> LimitReason:
    """Return the owner's order as the first of several reasons: `resume` alone would not continue the work."""
    if not has_others or asked.why != "paused":
        return asked
    said, _, command = asked.said.removesuffix(" continues").partition("; ")
    return LimitReason(asked.why, f"{said} ({command} ends the pause)")


def _hours(limits: CardLimits, now: datetime, zone: str) -> LimitReason | None:
    span = limits.span
    if span is None or within(span, now.timetz().replace(tzinfo=None)):
        return None
    return LimitReason(
        "hours", f"outside your hours {limits.hours} ({zone or 'local time'}); work begins {span[0]:%H:%M}"
    )


def _idle(limits: Limits, seen: Readings) -> LimitReason | None:
    if not limits.idle_minutes:
        return None
    if seen.idle_s is None and seen.others_load is None:
        return LimitReason("idle", "idle_minutes is set, but this system reports neither user input nor CPU load")
    if seen.idle_s is not None and seen.idle_s < 60 * limits.idle_minutes:
        left_s = 60 * limits.idle_minutes - seen.idle_s
        return LimitReason("idle", f"the machine is in use; work starts after {left_s / 60:.0f} min without user input")
    if seen.others_load is not None and seen.others_load > OTHERS_LOAD_MAX:
        return LimitReason("idle", f"other programs use {seen.others_load:.0%} of the CPU")
    return None


def _battery(limits: Limits, seen: Readings) -> LimitReason | None:
    if seen.on_battery and not limits.on_battery:
        return LimitReason("battery", "running on battery; work continues when the machine is plugged in")
    return None


def _power(limits: CardLimits, watts: float | None, *, resting: bool) -> LimitReason | None:
    if not limits.power_watts or watts is None:
        return None
    bound = limits.power_watts * (POWER_RESUME_SHARE if resting else 1.0)
    if watts <= bound:
        return None
    return LimitReason("power", f"power limit: mean {watts:.0f} W, your limit is {limits.power_watts:.0f} W")


def _heat(limits: CardLimits, seen: CardReadings) -> LimitReason | None:
    if not limits.celsius or seen.celsius is None:
        return None
    bound = limits.celsius - (COOLER_CELSIUS if "heat" in seen.resting else 0.0)
    if seen.celsius <= bound:
        return None
    cooler = limits.celsius - COOLER_CELSIUS
    said = f"{seen.celsius:.0f} °C, your limit is {limits.celsius:.0f} °C; work resumes at {cooler:.0f} °C"
    return LimitReason("heat", f"temperature limit: {said}")


def _price(limits: Limits, seen: Readings) -> LimitReason | None:
    if seen.price_micros_per_mtok >= limits.price_floor:
        return None
    price, floor = unitless_price(seen.price_micros_per_mtok), unitless_price(limits.price_floor)
    said = f"your price is {price} per million tokens, below your minimum of {floor} (both in the round's unit)"
    return LimitReason("price", f"{said}: join with --price {limits.price_floor}, or lower `limits --price-floor`")


def _no_upload(limits: Limits, seen: Readings) -> str:
    if not limits.upload_gb or seen.uploaded_bytes < limits.upload_gb * GB - bounds.CHUNK_MAX_BYTES:
        return ""
    used = f"{seen.uploaded_bytes / GB:.2f} of {limits.upload_gb:g} GB"
    return f"{used} uploaded this month (your limit); downloads and work continue"
