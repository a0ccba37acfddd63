"""Reward functions behind one form, whatever their signature: the child's side, which runs the operator's code.

Three signatures are known by the names of their parameters:

    TRL    fn(prompts, completions, completion_ids, **columns) -> [float or None for each]
    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> float, or dict with "score"
    ours   fn(problem, completion) -> float, None, or protocol.tasks.Reward

- A function gets what it names; one with `**anything` gets all. Chat prompts and their completions come as
  lists of messages, as TRL gives them.
- A function of any signature may give a `protocol.tasks.Reward` in place of a number. It says what of the completion is
  not trained on, and with which weight the rest is: of several functions, spans come together and weights multiply.
- None says that the reward has nothing to say of a completion. A completion of which none has is no zero: it fails.
- An answer of the wrong length, NaN, infinite or no number fails, too: `BadAnswer` says what came.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward, Spans

BUILT_IN = {
    "exact": "coordinator.tasks.reward_exact:reward",
    "math": "coordinator.tasks.reward_math:reward",
    "reasoning-gym": "coordinator.tasks.reward_gym:reward",
}
"""Shipped rewards by their short names."""


class BadAnswer(Exception):
    """A reward function gave something that is no reward."""


class Job(NamedTuple):
    """What is to be judged: some completions of one problem."""

    problem: Problem
    completions: Sequence[str]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class RewardPart:
    """What one function says of one completion; None if it has nothing to say."""

    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    invalid: bool = False
    weight: float = 1.0
    skip: Spans = ()


Judge = Callable[[Job], list[RewardPart]]


class Weighted(NamedTuple):
    """A function, under which name its part is shown, and how much that counts."""

    name: str
    weight: float
    judge: Judge


def named(place: str) -> str:
    """What a reward's part is called: its own name, without where it stands."""
    return place.rpartition(":")[2]


def load(place: str, weight: float = 1.0) -> Weighted:
    """The function at `file.py:name`, at `package.module:name`, or built in."""
    where, _, name = BUILT_IN.get(place, place).rpartition(":")
    if not where:
        known = ", ".join(BUILT_IN)
        raise ConfigInvalid(f"There is no reward {place!r}.", hint=f"Write file.py:function, or one of {known}.")
    found = getattr(module(where), name, None)
    if not callable(found):
        raise ConfigInvalid(f"{where} has no function {name!r}.")
    return Weighted(named(place), weight, _adapter(found, place))


def module(where: str) -> ModuleType:
    """A module by its file or its dotted name; what stands beside a file can be imported by it."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigInvalid(f"There is no file {where}.", hint="Paths are those of where the command was started.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    made = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, made)
    spec.loader.exec_module(made)
    return made


def judge(functions: Sequence[Weighted], job: Job) -> list[Reward]:
    """The weighted sum of what the functions say of each completion."""
    said = []
    for function in functions:
        parts = function.judge(job)
        if len(parts) != len(job.completions):
            raise BadAnswer(f"{function.name} gave {len(parts)} rewards for {len(job.completions)} completions.")
        said.append(parts)
    rewards = [_sum(functions, parts) for parts in zip(*said, strict=True)]
    for reward, text in zip(rewards, job.completions, strict=True):
        if trouble := unsound(reward.weight, reward.skip, len(text)):
            raise BadAnswer(trouble)
    return rewards


def _sum(functions: Sequence[Weighted], parts: Sequence[RewardPart]) -> Reward:
    score, components, judged = 0.0, dict[str, float](), False
    for function, part in zip(functions, parts, strict=True):
        if part.score is not None:
            judged = True
            score += function.weight * part.score
            components[function.name] = part.score
            components |= {f"{function.name}/{name}": value for name, value in part.components.items()}
    if not judged:
        raise BadAnswer("No reward function had anything to say of a completion.")
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
        f"{place} takes ({', '.join(given)}), which is no signature of a reward.",
        hint="Take (prompts, completions, **columns), (data_source, solution_str, ground_truth, extra_info) or "
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
        raise BadAnswer(f"{name} gave {_shown(answers)}, not a list of rewards.")
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
    """What it says of those arguments that it wants; None: of all."""
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
            raise BadAnswer(f"{name} gave a dict without a 'score'.")
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
    """What is wrong with how a completion of this size is to be learned from; nothing if all is well."""
    if not 0 <= weight <= limits.WEIGHT_MAX:
        return f"A weight of {str(weight)[:20]} was given; weights lie between 0 and {limits.WEIGHT_MAX:g}."
    if len(skip) > limits.SKIPPED_SPANS_MAX:
        return f"{len(skip)} spans are to be skipped; {limits.SKIPPED_SPANS_MAX} are allowed."
    outside = next((span for span in skip if not 0 <= span[0] < span[1] <= size), None)
    return "" if outside is None else f"The span {outside} is not within a completion of {size} characters."


def _number(value: Any, name: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadAnswer(f"{name} gave {_shown(value)}, which is no number.")
    number = float(value)
    if not math.isfinite(number) or abs(number) > SCORE_MAX:
        raise BadAnswer(f"{name} gave {number}; a reward is finite, and no larger than {SCORE_MAX:g}.")
    return number


SCORE_MAX = 1e6
"""Far above any reward that means something, and far below what float32 rounds to nonsense."""


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
