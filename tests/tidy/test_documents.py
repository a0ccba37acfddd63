"""The documents tell the truth: the README's commands, the module tree, the command reference, the links.

- `make tree` has a purpose for every folder and module that it prints.
- Every command's `--help` ends in an example, which its parser takes, and in what comes next.
- The tests that `tests.adversaries.outsiders` names exist and run with `make test`.
- A link's anchor is a heading of the document that it leads to.
- docs/tasks.md names every built-in reward.
- Every command of both programs that is not hidden stands in docs/reference/commands.md.
"""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from typing import Any

from coordinator.tasks.reward_functions import BUILT_IN
from tests.adversaries.outsiders import OUTSIDERS
from tests.tidy.module_tree import entries, lines
from tests.tidy.reference import PROGRAMS, commands_of
from tests.tidy.repository import ROOT, files, python_files, report, text, tree

README = Path("README.md")
COMMANDS = Path("docs/reference/commands.md")
ANY_SHELL = {"cd", "git", "export", "source"}
FENCED = re.DOTALL | re.MULTILINE


def test_every_line_of_the_module_tree_says_what_it_is_for() -> None:
    listed = dict(entries())
    report([f"{name}: its docstring is missing" for name, purpose in listed.items() if not purpose])
    assert {"protocol/", "protocol/errors.py", "coordinator/learner/", "bench/harness.py", "docs/"} <= listed.keys()


def test_the_module_tree_is_searched_by_path_and_purpose() -> None:
    found = list(lines("LEADERBOARD"))
    assert any(line.startswith("coordinator/pages/board.py ") for line in found)
    assert all("leaderboard" in line.casefold() for line in found)
    assert len(found) < len(list(lines())) / 10


def test_every_command_that_is_not_hidden_has_a_heading_in_the_reference() -> None:
    real = {name for one in PROGRAMS for name, command in commands_of(one).items() if not command.hidden}
    said = set(re.findall(r"^### `(.+)`$", text(COMMANDS), re.MULTILINE))
    report([f"{COMMANDS}: {name}: run `make reference`" for name in sorted(real ^ said)])


def test_the_page_of_tasks_names_every_built_in_reward() -> None:
    page = Path("docs/tasks.md")
    report([f"{page}: the built-in rewards lack `{name}`" for name in BUILT_IN if f"`{name}`" not in text(page)])


def test_no_help_shows_a_default_that_only_python_understands() -> None:
    """A default that is made anew for each call is told as the name of its class."""
    wrong = [
        f"{name}: {option.opts[-1]} has the default {option.default}"
        for program in PROGRAMS
        for name, command in commands_of(program).items()
        for option in command.params
        if callable(option.default) and option.show_default
    ]
    report(wrong)


def test_every_help_ends_in_an_example_that_parses_and_in_the_next_step() -> None:
    problems = []
    for program in PROGRAMS:
        for name, command in commands_of(program).items():
            if command.hidden:
                continue
            said = dict(part.split(": ", 1) for part in (command.epilog or "").split("\n\n") if ": " in part)
            if missing := {"Example", "Then"} - said.keys():
                problems.append(f"{name}: --help has no {' and no '.join(sorted(missing))}")
            elif not said["Example"].startswith(f"{name}"):
                problems.append(f"{name}: the example is of something else: {said['Example']}")
            else:
                problems += [f"{name}: {problem}" for problem in mistakes(command, name, said["Example"])]
    report(problems)


def mistakes(command: Any, name: str, example: str) -> list[str]:
    """Return what the command's own parser does not like about a line that is typed, files apart."""
    typed = shlex.split(example.removeprefix(name))
    context = command.make_context(name, [], resilient_parsing=True)
    try:
        given, rest, _ = command.make_parser(context).parse_args(typed)
    except Exception as error:  # whatever the parser raises, the example is wrong
        return [f"{example}: {error}"]
    wanted = [one.name for one in command.params if one.required and given.get(one.name) in (None, ())]
    return [f"{example}: nothing takes {rest}"] * bool(rest) + [f"{example}: {one} is missing" for one in wanted]


