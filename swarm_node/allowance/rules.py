"""Decision whether this node may work and upload now, from limits and readings, with every reason.

- No I/O: time, battery, power and uploaded bytes are arguments. An unknown reading (None) forbids nothing, except
  `idle_minutes` if neither input nor load is known: then the machine may be in use.
- A limit that ends by itself lets running groups finish. User input, battery power and `pause` take effect at once:
  leases are returned, and other nodes continue them.
- The engine is unloaded when there is no work, except during pauses of the power limit.
- Uploading has its own limit: a node whose upload allowance is used up still downloads, samples and earns.
"""

from datetime import datetime, time
from typing import Literal, NamedTuple

from protocol import limits as bounds
from swarm_node.allowance.settings import Limits

Why = Literal["paused", "finishing", "hours", "idle", "battery", "power", "price", "upload"]

AT_ONCE: frozenset[Why] = frozenset({"paused", "idle", "battery"})
"""Reasons that do not wait for running groups."""

BREAKS: frozenset[Why] = frozenset({"power"})
"""Reasons that end within minutes, so that loading the engine again would cost more than keeping it."""

GB = 10**9
"""Decimal gigabyte, as network providers count."""

POWER_RESUME_SHARE = 0.9
"""The share of the limit to which the mean must fall before work resumes, to avoid rapid changes."""

OTHERS_LOAD_MAX = 0.25
"""Load per CPU: a machine on which other programs use more is not idle."""


class Readings(NamedTuple):
    """Readings of the machine and the agent."""

    now: datetime
    """Current time, in the time zone of the hours."""
    paused: bool = False
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


class LimitReason(NamedTuple):
    """A limit that applies now, with a text for the owner."""

    why: Why
    said: str


class Decision(NamedTuple):
    """Result: may the node work, and may it upload."""

    reasons: tuple[LimitReason, ...] = ()
    """Reasons against working; empty: it may work."""
    may_upload: bool = True
    no_upload: str = ""
    """Reason why it may not upload."""

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


def decide(limits: Limits, seen: Readings) -> Decision:
    """Apply the owner's limits to the readings."""
    checks = (_asked(seen), _hours(limits, seen), _idle(limits, seen), _battery(limits, seen), _power(limits, seen))
    reasons = tuple(reason for reason in (*checks, _price(limits, seen)) if reason is not None)
    no_upload = _no_upload(limits, seen)
    return Decision(reasons, not no_upload, no_upload)


def within(hours: tuple[time, time], now: time) -> bool:
    """Return True if a time of day is in a span, which may pass midnight; the end is excluded."""
    start, end = hours
    if start <= end:
        return start <= now < end
    return now >= start or now < end


def _asked(seen: Readings) -> LimitReason | None:
    if seen.paused:
        return LimitReason("paused", "paused by you; `swarm-node resume` continues")
    if seen.finishing:
        return LimitReason("finishing", "finishing: the agent stops after the current groups")
    return None


def _hours(limits: Limits, seen: Readings) -> LimitReason | None:
    span = limits.span
    if span is None or within(span, seen.now.timetz().replace(tzinfo=None)):
        return None
    return LimitReason(
        "hours", f"outside your hours {limits.hours} ({limits.zone or 'local time'}); work begins {span[0]:%H:%M}"
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


def _power(limits: Limits, seen: Readings) -> LimitReason | None:
    if not limits.power_watts or seen.watts is None:
        return None
    bound = limits.power_watts * (POWER_RESUME_SHARE if seen.resting else 1.0)
    if seen.watts <= bound:
        return None
    return LimitReason("power", f"power limit: mean {seen.watts:.0f} W, your limit is {limits.power_watts:.0f} W")


def _price(limits: Limits, seen: Readings) -> LimitReason | None:
    if seen.price_micros_per_mtok >= limits.price_floor:
        return None
    said = f"your price is {seen.price_micros_per_mtok}, below your minimum of {limits.price_floor}"
    return LimitReason("price", f"{said} millionths of the unit per million tokens: join with a higher --price")


def _no_upload(limits: Limits, seen: Readings) -> str:
    if not limits.upload_gb or seen.uploaded_bytes < limits.upload_gb * GB - bounds.CHUNK_MAX_BYTES:
        return ""
    used = f"{seen.uploaded_bytes / GB:.2f} of {limits.upload_gb:g} GB"
    return f"{used} uploaded this month (your limit); downloads and work continue"
