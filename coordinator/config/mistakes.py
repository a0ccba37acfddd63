"""Mistakes in the operator's file: all of them at once, each with its place, what is allowed, and the nearest name.

- A wrong value is left out, and the rest is checked again: contradictions are found beside wrong values, except those
  that a left-out value takes part in.
- Lines are found by a search for the key, since the reader of TOML does not tell them.
"""

import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.config.manual import every, sections, written
from coordinator.config.whole import CONTRADICTIONS, Config

PASSES = 8
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
    for _ in range(PASSES):
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
