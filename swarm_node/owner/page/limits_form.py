"""The owner's limits as forms: each number with a slider beside it, readable and usable without a script.

- The number is what counts. Without a script the slider is a second way to type it: the one that was changed counts.
- A field carries the value with which it was shown. Only changed fields are saved, so that a form that was open for an
  hour does not undo what the command `limits` has set meanwhile.
- Descriptions and checks are those of `allowance.settings`; nothing is checked here but that a number is one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protocol.errors import ConfigInvalid
from protocol.text.html import Markup, el
from protocol.text.plain import number_text
from swarm_node.allowance.settings import CardLimits, Limits

AT_NEXT_START = frozenset({"vram_share", "turns_mib", "threads"})
"""Limits that the engine gets when it starts."""

WAS, SLIDER = ".was", ".slider"
"""Ends of the names of a field's other inputs."""


class LimitField(NamedTuple):
    """A limit on the page."""

    name: str
    label: str
    unit: str = ""
    top: float = 0.0
    """End of the slider, which a larger value moves; 0: no slider."""
    step: float = 1.0
    low: float = 0.0
    example: str = ""
    about: str = ""
    """The page's text about it; empty: its description in `allowance.settings`."""


NODE_FIELDS = (
    LimitField("celsius", "Temperature of a card", "°C", top=110),
    LimitField("power_watts", "Mean power", "W", top=1000, step=10),
    LimitField("hours", "Working hours", example="22:00-07:00"),
    LimitField("zone", "Time zone of the hours", example="Europe/Berlin"),
    LimitField("idle_minutes", "Time without user input", "min", top=120, step=5),
    LimitField(
        "on_battery",
        "Work on battery power",
        about="Without it the node pauses until the machine is plugged in.",
    ),
    LimitField("upload_gb", "Upload in a month", "GB", top=1000, step=10),
    LimitField(
        "price_floor",
        "Lowest price",
        "millionths",
        about="Decline leases that pay less per million tokens, in millionths of the round's unit: 1000000 is 1.00.",
    ),
    LimitField(
        "best_paid_first",
        "Best paid round first",
        about="Of several rounds, the node works first for the one that pays the most per hour of work here. "
        "Otherwise it works first for the first round that you gave to join.",
    ),
    LimitField("vram_share", "Share of the graphics memory", top=1, step=0.05, low=0.05),
    LimitField("turns_mib", "Memory for finished turns", "MiB", top=8192, step=256),
    LimitField("threads", "CPU threads", top=64),
)

CARD_FIELDS = tuple(field for field in NODE_FIELDS if field.name in CardLimits.model_fields)


def limits_form(
    action: str, limits: CardLimits, *, card: int | None = None, given: Mapping[str, Any] | None = None
) -> Markup:
    """Build the form for the limits of the node, or of one card; `given` are those that `join` has set for this run."""
    fields = CARD_FIELDS if card is not None else NODE_FIELDS
    start = "node" if card is None else f"card-{card}"
    name = "the node's limits" if card is None else f"the limits of card {card}"
    return el(
        "form",
        el("input", type="hidden", name="card", value=card) if card is not None else None,
        (_field(field, limits, start, (given or {}).get(field.name)) for field in fields),
        el("p", el("button", "Save", el("span", f" {name}", class_="quiet"), class_="main"), class_="save"),
        method="post", action=action, class_="limits", aria_label=name[0].upper() + name[1:],
    )  # fmt: skip


def changed_fields(form: Mapping[str, str], *, card: int | None = None) -> dict[str, Any]:
    """Return the limits that the owner has changed in a form."""
    model = Limits if card is None else CardLimits
    changed = {}
    for field in CARD_FIELDS if card is not None else NODE_FIELDS:
        was = form.get(field.name + WAS)
        if was is None:
            continue
        typed = _typed(model, field, form)
        slid = form.get(field.name + SLIDER)
        if typed != was:
            changed[field.name] = _value(model, field.name, typed)
        elif slid is not None and _has_moved(field, _value(model, field.name, was), _value(model, field.name, slid)):
            changed[field.name] = _value(model, field.name, slid)
    return changed


def _typed(model: type[CardLimits], field: LimitField, form: Mapping[str, str]) -> str:
    if model.model_fields[field.name].annotation is bool:
        return "true" if field.name in form else "false"  # an unchecked box is not sent
    return form.get(field.name, "").strip()


def _value(model: type[CardLimits], name: str, text: str) -> Any:
    """Return a field's text as a value of its type; an empty number is the default."""
    field = model.model_fields[name]
    if field.annotation is bool:
        return text == "true"
    if field.annotation is str:
        return text
    if not text:
        return field.default
    try:
        return int(text) if field.annotation is int else float(text)
    except ValueError:
        kind = "a whole number" if field.annotation is int else "a number"
        raise ConfigInvalid(f"{name} = {text[:50]!r}: this is not {kind}.", hint=f"{field.description}.") from None


def _field(field: LimitField, limits: CardLimits, start: str, given: Any) -> Markup:
    """Build the inputs of one limit, with its description."""
    value, place = getattr(limits, field.name), f"{start}-{field.name}"
    said = str(type(limits).model_fields[field.name].description).replace("`", "")
    about = field.about or f"{said[0].upper()}{said[1:]}."
    if field.name in AT_NEXT_START:
        about += " It applies from the agent's next start."
    if given is not None:
        about += f" The agent was started with {_shown(given)}, which counts until it ends."
    return el(
        "div",
        el("label", field.label, for_=place),
        _inputs(field, value, place),
        el("small", about, id=f"{place}-about"),
        class_="limit" if field.top else "limit alone",
    )


def _inputs(field: LimitField, value: Any, place: str) -> Sequence[Markup | None]:
    was = el("input", type="hidden", name=field.name + WAS, value=_shown(value))
    common = {"id": place, "name": field.name, "aria_describedby": f"{place}-about"}
    if isinstance(value, bool):
        return [was, el("input", type="checkbox", checked=value, **common)]
    if isinstance(value, str):
        return [was, el("input", type="text", value=value, placeholder=field.example or None, **common)]
    slider = (
        el(
            "input",
            type="range",
            name=field.name + SLIDER,
            min=number_text(field.low),
            max=number_text(_top(field, value)),
            step=number_text(field.step),
            value=number_text(_slider_value(field, value)),
            aria_label=f"{field.label}, slider",
        )
        if field.top
        else None
    )
    step = "1" if isinstance(value, int) else "any"
    number = el("input", type="number", min=0, step=step, value=number_text(value), inputmode="decimal", **common)
    unit = el("span", field.unit, class_="unit") if field.unit else None
    return [was, slider, number, unit]


def _slider_value(field: LimitField, value: float) -> float:
    """Return the step of a slider that is nearest to a value: browsers know no values between."""
    return field.low + max(0, round((value - field.low) / field.step)) * field.step


def _top(field: LimitField, value: float) -> float:
    """Return the end of a slider, a step of its own."""
    return field.low + math.ceil(round((max(field.top, value) - field.low) / field.step, 6)) * field.step


def _has_moved(field: LimitField, was: float, slid: float) -> bool:
    """Return True if a slider is not where it was shown."""
    return abs(slid - _slider_value(field, was)) > field.step / 2


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else number_text(value)
