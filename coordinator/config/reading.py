"""The reader of the operator's file: an error names every mistake, its place, what is allowed, and the nearest name.

- A wrong value is left out, and the rest is checked again: contradictions are found beside wrong values, except those
  that a left-out value takes part in.
- Lines are found by a search for the key, since the reader of TOML does not tell them.
"""

import copy
import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.config.manual import every, sections, written
from coordinator.config.whole import CONTRADICTIONS, Config
from protocol.errors import ConfigInvalid

CHECKS_MAX = 8
"""The most checks of one file; each but the last leaves out the values that were wrong."""


CLOSE = 0.7
"""The least similarity of a name that is suggested."""

OF_OTHER_TRAINERS = {
    "num_generations": "sampling.samples_per_group",
    "n": "sampling.samples_per_group",
    "rollout_n": "sampling.samples_per_group",
    "group_size": "sampling.samples_per_group",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "max_steps": "round.max_updates",
    "total_training_steps": "round.max_updates",
    "train_batch_size": "learner.groups_per_update, in prompts",
    "per_device_train_batch_size": "learner.groups_per_update, in prompts",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens, in tokens",
    "warmup_steps": "learner.warmup_updates",
    "lr_scheduler_type": "learner.schedule",
    "adam_epsilon": "learner.eps",
    "grad_clip": "learner.max_grad_norm",
    "loss_type": "learner.algorithm, objective.loss_aggregation or objective.clip",
    "adv_estimator": "learner.algorithm",
    "kl_coef": "objective.beta",
    "kl_loss_coef": "objective.beta",
    "entropy_coeff": "objective.entropy_bonus",
    "clip_ratio_high": "objective.epsilon_high",
    "mask_truncated": "objective.mask_truncated_completions",
    "lora_r": "learner.lora_rank",
    "reward_funcs": "reward.functions",
    "report_to": "learner.wandb, learner.mlflow, learner.tensorboard or learner.trackio",
}
"""The settings of TRL and verl that have another name here."""

SHOWN_MAX_CHARS = 80
"""The part of a wrong value that a message shows."""


@dataclass(frozen=True)
class Mistake:
    """A wrong setting: its name, what is wrong, and what to do."""

    path: str
    """`section.key` or `section`; empty if several settings contradict each other."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


def checked(table: dict[str, Any]) -> tuple[Config | None, list[Mistake]]:
    """Return the configuration of a table without its wrong values, or None if it has none, and every mistake."""
    left, found, omitted = copy.deepcopy(table), list[Mistake](), set[str]()
    for _ in range(CHECKS_MAX):
        try:
            config = Config.model_validate(left)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                found += _mistakes(each, omitted)
                if not _leave_out(left, each["loc"], omitted):
                    return None, found
        else:
            return config.with_absolute_folder(), found
    return None, found


def _mistakes(error: Any, omitted: set[str]) -> Iterator[Mistake]:
    """Yield the mistakes of one error of the models."""
    keys = [str(part) for part in error["loc"]]
    path = ".".join(keys)
    if error["type"] == "extra_forbidden":
        hint = nearest(keys)
        if len(keys) == 1 and hint.startswith("Sections") and isinstance(error["input"], dict) and error["input"]:
            hint = nearest([*keys, next(iter(error["input"]))])  # a key may be right where its section is not
        yield Mistake(path, f"There is no setting {path}.", hint)
    elif error["type"] == "model_type":
        yield Mistake(
            path, f"{path} is a section, not a value.", f"Write [{path}], and its settings in the lines after it."
        )
    elif error["type"] == CONTRADICTIONS:
        for said in error["ctx"]["found"]:
            if not any(re.search(rf"\b{re.escape(name)}\b", said) for name in omitted):
                yield Mistake("", f"{said}.")
    elif error["type"] == "value_error":
        yield Mistake(path, f"{': '.join(filter(None, [path, str(error['ctx']['error'])]))}.")
    else:
        value = f"{error['input']!r}"[:SHOWN_MAX_CHARS]
        yield Mistake(path, f"{': '.join(filter(None, [path, error['msg']]))}. The value is {value}.", _allowed(keys))


def _leave_out(table: dict[str, Any], place: tuple[Any, ...], omitted: set[str]) -> bool:
    """Remove a wrong value, or a section with wrong values; return False if there is nothing to remove."""
    section, *key = (str(part) for part in place[:2]) if place else ("",)
    inside = table.get(section)
    if key and isinstance(inside, dict) and key[0] in inside:
        del inside[key[0]]
        omitted.add(f"{section}.{key[0]}")
        return True
    omitted.update(known.path for known in every(section))
    return section in table and table.pop(section, None) is not None


def _allowed(keys: list[str]) -> str:
    """Return a hint with the type and bounds of a setting, if the place is one."""
    for known in every(".".join(keys[:2])) if len(keys) > 1 else ():
        default = "not set" if known.default is None else written(known.default)
        return f"Allowed: {known.allowed}. Default: {default}."
    return ""


def _initials(name: str) -> str:
    """Return a setting's name with its key abbreviated, such as `learner.lr` for `learner.learning_rate`."""
    section, _, key = name.partition(".")
    return f"{section}.{''.join(word[:1] for word in key.split('_'))}"


