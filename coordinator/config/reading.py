"""The reader of the operator's file: an error names every mistake in it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from coordinator.config.manual import written
from coordinator.config.mistakes import Mistake, checked
from coordinator.config.whole import Config
from protocol.errors import ConfigInvalid

PASSES = 3
"""The most comparisons: a mode that is set on top changes the defaults of others, so the result is compared again."""


def load(path: Path | None, settings: list[str]) -> Config:
    """Return the configuration of a file (or all defaults) with `section.key=value` settings on top."""
    config, mistakes = load_checked(path, settings)
    if config is None or mistakes:
        raise _refusal(mistakes, path)
    return config


def load_checked(path: Path | None, settings: list[str]) -> tuple[Config | None, list[Mistake]]:
    """Return the configuration of a file with settings on top, as `checked` does, and every mistake."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except OSError as error:
        hint = f"Create it with swarm-coordinator init {path}." if isinstance(error, FileNotFoundError) else ""
        raise ConfigInvalid(f"Cannot read {path}: {error.strerror}.", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{path} is not TOML: byte {error.start + 1} is not text in UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}.") from error
    return checked(with_settings(table, settings))


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
    """Return the configuration of a table; raise `ConfigInvalid` with every mistake and its place."""
    config, mistakes = checked(table)
    if config is None or mistakes:
        raise _refusal(mistakes, None)
    return config


def with_values(text: str, values: dict[str, str]) -> str | None:
    """Return a TOML file's text with `section.key` values changed or added, and all the rest as it is.

    Return None if that cannot be done line by line, such as with a section that is written on one line.
    """
    wanted = tomllib.loads(text)
    for name, value in values.items():
        section, _, key = name.partition(".")
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        found = re.search(rf"(?ms)^\s*\[\s*{section}\s*\]([^\n]*)$(.*?)(?=^\s*\[|\Z)", text)
        if found is None:
            text = f"{text.rstrip()}\n\n[{section}]\n{line}\n"
        else:
            start, end = found.span(2)
            body, count = re.subn(rf"(?m)^{key}[ \t]*=.*$", line.replace("\\", "\\\\"), found[2])
            text = text[:start] + (body if count else f"\n{line}{body}") + text[end:]
        wanted.setdefault(section, {})[key] = value
    try:
        return text if tomllib.loads(text) == wanted else None
    except tomllib.TOMLDecodeError:
        return None


def _refusal(mistakes: list[Mistake], path: Path | None) -> ConfigInvalid:
    """Return one error for all mistakes."""
    if len(mistakes) == 1:
        return ConfigInvalid(mistakes[0].message, hint=mistakes[0].hint)
    said = " ".join(f"({number}) {mistake}" for number, mistake in enumerate(mistakes, 1))
    hint = f"`swarm-coordinator config check {path}` prints them with their lines." if path else ""
    return ConfigInvalid(f"{len(mistakes)} settings are wrong. {said}", hint=hint)


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
