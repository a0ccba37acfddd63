"""A uniform interface to reward functions of any signature, in the child process that runs the operator's code.

Three signatures are recognised by the names of their parameters:

    TRL    fn(prompts, completions, completion_ids, **columns) -> [float or None for each]
    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> float, or dict with "score"
    ours   fn(problem, completion) -> float, None, or protocol.tasks.Reward

- A function gets the arguments that it names; one with `**anything` gets all. Chat prompts and their completions are
  lists of messages, as in TRL.
- A function of any signature may return a `protocol.tasks.Reward` instead of a number. It contains the spans of the
  completion that are not trained on, and the weight of the rest. With several functions, the spans are united and the
  weights multiplied.
- None means that the function does not judge a completion. A completion that no function judges fails; it is no zero.
- An answer of the wrong length, NaN, an infinite number or another type fails, too: `BadAnswer` has the reason.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward, Spans

BUILT_IN = {
    "code": "coordinator.tasks.reward_code:reward",
    "exact": "coordinator.tasks.reward_exact:reward",
    "judge": "coordinator.tasks.reward_judge:reward",
    "math": "coordinator.tasks.reward_math:reward",
    "reasoning-gym": "coordinator.environments.gym_answers:reward",
}
"""Shipped rewards by their short names."""

SHOWN_NAMES = 10
"""The functions and classes of a file that an error about a missing one names."""


OWN_FOLDER = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
PACKAGES = {"site-packages", "dist-packages"}
"""The folders of this program, of Python and of packages, which may lie below Python's: an error of the operator's code
is seldom theirs."""


class BadAnswer(Exception):
    """A value that a reward function or an environment returned is not valid."""


class Job(NamedTuple):
    """The completions of one problem to be judged."""

    problem: Problem
    completions: Sequence[str]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class RewardPart:
    """The result of one function for one completion; `score` is None if the function does not judge it."""

    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    invalid: bool = False
    weight: float = 1.0
    skip: Spans = ()


Judge = Callable[[Job], list[RewardPart]]


class Weighted(NamedTuple):
    """A function with the name of its component and its weight."""

    name: str
    weight: float
    judge: Judge


def named(place: str) -> str:
    """Return the component name of a reward: the function's name, without its file or module."""
    return place.rpartition(":")[2]


def load(place: str, weight: float = 1.0) -> Weighted:
    """Load the function at `file.py:name`, at `package.module:name`, or a built-in one."""
    return Weighted(named(place), weight, _adapter(load_callable(BUILT_IN.get(place, place)), place))


def load_callable(place: str) -> Callable[..., Any]:
    """Load the function or class at `file.py:name` or `package.module:name`."""
    where, _, name = place.rpartition(":")
    if not where:
        known = ", ".join(BUILT_IN)
        raise ConfigInvalid(f"There is no reward {place!r}.", hint=f"Write file.py:function, or one of {known}.")
    made = module(where)
    loaded: Callable[..., Any] | None = getattr(made, name, None)
    if not callable(loaded):
        there = [each for each, value in vars(made).items() if callable(value) and not each.startswith("_")]
        close = get_close_matches(name, there, n=1)
        hint = f"Did you mean {where}:{close[0]}?" if close else f"It has {', '.join(there[:SHOWN_NAMES]) or 'none'}."
        if name == "reward" and not close:
            hint += " A file has a function `reward`, or a class `Environment`."
        raise ConfigInvalid(f"{where} has no function or class {name!r}.", hint=hint)
    return loaded


