"""The settings of a round as flat parameters for boards, without secrets.

- Only sections that decide what is trained are included. Addresses, payments, stores and copies are not: their URLs may
  hold passwords or keys, and none of them changes a result.
- `task.parameters` and `data.template_arguments` are the operator's own tables. A value is hidden if its name is one
  that secrets have, if it looks like a known kind of key, or if it is a URL with a password.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.config import Config

Setting = str | int | float | bool

SECTIONS = (
    "model",
    "task",
    "data",
    "reward",
    "episode",
    "selection",
    "sampling",
    "staleness",
    "learner",
    "objective",
    "correction",
    "eval",
)

OF_THE_ROUND = ("mode", "seed", "max_updates")
"""The settings of the section `round` that are included."""

SECRET_NAME = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?|auth(orization)?)$", re.I)

SECRET_VALUE = re.compile(r"^(Bearer |sk-|hf_|gh[a-z]_|github_pat_|xox[a-z]-|AKIA)|://[^/@\s]*:[^/@\s]*@")

HIDDEN = "(hidden)"


def tracked_settings(config: Config) -> dict[str, Setting]:
    """Return the settings by their names, such as `learner.algorithm`; unset ones are left out."""
    table = config.model_dump(mode="json")
    chosen = {"round": {name: table["round"][name] for name in OF_THE_ROUND}}
    chosen |= {section: table[section] for section in SECTIONS}
    return dict(_flat(chosen, ""))


def _flat(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Setting]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif SECRET_NAME.search(name):
            yield before + name, HIDDEN
        elif value is not None:
            text = json.dumps(value) if isinstance(value, list) else value
            yield before + name, HIDDEN if _has_secret(value) else text


def _has_secret(value: Any) -> bool:
    """Return True if a value, or one inside it, looks like a secret."""
    if isinstance(value, list):
        return any(map(_has_secret, value))
    if isinstance(value, dict):
        return any(SECRET_NAME.search(name) or _has_secret(inner) for name, inner in value.items())
    return isinstance(value, str) and bool(SECRET_VALUE.search(value))
