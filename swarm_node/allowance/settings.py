"""The owner's limits: `limits.toml` in the home, and options of `join` on top of it for one run.

- Every key has a default that limits nothing, except `on_battery`: a battery is used only with permission.
- An unknown key or an invalid value is refused with the key's name; nothing is guessed.
- A table such as `[cards.1]` has limits of one graphics card, on top of those of the node.
- A running agent reads the file again when it has changed; an invalid file changes nothing and is logged.
"""

import os
import re
import tomllib
from datetime import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol import limits as bounds
from protocol.errors import ConfigInvalid
from protocol.text.plain import number_text
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.engine.turn_cache import TURNS_MIB

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FILE = "limits.toml"
"""File in a node's home."""

TURNS_MIB_MAX = 2**20
"""A TiB: more than any machine has for them."""

_SPAN = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")


class CardLimits(BaseModel):
    """The owner's limits of one graphics card; they hold in addition to those of the node."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hours: str = Field("", description="working hours, such as 22:00-07:00; empty: always")
    celsius: float = Field(0.0, ge=0, le=150, description="maximum temperature of a graphics card in °C; 0: no limit")
    power_watts: float = Field(
        0.0, ge=0, le=100_000, description="maximum mean power of the GPU in watts, kept by pauses; 0: no limit"
    )

    @property
    def span(self) -> tuple[time, time] | None:
        """The working hours as start and end."""
        match = _SPAN.fullmatch(self.hours)
        if match is None:
            return None
        start_h, start_m, end_h, end_m = map(int, match.groups())
        return time(start_h, start_m), time(end_h, end_m)

    @field_validator("hours")
    @classmethod
    def _is_a_span(cls, hours: str) -> str:
        match = _SPAN.fullmatch(hours)
        if hours and (match is None or match.group(1, 2) == match.group(3, 4)):
            raise ValueError("write the hours as 22:00-07:00")
        return hours


class Limits(CardLimits):
    """The owner's limits; `swarm-node limits` prints the description of each field."""

    zone: str = Field("", description="time zone of the hours, such as Europe/Berlin; empty: the system's time zone")
    idle_minutes: float = Field(
        0.0, ge=0, le=1440, description="work only after this many minutes without user input; 0: always"
    )
    on_battery: bool = Field(False, description="true: work on battery power, too")
    vram_share: float = Field(1.0, gt=0, le=1, description="share of the GPU's memory that the engine may use")
    turns_mib: int = Field(
        TURNS_MIB,
        ge=0,
        le=TURNS_MIB_MAX,
        description="memory for finished turns of episodes in MiB, on the engine's device: the next turn computes only "
        "what is new; 0: none are kept",
    )
    threads: int = Field(0, ge=0, le=4096, description="CPU threads of the engine; 0: the value of `join --threads`")
    upload_gb: float = Field(
        0.0, ge=0, le=1e6, description="maximum upload to other nodes in GB per month; 0: no limit"
    )
    price_floor: int = Field(
        0,
        ge=0,
        le=bounds.PRICE_MAX_MICROS_PER_MTOK,
        description="decline leases that pay less per million tokens, in millionths of the round's unit: 1000000 is "
        "1.00",
    )
    best_paid_first: bool = Field(
        False,
        description="true: of several rounds, work first for the one that pays the most per hour of work, by its price "
        "and the speed of this machine with its model; false: for the first in the list of `join`",
    )

    cards: dict[str, CardLimits] = Field({}, description="limits of one graphics card, in a table such as [cards.1]")

    def of_card(self, number: int) -> CardLimits:
        """Return the limits of one card; the node's own hold in addition, its temperature for each card."""
        own = self.cards.get(str(number), CardLimits())
        return own if own.celsius else own.model_copy(update={"celsius": self.celsius})

    @field_validator("cards")
    @classmethod
    def _are_numbers(cls, cards: dict[str, CardLimits]) -> dict[str, CardLimits]:
        if not all(number.isdecimal() for number in cards):
            raise ValueError("name a card by its number, such as [cards.1]")
        return cards

    @field_validator("zone")
    @classmethod
    def _is_a_zone(cls, zone: str) -> str:
        try:
            if zone:
                ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("write the time zone as Europe/Berlin") from None
        return zone


