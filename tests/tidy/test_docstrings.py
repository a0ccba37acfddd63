"""First words of docstrings: a noun or a verb, so that each names its subject without the code above it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.repository import python_files, report, tree

PRONOUNS = "he her here his i it its my our she that their there these they this those we you your"
PREPOSITIONS = (
    "above after against among around as at before behind below beside between beyond by during for from in inside "
    "into like near of off on onto out outside over per since than through till to toward towards under until unlike "
    "up upon while with within without"
)
QUESTIONS = "how if what whatever when whenever where wherever whether which who whoever whom whose why"
REFUSED = frozenset(f"{PRONOUNS} {PREPOSITIONS} {QUESTIONS}".split())
"""Words that refer to something else: the reader would have to look for it."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each docstring with its line: of modules, classes and functions, and of the values above a string."""
    for node in ast.walk(module):
        if not isinstance(node, Documented):
            continue
        for before, said in zip([None, *node.body], node.body, strict=False):
            may_be_documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if may_be_documented and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                value = said.value.value
                if isinstance(value, str):
                    yield said.lineno, value.strip()


def mistake_in(said: str) -> str:
    """Return the first words of a docstring if it may not begin with them; empty if it may."""
    first, _, rest = said.partition(" ")
    if first.strip(",.:;").lower() in REFUSED:
        return first
    return "The same" if first == "The" and rest.partition(" ")[0].strip(",.:;") == "same" else ""


def mistakes(path: Path) -> list[str]:
    """Return the docstrings of a file that begin with a refused word."""
    found = ((line, mistake_in(said)) for line, said in docstrings(tree(path)))
    return [
        f"{path}:{line}: a docstring begins with {first!r}; begin with its subject" for line, first in found if first
    ]


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ("It is the limit.", "It"),
        ("In bytes.", "In"),
        ("What is kept.", "What"),
        ("The same, as a list.", "The same"),
        ("For each, its number.", "For"),
        ("Return the limit.", ""),
        ("The samples of a group.", ""),
        ("Items that wait.", ""),
    ],
)
def test_a_first_word_that_refers_to_something_else_is_found(said: str, first: str) -> None:
    assert mistake_in(said) == first


def test_docstrings_of_values_and_of_everything_else_are_read() -> None:
    module = ast.parse(
        '"""A."""\nX = 1\n"""B."""\nclass C:\n    """D."""\n    y: int\n    """E."""\n\ndef f():\n    "F."\n'
    )
    assert sorted(said for _, said in docstrings(module)) == ["A.", "B.", "D.", "E.", "F."]


def test_every_docstring_begins_with_its_subject() -> None:
    report([mistake for path in python_files() for mistake in mistakes(path)])