def nearest(keys: list[str]) -> str:
    """Return a hint with the existing setting that was probably meant."""
    *section, key = keys
    if known := OF_OTHER_TRAINERS.get(key.lower()):
        return f"Here this is {known}."
    names = [known.path for known in every()]
    here = [known.name for known in every(section[0])] if section else []
    if elsewhere := [name for name in names if name.endswith(f".{key}")]:  # the right key, in no section or another one
        return f"Did you mean {' or '.join(elsewhere)}?"
    if abbreviated := [name for name in names if _initials(name) == ".".join(keys)]:  # such as learner.lr
        return f"Did you mean {abbreviated[0]}?"
    longer = [name for name in here if name.startswith(f"{key}_")]  # such as market.budget
    if close := longer[:1] or (here and difflib.get_close_matches(key, here, n=1, cutoff=CLOSE)):
        return f"Did you mean {section[0]}.{close[0]}?"
    if close := difflib.get_close_matches(keys[0], () if here else sections(), n=1, cutoff=CLOSE):
        return f"Did you mean {close[0]}?"
    return f"[{section[0]}] has {', '.join(here)}." if here else f"Sections: {', '.join(sections())}."


def with_places(mistakes: list[Mistake], file: Path, settings: list[str]) -> list[tuple[str, Mistake]]:
    """Return mistakes in the order of the file, with their places: `--set`, or the file with the line."""
    text = file.read_text(encoding="utf-8")
    given = {setting.partition("=")[0] for setting in settings}
    rows = [(0 if each.path in given else line_of(each.path, text), each) for each in mistakes]
    rows.sort(key=lambda row: row[0] or len(text))  # those without a line come last
    return [("--set" if each.path in given else f"{file}:{line}" if line else str(file), each) for line, each in rows]


def line_of(path: str, text: str) -> int:
    """Return the line of a setting or of a section's head in a file; 0 if it is not found."""
    wanted, _, key = path.partition(".")
    key, section, quoted = key.partition(".")[0], "", ""
    for number, line in zip(count(1), text.splitlines(), strict=False):
        if quoted:  # inside a text of several lines
            quoted = "" if line.count(quoted) % 2 else quoted
            continue
        if head := re.match(r"\s*\[+\s*\"?([\w-]+)\"?\s*(?:\.\s*\"?([\w-]+))?", line):
            section = head[1]
            if section == wanted and head[2] == (key or None):
                return number
        elif named := re.match(r"\s*\"?([\w-]+)\"?\s*(?:\.\s*\"?([\w-]+)\"?\s*)?[.=]", line):
            name = ".".join(filter(None, (section, named[1], named[2] if not section else None)))
            if name in (path, f"{wanted}.{key}"):
                return number
        quoted = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
    return 0


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
