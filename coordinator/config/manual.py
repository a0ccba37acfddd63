"""The manual of the operator's file, made from its models, so it cannot differ from the checks.

- A key's unit is in its name; its default, bounds and meaning are the field's.
- `toml` writes a whole file with every key: those that were set as values, the others as comments. Keys that the first
  launch fixes are marked.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from coordinator.config.fixed import FIXED
from coordinator.config.section import Section
from coordinator.config.whole import Config
from protocol.text.plain import counted

UNITS = {
    "_s": "seconds",
    "_h": "hours",
    "_d": "days",
    "_bytes": "bytes",
    "_micros": "millionths of round.unit",
    "_micros_per_mtok": "millionths of round.unit per million tokens",
    "_micros_per_hour": "millionths of round.unit per hour",
}

MICROS = 1_000_000

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "Path": "a path"}
"""The types of settings in words."""

MARK = "[fixed]"
"""The mark, in a written file, of a setting that cannot change after the first launch."""

EXAMPLE = "  # an example; the key is not set"
"""The comment after the example value of a key without a value, since TOML cannot write none."""


@dataclass(frozen=True)
class SettingDescription:
    """The description of a setting, from its model."""

    section: str
    name: str
    field: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def unit(self) -> str:
        suffixes = [suffix for suffix in UNITS if self.name.endswith(suffix)]
        return UNITS[max(suffixes, key=len)] if suffixes else ""

    @property
    def bounds(self) -> str:
        """Return the bounds of the value."""
        said = []
        for rule in self.field.metadata:
            for sign, kind, name in (
                ("≥", annotated_types.Ge, "ge"),
                (">", annotated_types.Gt, "gt"),
                ("≤", annotated_types.Le, "le"),
                ("<", annotated_types.Lt, "lt"),
            ):
                if isinstance(rule, kind):
                    said.append(f"{sign} {getattr(rule, name)}")
        return ", ".join(said)

    @property
    def meaning(self) -> str:
        return self.field.description or ""

    @property
    def allowed(self) -> str:
        """Return the type and bounds of the value, for the hint of a mistake."""
        kind = type_name(self.field.annotation)
        return ", ".join(filter(None, (KINDS.get(kind, kind), self.bounds, self.unit)))


def type_name(annotation: Any) -> str:
    """Return a type as a person writes it: without modules, and without the patterns of its texts."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(parts[0])
    if origin is Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(type_name(part) for part in parts if part is not NoneType)
    if parts:
        return f"{origin.__name__} of {', '.join(type_name(part) for part in parts if part is not Ellipsis)}"
    return str(getattr(annotation, "__name__", annotation))


def sections() -> dict[str, type[Section]]:
    """Return every table by its name, in the order of the manual."""
    return {name: type(table.default) for name, table in Config.model_fields.items()}


def every(prefix: str = "") -> Iterator[SettingDescription]:
    """Yield the setting `prefix`, or every setting of the section `prefix`; all if it is empty."""
    for section, table in sections().items():
        for name, field in table.model_fields.items():
            key = SettingDescription(section, name, field)
            if key.path == prefix or section == prefix or not prefix:
                yield key


EMBEDDED = "embedded"
"""The `model.path` of the tiny built-in policy."""

EXACT_SAVES = 0.55
"""The share of sampling a group that one audit of it to the bit saves: decision 30."""