def module(where: str) -> ModuleType:
    """Import a module by its file or its dotted name; a file can import modules in its folder."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigInvalid(
            f"There is no file {where}.", hint="Paths are relative to the folder in which the command was started."
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    made = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, made)
    spec.loader.exec_module(made)
    return made


def error_place(error: BaseException) -> str:
    """Return " (file.py:3)", the innermost line of the operator's code that led to an error; "" without such a line.

    Lines of this program and of Python's own library are never named, and those of installed packages only if there is
    no line of a file of the operator.
    """
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [each for each in frames if not _is_ours_or_pythons(each.filename)]
    places = [each for each in foreign if not _is_of_package(each.filename)] or foreign
    return f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""


def _is_ours_or_pythons(file: str) -> bool:
    is_pythons = Path(file).is_relative_to(STDLIB) and not _is_of_package(file)
    return file.startswith("<frozen ") or Path(file).is_relative_to(OWN_FOLDER) or is_pythons


def _is_of_package(file: str) -> bool:
    return not PACKAGES.isdisjoint(Path(file).parts)


def judge(functions: Sequence[Weighted], job: Job) -> list[Reward]:
    """Return the weighted sum of the functions' results for each completion."""
    results = []
    for function in functions:
        parts = function.judge(job)
        if len(parts) != len(job.completions):
            raise BadAnswer(f"{function.name} returned {len(parts)} rewards for {len(job.completions)} completions.")
        results.append(parts)
    rewards = [_sum(functions, parts) for parts in zip(*results, strict=True)]
    for reward, text in zip(rewards, job.completions, strict=True):
        if trouble := unsound(reward.weight, reward.skip, len(text)):
            raise BadAnswer(trouble)
    return rewards


def earned(answer: Any) -> Reward:
    """Return the reward of an episode by what its environment said."""
    part = _part(answer, "reward")
    if part.score is None:
        raise BadAnswer("The environment returned no reward at the end of an episode.")
    if part.skip:
        raise BadAnswer("A reward of an episode cannot skip parts of it.")
    if trouble := unsound(part.weight, (), 0):
        raise BadAnswer(trouble)
    return Reward(part.score, "invalid" if part.invalid else "ok", part.components, weight=part.weight)


def observed(answer: Any) -> Any:
    """Return the answer of an environment to a turn: text, messages, or None for the end; refuse any other."""
    if answer is not None and not is_observation(answer):
        raise BadAnswer(
            f"step returned {type(answer).__name__}. It must return text, a list of messages with the texts role and "
            "content, or None after the last turn."
        )
    return answer


def is_observation(said: Any) -> bool:
    """Return True for text, or messages with text."""
    return isinstance(said, str) or (isinstance(said, list) and bool(said) and all(map(_is_message, said)))


def _is_message(said: Any) -> bool:
    return isinstance(said, dict) and isinstance(said.get("role"), str) and isinstance(said.get("content"), str)


def _sum(functions: Sequence[Weighted], parts: Sequence[RewardPart]) -> Reward:
    score, components, judged = 0.0, dict[str, float](), False
    for function, part in zip(functions, parts, strict=True):
        if part.score is not None:
            judged = True
            score += function.weight * part.score
            components[function.name] = part.score
            components |= {f"{function.name}/{name}": value for name, value in part.components.items()}
    if not judged:
        raise BadAnswer("No reward function judged the completion: all returned None.")
    return Reward(
        _number(score, "the weighted sum"),
        "invalid" if any(part.invalid for part in parts) else "ok",
        components,
        weight=math.prod(part.weight for part in parts),
        skip=tuple(sorted({span for part in parts for span in part.skip})),
    )


def _adapter(function: Callable[..., Any], place: str) -> Judge:
    given = inspect.signature(function).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in given.values())
    name = named(place)
    wanted = None if open_ended else set(given)
    if {"completions", "completion_ids"} & set(given):
        return lambda job: _ask_trl(function, name, wanted, job)
    if "solution_str" in given:
        return lambda job: [_part(_call(function, wanted, **_verl(job, text)), name) for text in job.completions]
    if {"problem", "completion"} <= set(given):
        return lambda job: [
            _part(_call(function, wanted, problem=job.problem, completion=text), name) for text in job.completions
        ]
    raise ConfigInvalid(
        f"{place} has the parameters ({', '.join(given)}), which are not those of a reward function.",
        hint="Use (prompts, completions, **columns), (data_source, solution_str, ground_truth, extra_info) or "
        "(problem, completion).",
    )


