"""docs/protocol.md and docs/ledger.md name every message, and give messages the fields that they have.

- A message stands there as `Name`, or as `Name {field, field: what it is, …}` with its name and the brace on one line.
- An entry of the ledger or a statement of an owner stands on a line of its own: its kind, and the other fields.
- Every message stands in one of them, except fields of others, and those that only the operator's programs send.
- The generation of the protocol stands there, and grows when the fields of these messages change.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from protocol.wire import generation
from protocol.work.messages import Reason
from tests.tidy.message_reference import all_messages, rows
from tests.tidy.repository import report, text

PAGES = (Path("docs/protocol.md"), Path("docs/ledger.md"))
OPERATORS = ("protocol.work.learning", "protocol.work.auditing")
"""Modules with messages of the operator's programs; some of these messages others read, too."""

FIELDS_OF_GENERATION = "8: 6f65e28b4fe15d25"
"""The current generation, and a digest of the fields, types and bounds that messages have in it."""

MESSAGE, KIND = re.compile(r"\b([A-Z][A-Za-z]+) +\{"), re.compile(r"^    ([a-z_]+) +\{", re.MULTILINE)
NAME, TYPE = re.compile(r"`([A-Z][A-Za-z]+)\b"), re.compile(r"\[([A-Za-z]+)\]\(#")

Fields = frozenset[str]


@pytest.fixture(scope="module")
def real() -> dict[str, set[Fields]]:
    """Messages by their names and by their kinds: the fields of each."""
    found = defaultdict(set)
    for model in all_messages():
        names = frozenset(model.model_fields)
        found[model.__name__].add(names)
        if "kind" in names and isinstance(kind := model.model_fields["kind"].default, str):
            found[kind].add(names - {"kind"})
    return dict(found)


def written(where: re.Pattern[str]) -> list[tuple[str, Fields]]:
    """Return what stands in the pages: the names that a pattern finds before a brace, and the fields within."""
    document = "\n".join(map(text, PAGES))
    return [(match[1], frozenset(names_from(document[match.end() :]))) for match in where.finditer(document)]


def names_from(rest: str) -> Iterator[str]:
    """The names that stand between a brace and the end of what it opens, but for those within further brackets."""
    depth, word = 0, ""
    for sign in rest:
        if depth == 0 and sign in ",}":
            if name := word.partition(":")[0].strip().removesuffix("|nil"):
                yield name
            word = ""
            if sign == "}":
                return
            continue
        depth += (sign in "{[") - (sign in "}]")
        word += sign
    raise AssertionError(f"a brace is not closed: {rest[:80]}")


@pytest.mark.parametrize(
    ("where", "at_least"),
    [(MESSAGE, 15), (KIND, 19)],
    ids=["messages", "kinds"],
)
def test_the_protocol_document_gives_messages_their_fields(
    real: dict[str, set[Fields]], where: re.Pattern[str], at_least: int
) -> None:
    found = written(where)
    assert len(found) >= at_least, f"only {len(found)} messages were found"
    wrong = [(name, said, real.get(name, set())) for name, said in found if said not in real.get(name, set())]
    report(
        [f"docs/protocol.md or docs/ledger.md: {name} {{…}} {mistake(said, fields)}" for name, said, fields in wrong]
    )


def mistake(said: Fields, known: set[Fields]) -> str:
    """Return how fields of the documents differ from those of the nearest message of this name."""
    nearest = min(known, key=lambda fields: len(said ^ fields), default=None)
    if nearest is None:
        return "is no message"
    return f"lacks {sorted(nearest - said)} and has unknown {sorted(said - nearest)}"


def test_every_message_of_a_node_or_a_reader_stands_in_the_documents() -> None:
    """The reference has no meanings."""
    written_names = {name for where in (MESSAGE, KIND) for name, _ in written(where)}
    written_names |= {match[1] for page in PAGES for match in NAME.finditer(text(page))}
    written_names |= {name for model in all_messages() for _, kind in rows(model) for name in TYPE.findall(kind)}
    names = {
        model.__name__: {model.__name__, getattr(model.model_fields.get("kind"), "default", None)}
        for model in all_messages()
        if model.__module__ not in OPERATORS
    }
    report([f"{name} does not stand in {PAGES}" for name, known in names.items() if not known & written_names])


def test_messages_whose_fields_changed_have_a_new_generation() -> None:
    """Readers of the old and of the new fields reject each other's messages."""
    models = [model for model in all_messages() if model.__module__ not in OPERATORS]
    fields = sorted((model.__name__, rows(model)) for model in models)
    now = f"{generation.CURRENT}: {hashlib.sha256(repr(fields).encode()).hexdigest()[:16]}"
    assert now == FIELDS_OF_GENERATION, (
        "The fields, types or bounds of messages changed. If nodes send or read the message, raise CURRENT in "
        f"protocol/wire/generation.py. Then write {now!r} to FIELDS_OF_GENERATION in this file."
    )


def test_the_protocol_document_has_every_reason_for_no_work() -> None:
    table = text(PAGES[0]).partition("| reason | meaning |")[2].partition("\n\n")[0]
    said = {reason for row in table.splitlines() for reason in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert {"", *said} == set(get_args(Reason)), f"{PAGES[0]}: the table of reasons for no work differs"


def test_the_protocol_document_names_the_current_generation() -> None:
    named = re.findall(r"`generation` is (\d+)", text(PAGES[0]))
    assert named == [str(generation.CURRENT)], f"{PAGES[0]}: `generation` should be {generation.CURRENT}"
