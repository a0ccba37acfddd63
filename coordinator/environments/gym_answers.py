"""The built-in reward `reasoning-gym`: the generator's own score of the text in <answer> tags, or of all text.

- Some generators read answers with `eval`, or with sympy's `parse_expr`, which is equally dangerous. Answers are not
  trusted, so such a generator never gets an answer that would run as more than arithmetic: it counts as no answer.
- Some raise an error for an answer that they cannot read. The answer is then invalid, and earns nothing.
- Some take 0.5 s to make a problem: it is made once, not again for each of its completions.
"""

import ast
import inspect
import json
import re
from functools import cache, lru_cache
from typing import Any

from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ModuleNotFoundError as missing:
    raise ConfigInvalid(
        f"Task reasoning-gym needs its library ({missing}).", hint="pip install 'echo-swarm[tasks]'"
    ) from None

_VALUES = (ast.Expression, ast.Constant, ast.Name, ast.expr_context, ast.List, ast.Tuple, ast.Set, ast.Dict)
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
_FUNCTIONS = {
    "Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "factorial", "ln", "log", "sec", "sin", "sinh",
    "sqrt", "tan", "tanh",
}  # fmt: skip


def reward(problem: Problem, completion: str) -> Reward:
    made = problem.columns
    parameters = json.dumps(made["parameters"], sort_keys=True)
    dataset, entry = _entry(made["generator"], made["seed"], made["size"], parameters, made["index"])
    said = _answer_in(completion)
    if not _may_be_read(said, made["generator"]):
        said = ""
    try:
        score = float(dataset.score_answer(said, entry))
    except MemoryError:  # the limit of this process, not a fault of the answer
        raise
    except Exception:  # libraries raise any error for an answer that they cannot read
        return Reward(0.0, "invalid")
    return Reward(score, "ok" if said else "invalid")


def _answer_in(completion: str) -> str:
    """Return the text in the last tags, or all of it; one pass, however many tags are open."""
    before, closed, _ = completion.rpartition("</answer>")
    _, opened, tagged = before.rpartition("<answer>")
    return (tagged if closed and opened else completion).strip()


@cache
def readers(name: str) -> frozenset[str]:
    """Return the functions with which a generator evaluates answers, found in its source."""
    source = inspect.getsource(DATASETS[name][0].score_answer)
    return frozenset(re.findall(r"\b(eval|parse_expr)\(", source))


def _may_be_read(said: str, generator: str) -> bool:
    """Return True if the generator runs only arithmetic when it reads this answer.

    `eval` cannot run text that Python cannot compile; but `parse_expr` converts other text, and strings, to Python.
    """
    if not readers(generator):
        return True
    into_python = "parse_expr" in readers(generator)
    try:
        nodes = list(ast.walk(ast.parse(said, mode="eval")))
    except (SyntaxError, ValueError):
        return not into_python
    except (RecursionError, MemoryError):  # nested too deeply to be checked, but perhaps not to be run
        return False
    return all(_is_harmless(node) for node in nodes) and not (into_python and any(map(_is_string, nodes)))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    return isinstance(node, _VALUES + _ARITHMETIC)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


@lru_cache(maxsize=16)
def _dataset(name: str, seed: int, size: int, parameters: str) -> Any:
    return open_dataset(name, seed, size, json.loads(parameters))


@lru_cache(maxsize=16)
def _entry(name: str, seed: int, size: int, parameters: str, index: int) -> tuple[Any, Any]:
    dataset = _dataset(name, seed, size, parameters)
    return dataset, dataset[index]


def open_dataset(name: str, seed: int, size: int, parameters: dict[str, Any]) -> Any:
    """Return a generator of reasoning-gym; it makes the same problems for the same arguments."""
    if name not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ConfigInvalid(
            f"reasoning-gym has no generator {name!r}.", hint=f"Set task.parameters.generator to one of: {known}."
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **parameters)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigInvalid(f"Generator {name} refuses its parameters: {error}.") from error
