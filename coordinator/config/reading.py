"""The reader of the operator's file: errors name the place, and for an unknown key the nearest name."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.config.manual import written
from coordinator.config.section import Section
from coordinator.config.whole import Config
from protocol.errors import ConfigInvalid

PASSES = 3
"""The most comparisons: a mode that is set on top changes the defaults of others, so the result is compared again."""


def load(path: Path | None, settings: list[str]) -> Config:
    """Return the configuration of a file (or all defaults) with `section.key=value` settings on top."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except OSError as error:
        raise ConfigInvalid(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}.") from error
    return parse(with_settings(table, settings))


def with_settings(table: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Put `section.key=value` settings into the table, and return it."""
    for setting in settings:
        _apply(table, setting)
    return table


def on_top(path: Path, ran: Config) -> list[str]:
    """Return the `section.key=value` settings that turn a file's configuration into `ran`."""
    settings: dict[str, str] = {}
    for _ in range(PASSES):
        try:
            config = load(path, [f"{name}={value}" for name, value in settings.items()])
        except ConfigInvalid:  # the file may be valid only with settings on top
            config = Config()
        more = {
            f"{section}.{key}": written(value)
            for section in Config.model_fields
            for key, value in getattr(ran, section)
            if value is not None and value != getattr(getattr(config, section), key)
        }
        if not more:
            break
        settings |= more
    return [f"{name}={value}" for name, value in settings.items()]


def parse(table: dict[str, Any]) -> Config:
    """Return the configuration of a table; raise `ConfigInvalid` for the first error, with its place."""
    try:
        return Config.model_validate(table).with_absolute_folder()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        keys = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise ConfigInvalid(f"There is no setting {'.'.join(keys)}.", hint=_nearest(keys)) from None
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise ConfigInvalid(f"{': '.join(filter(None, ['.'.join(keys), said]))}.") from None


def _apply(table: dict[str, Any], setting: str) -> None:
    """Put one `section.key=value` into the table; the value is TOML, or plain text."""
    name, equals, text = setting.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ConfigInvalid(f"{setting!r} is not a setting.", hint="Write section.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    keys = table.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigInvalid(f"{section} is a value in the file, not a section.", hint=f"Write [{section}] above keys.")
    keys[key] = value


def _nearest(keys: list[str]) -> str:
    """Return a hint with the existing setting that was probably meant."""
    if len(keys) == 1:
        close = difflib.get_close_matches(keys[0], Config.model_fields, n=1, cutoff=0.5)
        return f"Did you mean {close[0]}?" if close else f"Sections: {', '.join(Config.model_fields)}."
    names = [f"{section}.{key}" for section, field in Config.model_fields.items() for key in _keys(field.annotation)]
    close = difflib.get_close_matches(".".join(keys), names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Sections: {', '.join(Config.model_fields)}."


def _keys(section: object) -> list[str]:
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return list(section.model_fields)