def table() -> str:
    """Return every setting as a table in Markdown."""
    rows = [f"| `{key.path}` | `{key.default}` | {key.meaning} |" for key in every()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def explain(config: Config, prefix: str = "") -> list[str]:
    """Return every key with its present value, its default, unit, bounds and meaning."""
    lines = []
    for key in every(prefix):
        now = getattr(getattr(config, key.section), key.name)
        default = "" if now == key.default else f" (default {written(key.default)})"
        fixed = "fixed by the first launch" if key.path in FIXED else ""
        about = "; ".join(part for part in (key.unit, key.bounds, fixed) if part)
        lines.append(f"{key.path} = {written(now)}{default}" + (f"  [{about}]" if about else ""))
        lines.append(f"    {key.meaning}")
    return lines


def effects(config: Config) -> list[str]:
    """Return the combined effects of the settings, in sentences."""
    sampling, learner, staleness, market = config.sampling, config.learner, config.staleness, config.market
    samples = learner.groups_per_update * sampling.samples_per_group
    tokens = samples * sampling.max_new_tokens
    dearest_micros = math.ceil(tokens * market.dearest_micros_per_mtok / MICROS)
    under_way = (staleness.max_updates + 1) * learner.groups_per_update
    lasts = market.budget_micros // dearest_micros if dearest_micros else None
    audit = config.audit
    floor = audit.trusted_floor
    window = math.ceil(audit.escrow_factor * (1 - floor) / floor) if floor else 0
    lines = [
        f"One update trains on B × G = {learner.groups_per_update} × {sampling.samples_per_group} = {samples} samples, "
        f"at most {tokens:,} tokens.",
        f"It costs at most {config.round.money.exact(dearest_micros)}"
        + (
            f"; the budget lasts for {lasts:,} such updates of {config.round.max_updates:,}."
            if lasts is not None
            else "."
        ),
        f"A version at least every {counted(staleness.kappa, 'update')}"
        + ("" if staleness.publish_every else ", until measurements give another number")
        + f"; at most (S + 1) × B = {under_way} groups are under way.",
        f"The last {staleness.max_updates + 2} versions are kept.",
        f"For a trusted owner, at least {floor:.1%} of the claims are audited, and "
        f"{counted(window, 'group')} stay in escrow.",
        *_exact(market.exact_bonus, floor),
        f"A lease lasts for {config.leases.lease_s(sampling.max_new_tokens):g} s, and for "
        f"{config.leases.lease_s(config.episode.turn_tokens_max):g} s if it is for a turn of an episode.",
        f"A node without a heartbeat for {3 * config.leases.heartbeat_s:g} s counts as offline.",
    ]
    return lines


def _exact(bonus: float, floor: float) -> list[str]:
    """Return what the bonus of an exact class costs, and what such nodes save of audits, if there is one."""
    if not bonus:
        return []
    saved = floor * EXACT_SAVES
    return [
        f"A node whose work an auditor repeats to the bit is paid {bonus:.2%} more. Its audits need one replay, not "
        f"two: at {floor:.1%}, that saves about {saved:.1%} of what sampling takes."
    ]


def warnings(config: Config) -> list[str]:
    """Return warnings about settings that are allowed, but probably not intended."""
    messages = []
    tokens = config.learner.groups_per_update * config.sampling.samples_per_group * config.sampling.max_new_tokens
    dearest_micros = math.ceil(tokens * config.market.dearest_micros_per_mtok / MICROS)
    if dearest_micros * config.round.max_updates > config.market.budget_micros:
        messages.append(
            f"market.budget_micros may not cover all {config.round.max_updates:,} updates "
            f"(worst case: {config.market.budget_micros // dearest_micros:,} updates)."
        )
    messages += _of_a_real_model(config)
    if config.leases.lease_s(config.sampling.max_new_tokens) <= config.leases.heartbeat_s:
        messages.append(
            "leases.timeout_s is not longer than leases.heartbeat_s: leases expire before nodes count as offline."
        )
    if not config.audit.floor and not config.audit.first_groups:
        messages.append("audit.floor and audit.first_groups are 0: nothing is audited, so nodes can invent rollouts.")
    if config.market.exact_bonus and config.audit.tolerance and not config.audit.classes:
        messages.append(
            "market.exact_bonus is never paid: audit.tolerance judges all nodes as one class. Set audit.classes, or "
            "leave audit.tolerance empty."
        )
    local = ("127.0.0.1", "localhost", "[::1]")
    is_public = bool(config.round.public_url) or config.round.listen.rpartition(":")[0] not in local
    if is_public and not config.round.public_url:
        messages.append("round.public_url is empty: nodes will call the address of round.listen.")
    seeder = config.round.seeder.rpartition(":")[0]
    if is_public and not config.round.seeder_public and seeder in (*local, "0.0.0.0", "[::]"):
        messages.append(
            f"round.seeder_public is empty: nodes will dial the seeder at {seeder}, cannot reach it there, and "
            "fetch every version over the coordinator's HTTP."
        )
    return messages


def _of_a_real_model(config: Config) -> list[str]:
    """Return warnings about defaults that fit the embedded policy, or all weights, and probably not this round."""
    sampling, learner, messages = config.sampling, config.learner, list[str]()
    if config.model.path == EMBEDDED:
        return messages
    if "max_new_tokens" not in sampling.model_fields_set:
        messages.append(
            f"sampling.max_new_tokens is not set: answers are cut after {sampling.max_new_tokens} tokens, and this "
            "cannot change after the first launch."
        )
    if learner.external:
        return messages
    if learner.device != "cpu" and "dtype" not in learner.model_fields_set:
        messages.append(
            "learner.dtype is not set: products are computed in float32, which is several times slower on a GPU than "
            "bfloat16. The trained weights are float32 in both."
        )
    if learner.lora_rank and "learning_rate" not in learner.model_fields_set:
        messages.append(
            f"learner.learning_rate is not set: {learner.learning_rate:g} is a rate for all weights. Adapters usually "
            "need ten times as much or more."
        )
    return messages


def toml(chosen: dict[str, dict[str, Any]]) -> str:
    """Return a file with every key, its default and its meaning: `chosen` keys as values, the others as comments."""
    lines = [
        "# Settings of a round; `swarm-coordinator config explain FILE` shows their effects.",
        f"# Edit them freely before the first launch. It fixes those marked {MARK}: the history depends on them.",
        "",
    ]
    for section, model in sections().items():
        lines += [f"# {(model.__doc__ or '').splitlines()[0]}", f"[{section}]"]
        mine = chosen.get(section, {})
        for key in every(section):
            bounds = f" ({key.bounds})" if key.bounds else ""
            mark = f" {MARK}" if key.path in FIXED else ""
            lines.append(f"# {key.meaning}{bounds}{mark}")
            if key.name in mine:
                lines.append(f"{key.name} = {written(mine[key.name])}")
            elif key.default is None:
                lines.append(f"# {key.name} = {written(_example(key))}{EXAMPLE}")
            else:
                lines.append(f"# {key.name} = {written(key.default)}")
        lines.append("")
    return "\n".join(lines)


def _example(key: SettingDescription) -> Any:
    """Return an allowed value, as the example of a key that is not set."""
    kinds = [kind for kind in get_args(key.field.annotation) if kind is not NoneType]
    if get_origin(kinds[0]) is Literal:
        return get_args(kinds[0])[0]
    bounds = {type(rule): rule for rule in key.field.metadata}
    if annotated_types.Le in bounds:
        return bounds[annotated_types.Le].le
    return kinds[0](1) if annotated_types.Gt in bounds else kinds[0]()


def written(value: Any) -> str:
    """Return a value in TOML."""
    if value is None:
        return "not set"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {written(item)}" for name, item in value.items()) + "}"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