def _ask_trl(function: Callable[..., Any], name: str, wanted: set[str] | None, job: Job) -> list[RewardPart]:
    problem, count = job.problem, len(job.completions)
    chat = not isinstance(problem.prompt, str)
    prompt = problem.prompt if isinstance(problem.prompt, str) else [message._asdict() for message in problem.prompt]
    said: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in job.completions]
    columns: dict[str, Any] = {column: [value] * count for column, value in problem.columns.items()}
    columns = {"answer": [problem.answer] * count} | columns
    columns |= {"prompts": [prompt] * count, "completions": said, "completion_ids": [list(ids) for ids in job.tokens]}
    answers = _call(function, wanted, **columns)
    if not isinstance(answers, Sequence | Mapping) and hasattr(answers, "tolist"):
        answers = answers.tolist()
    if not isinstance(answers, Sequence) or isinstance(answers, str | bytes):
        raise BadAnswer(f"{name} returned {_shown(answers)}, not a list of rewards.")
    return [_part(answer, name) for answer in answers]


def _verl(job: Job, text: str) -> dict[str, Any]:
    columns = job.problem.columns
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": text,
        "ground_truth": columns.get("answer", job.problem.answer),
        "extra_info": columns.get("extra_info", dict(columns)),
    }


def _call(function: Callable[..., Any], wanted: set[str] | None, **arguments: Any) -> Any:
    """Call `function` with the `wanted` arguments, or with all if that is None; return its answer."""
    answer = function(**{name: value for name, value in arguments.items() if wanted is None or name in wanted})
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def _part(answer: Any, name: str) -> RewardPart:
    if answer is None:
        return RewardPart(None)
    if isinstance(answer, Reward):
        if answer.status == "verifier_error":
            raise BadAnswer(f"{name} could not judge: {answer.reason}.")
        parts = {key: _number(value, name) for key, value in answer.components.items()}
        score, invalid = _number(answer.score, name), answer.status == "invalid"
        return RewardPart(score, parts, invalid, _number(answer.weight, f"{name}'s weight"), _spans(answer.skip, name))
    if isinstance(answer, Mapping):
        if "score" not in answer:
            raise BadAnswer(f"{name} returned a dict without a 'score'.")
        numbers = {key: value for key, value in answer.items() if key != "score" and isinstance(value, int | float)}
        return RewardPart(
            _number(answer["score"], name), {str(key): _number(value, name) for key, value in numbers.items()}
        )
    return RewardPart(_number(answer, name))


def _spans(said: Any, name: str) -> Spans:
    try:
        spans = tuple((int(start), int(end)) for start, end in said)
    except (TypeError, ValueError, OverflowError):
        raise BadAnswer(f"{name} skips {_shown(said)}; spans look like ((0, 12), (20, 24)).") from None
    return spans


def unsound(weight: float, skip: Spans, size: int) -> str:
    """Return the error in a reward's weight or spans, for a completion of `size` characters; "" if both are valid."""
    if not 0 <= weight <= limits.WEIGHT_MAX:
        return f"The weight is {str(weight)[:20]}; it must be between 0 and {limits.WEIGHT_MAX:g}."
    if len(skip) > limits.SKIPPED_SPANS_MAX:
        return f"The reward skips {len(skip)} spans; at most {limits.SKIPPED_SPANS_MAX} are allowed."
    outside = next((span for span in skip if not 0 <= span[0] < span[1] <= size), None)
    return "" if outside is None else f"The span {outside} is not within a completion of {size} characters."


def _number(value: Any, name: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadAnswer(f"{name} returned {_shown(value)}, which is not a number.")
    number = float(value)
    if not math.isfinite(number) or abs(number) > SCORE_MAX:
        raise BadAnswer(f"{name} returned {number}; a reward must be finite, and at most {SCORE_MAX:g}.")
    return number


SCORE_MAX = 1e6
"""The largest score: far above any meaningful reward, and small enough for float32's precision."""


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