def make_targets() -> set[str]:
    """Return what `make` knows by name; a bench counts if its file exists."""
    named = set(re.findall(r"^([a-z][a-z-]*):", text(Path("Makefile")), re.MULTILINE))
    modules = python_files("bench")
    benches = {path.stem for path in modules if len(path.parts) == 2} - {"__init__", "harness"}
    benches |= {path.parts[1] for path in modules if path.name == "__main__.py"}
    return named | {f"bench-{name.replace('_', '-')}" for name in benches}


def shell_lines(document: Path) -> Iterator[str]:
    """The commands in the fenced shell blocks of a document."""
    for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text(document), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip().removeprefix("$ ")


def what_is_wrong_with(line: str) -> str:
    """Return why a command line would not run here, or nothing."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    program = Path(words[0]).name if words else ""
    if program == "make":
        unknown = {word for word in words[1:] if not word.startswith("-")} - make_targets()
        return f"no make target {', '.join(sorted(unknown))}" if unknown else ""
    if program == "sh":
        return "" if Path(words[1]) in files() else f"there is no script {words[1]}"
    if program in PROGRAMS:
        known = commands_of(program)
        named = [" ".join([program, *words[1:count]]) for count in range(1, len(words) + 1)]
        return "" if known.keys() & set(named) else f"{program} has no such command"
    return "" if not program or program in ANY_SHELL else f"what is {program}?"


def test_the_commands_in_readme_and_contributing_exist() -> None:
    lines = [(document, line) for document in (README, Path("CONTRIBUTING.md")) for line in shell_lines(document)]
    wrong = [f"{document}: {line}: {what}" for document, line in lines if (what := what_is_wrong_with(line))]
    files_named = [(document, word) for document, line in lines for word in line.split() if word.endswith(".toml")]
    wrong += [f"{document}: {word} does not exist" for document, word in files_named if Path(word) not in files()]
    report(wrong)
    assert any(document == README for document, _ in lines), "README.md shows no command to run"


def documents() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def test_links_between_documents_lead_somewhere() -> None:
    problems = []
    for path in documents():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text(path)):
            if "://" not in target and not target.startswith("mailto:") and not (ROOT / path.parent / target).exists():
                problems.append(f"{path}: {target}")
    report(problems)


def test_the_tutorial_says_how_to_get_a_real_model_without_a_hub() -> None:
    said = text(Path("docs/tutorial.md")).partition("### Without a model hub")[2].partition("\n### ")[0]
    (target,) = re.findall(r"`make (\S*/\.installed)`", said)
    (package,) = re.findall(r"package `([\w-]+)`", said)
    makefile = text(Path("Makefile")).replace("$(REAL)", ".venv-real")
    assert f"\n{target}:" in makefile
    assert package in makefile
    assert f'"{package}==' in text(Path("pyproject.toml"))


def anchors(document: str) -> set[str]:
    """Return the names that a reader's browser gives to the headings of a document; a repeated one is numbered."""
    found: Counter[str] = Counter()
    named = set()
    prose = re.sub(r"^ *```.*?^ *```", "", document, flags=FENCED)
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        named.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return named


def test_anchors_of_links_are_headings() -> None:
    problems = []
    for path in documents():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text(path)):
            led_to = Path(normpath(path.parent / target)) if target else path
            if "://" not in target and led_to.suffix == ".md" and anchor not in anchors(text(led_to)):
                problems.append(f"{path}: {led_to} has no heading #{anchor}")
    report(problems)


def what_runs_in(path: Path) -> set[str]:
    """The tests of a module or of its classes, but for those that are skipped."""
    found = (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in found if not any("skip" in ast.unparse(mark) for mark in node.decorator_list)}


def test_every_test_that_plays_an_attack_exists() -> None:
    problems = []
    for attack, named in ((one.attack, one.tests) for one in OUTSIDERS):
        for path, tests in named.items():
            there = what_runs_in(Path(path))
            problems += [f"{attack}: {path} has no {test}" for test in tests if test.split("::")[-1] not in there]
            problems += [f"{attack}: `make test` does not run {path}"] * path.startswith("tests/vllm/")
    names = [one.name for one in OUTSIDERS]
    problems += [f"{name} is the name of two attacks" for name in set(names) if names.count(name) > 1]
    report([f"tests/adversaries/outsiders.py: {problem}" for problem in problems])
