"""The reference pages are what the code says, and the glossary is complete in itself."""

import re
from pathlib import Path
from typing import get_args

from coordinator.config import manual
from ledger.book import ClaimState
from protocol.policy import trust
from protocol.work.auditing import Found
from protocol.work.lease import LeaseState
from swarm_node.coordinator_api import origin
from swarm_node.ledger import log_watch
from tests.tidy import message_reference, reference
from tests.tidy.repository import ROOMS, ROOT, files, python_files, report, text

CONTRIBUTING = Path("CONTRIBUTING.md")


def test_the_reference_pages_are_what_the_code_says() -> None:
    wrong = [f"{path}: run `make reference`" for path, page in reference.pages().items() if text(path) != page]
    report(wrong)


def test_hints_in_constants_are_listed_with_their_errors() -> None:
    found = reference.hints()
    assert origin.CHECK in found["Unreachable"]
    assert trust.FROZEN in found["MetadataExpired"], "an imported constant"
    assert log_watch.TELL.format("…") in found["LedgerForked"], "a template"


def test_no_page_of_the_reference_is_left_from_before() -> None:
    known = reference.pages().keys()
    report(
        [
            f"{path}: nothing writes it"
            for path in files()
            if path.parts[:2] == ("docs", "reference") and path not in known
        ]
    )


def test_every_field_of_a_message_has_a_type() -> None:
    fields = [(model, *row) for model in message_reference.all_messages() for row in message_reference.rows(model)]
    report([f"{model.__name__}: {name} has no type" for model, name, said in fields if not re.match(r"[`\[\w]", said)])


def test_every_setting_is_read() -> None:
    code = "\n".join(text(path) for path in python_files("coordinator"))
    unread = [key.path for key in manual.every() if not re.search(rf"\.{key.name}\b", code)]
    report([f"{path}: nothing in coordinator/ reads this setting" for path in unread])


def test_every_option_has_a_help_text() -> None:
    commands = {name: one for program in reference.PROGRAMS for name, one in reference.commands_of(program).items()}
    options = [(name, option) for name, command in commands.items() for option in command.params]
    report([f"{name}: {option.opts[-1]} has no help text" for name, option in options if not option.help])


def test_the_glossary_is_alphabetical_and_every_term_is_there_once() -> None:
    listed = re.findall(r"^- \*\*(.+?)\*\*: ", text(Path("protocol/__init__.py")), re.MULTILINE)
    report([f"protocol/__init__.py: {term} stands twice" for term in sorted(set(listed)) if listed.count(term) > 1])
    assert listed == sorted(listed, key=str.casefold), "the glossary in protocol/__init__.py is not alphabetical"
    assert len(listed) == len(reference.glossary())


def test_settings_states_and_findings_are_called_by_words_of_the_glossary() -> None:
    words = {*manual.sections(), *LeaseState, *ClaimState, *get_args(Found)} - {ClaimState.ABSENT}
    missing = sorted(words - {term for word in reference.glossary() for term in (word, f"{word}s")})
    report([f"protocol/__init__.py: the glossary lacks {word}" for word in missing])


def test_every_path_and_name_that_pages_for_contributors_have_exists() -> None:
    code = "\n".join(
        text(path) for path in files() if path.parts[0] in (*ROOMS, "tests") and path.suffix in (".py", ".js")
    )
    for document in (CONTRIBUTING, Path("docs/recipes.md"), Path("docs/concepts.md")):
        paths = set(re.findall(r"`([a-z_]+/[\w./*-]*)`", text(document)))
        assert paths, f"{document} names no path"
        wrong = [name for name in paths if not any([*ROOT.glob(name), *ROOT.glob(f"coordinator/{name}")])]
        names = set(re.findall(r"`([A-Z]\w+)`", text(document)))
        wrong += [name for name in names if not re.search(rf"\b{name}\b", code)]
        report([f"{document}: {name} does not exist" for name in sorted(wrong)])


def test_contributing_names_every_package() -> None:
    packages = {path.parts[:2] for path in python_files("coordinator", "swarm_node") if len(path.parts) > 2}
    said = text(CONTRIBUTING)
    missing = [name for top, name in sorted(packages) if f"`{name}`" not in said and f"`{top}/{name}/`" not in said]
    report([f"{CONTRIBUTING}: {name} is missing" for name in missing])