def read(home: Path) -> Limits:
    """Read the limits of a home; the defaults if there is no file."""
    path = home / FILE
    try:
        return checked(tomllib.loads(path.read_text())) if path.exists() else Limits()
    except OSError as error:
        raise ConfigInvalid(
            f"{path} cannot be read: {error.strerror}.", hint="Run the command as the user who owns this file."
        ) from None
    except ValueError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error}.", hint="Fix the file, or remove it.") from None


def checked(values: dict[str, Any]) -> Limits:
    """Build limits from values of the file or the command line; raise `ConfigInvalid` if one is wrong."""
    values = _with_decimals(Limits, values)
    if isinstance(cards := values.get("cards"), dict):
        values["cards"] = {
            number: _with_decimals(CardLimits, card) if isinstance(card, dict) else card
            for number, card in cards.items()
        }
    try:
        return Limits(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "?"
        raise ConfigInvalid(f"{key} = {first['input']!r}: {_why(first)}.", hint=_hint(first)) from None


def _why(error: "ErrorDetails") -> str:
    """Return why a value is refused."""
    bounds_ = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return "there is no such limit"
        case "less_than_equal":
            return f"the highest value is {number_text(bounds_['le'])}"
        case "greater_than_equal":
            return f"the lowest value is {number_text(bounds_['ge'])}"
        case "greater_than":
            return f"the value must be above {number_text(bounds_['gt'])}"
    return error["msg"].removeprefix("Value error, ")


def _hint(error: "ErrorDetails") -> str:
    """Return the meaning of a limit whose value is wrong, or the names of all limits."""
    of_card = error["loc"][0] == "cards" and len(error["loc"]) > 2
    fields = (CardLimits if of_card else Limits).model_fields
    field = fields.get(str(error["loc"][-1 if of_card else 0]))
    if field is None:
        return f"Known limits{' of a card' if of_card else ''}: {', '.join(fields)}."
    about = str(field.description)
    return f"{about[0].upper()}{about[1:]}."


def changed(home: Path, given: dict[str, Any], *, card: int | None = None) -> Limits:
    """Return the limits of a home, with `given` on top, for the node or for one card."""
    values = read(home).model_dump()
    if card is None:
        return checked(values | given)
    own = values["cards"].get(str(card), {}) | given
    return checked(values | {"cards": values["cards"] | {str(card): own}})


def write(home: Path, limits: Limits) -> Path:
    """Write all limits with their descriptions, defaults as comments; root hands the file to the home's owner."""
    with disk_named(home):
        home.mkdir(parents=True, exist_ok=True)
    lines = ["# Limits of this node. A running agent applies changes within seconds.\n"]
    for name, field in Limits.model_fields.items():
        value = getattr(limits, name)
        mark = "# " if value == field.default else ""
        if name != "cards":  # tables come after all values
            lines.append(f"{mark}{name} = {_toml(value)}  # {field.description}\n")
    for number, card in sorted(limits.cards.items(), key=lambda item: int(item[0])):
        own = card.model_dump(exclude_defaults=True)
        if own:
            lines += [f"\n[cards.{number}]\n", *(f"{name} = {_toml(value)}\n" for name, value in own.items())]
    path = home / FILE
    write_durably(path, "".join(lines).encode(), temp_folder=home)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # the service's agent is another user, and must read it
        os.chown(path, home.stat().st_uid, home.stat().st_gid)
    return path


def _with_decimals(model: type[CardLimits], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with whole numbers as decimals, where the field is one."""
    decimals = {name for name, field in model.model_fields.items() if field.annotation is float}
    return {key: float(value) if key in decimals and type(value) is int else value for key, value in values.items()}


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
