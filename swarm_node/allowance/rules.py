"""May this node work now, and may it upload? Limits and readings in, a decision with every reason out.

- Pure: time, battery, watts and what was uploaded are arguments. What a machine does not tell (None) forbids nothing,
  but for `idle_minutes` where neither input nor load is known: then nobody can promise that the machine is idle.
- A limit that ends by itself lets the groups that are being sampled end. The owner at the keyboard, a battery and
  `pause` do not wait: leases go back at once, and others go on with them.
- The engine leaves the memory when there is nothing to do, except for the breaks that a power cap asks for.
- Uploading has a limit of its own: a node whose volume is used up still fetches, samples and earns.
"""

from datetime import datetime, time
from typing import Literal, NamedTuple

from protocol import limits as bounds
from swarm_node.allowance.settings import Limits

Why = Literal["paused", "finishing", "hours", "idle", "battery", "power", "price", "upload"]

AT_ONCE: frozenset[Why] = frozenset({"paused", "idle", "battery"})
"""Reasons that do not wait for groups to end."""

BREAKS: frozenset[Why] = frozenset({"power"})
"""Reasons that pass within minutes, so that loading the engine again would cost more than keeping it."""

GB = 10**9
"""As line providers count."""

POWER_RESUME_SHARE = 0.9
"""After a break, work begins again when the mean has fallen to this share of the cap, so that breaks do not flutter."""

OTHERS_LOAD_MAX = 0.25
"""Of each processor: a machine on which others use more is not idle."""


class Readings(NamedTuple):
    """What was seen of the machine and of the agent."""

    now: datetime
    """With the zone that the hours are meant in."""
    paused: bool = False
    finishing: bool = False
    idle_s: float | None = None
    """Since somebody last touched the machine."""
    others_load: float | None = None
    """Processors that others keep busy, for each that there is."""
    on_battery: bool | None = None
    watts: float | None = None
    """What the device drew on the mean of the last minutes."""
    resting: bool = False
    """Whether the power cap has called a break that goes on."""
    uploaded_bytes: int = 0
    """This month."""
    price_micros_per_mtok: int = 0


class LimitReason(NamedTuple):
    """One limit that holds now, as the owner reads it."""

    why: Why
    said: str


class Decision(NamedTuple):
    """What follows."""

    reasons: tuple[LimitReason, ...] = ()
    """All that speak against working; none: it may."""
    may_upload: bool = True
    no_upload: str = ""
    """Why not."""

    @property
    def may_work(self) -> bool:
        return not self.reasons

    @property
    def at_once(self) -> bool:
        """Whether what is being sampled is given back."""
        return any(reason.why in AT_ONCE for reason in self.reasons)

    @property
    def keep_engine(self) -> bool:
        """Whether the engine stays in memory."""
        return all(reason.why in BREAKS for reason in self.reasons)

    @property
    def reason_line(self) -> str:
        """Why there is no work, in a line."""
        return "; ".join(reason.said for reason in self.reasons)


def decide(limits: Limits, seen: Readings) -> Decision:
    """What the owner's limits say of this moment."""
    checks = (_asked(seen), _hours(limits, seen), _idle(limits, seen), _battery(limits, seen), _power(limits, seen))
    reasons = tuple(reason for reason in (*checks, _price(limits, seen)) if reason is not None)
    no_upload = _no_upload(limits, seen)
    return Decision(reasons, not no_upload, no_upload)


def within(hours: tuple[time, time], now: time) -> bool:
    """Whether a time of day lies in a span that may go over midnight; its end belongs to it no more."""
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
    said = f"your price is {seen.price_micros_per_mtok}, below your minimum of {limits.price_floor} micro-units"
    return LimitReason("price", f"{said} per million tokens: join with a higher --price")


def _no_upload(limits: Limits, seen: Readings) -> str:
    if not limits.upload_gb or seen.uploaded_bytes < limits.upload_gb * GB - bounds.CHUNK_MAX_BYTES:
        return ""
    used = f"{seen.uploaded_bytes / GB:.2f} of {limits.upload_gb:g} GB"
    return f"{used} uploaded this month (your limit); downloads and work continue"
