"""The documents tell the truth: the README's commands, the module tree, the command reference, the links.

- `make tree` has a purpose for every folder and module that it prints.
- docs/protocol.md lists every error: between `<!-- errors -->` and its end those of `protocol.errors.ERRORS`, between
  `<!-- local errors -->` and its end those that never cross the wire.
- Every command's `--help` ends in an example, which its parser takes, and in what comes next.
- The last table of docs/adversaries.md is `tests.adversaries.outsiders`, whose tests exist and run with `make test`.
- docs/commands.md gives every command a heading like ``### `swarm-node join` `` and, below it, names its options.
"""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import typer.main

from protocol.errors import ERRORS, SwarmError
from tests.adversaries.outsiders import OUTSIDERS
from tests.tidy.module_tree import entries
from tests.tidy.repository import ROOMS, ROOT, files, python_files, report, text, tree

README = Path("README.md")
COMMANDS = Path("docs/commands.md")
PROTOCOL = Path("docs/protocol.md")
ADVERSARIES = Path("docs/adversaries.md")
PROGRAMS = {"swarm-coordinator": "coordinator.cli", "swarm-node": "swarm_node.cli"}
ANY_SHELL = {"cd", "git", "export", "source"}


def test_every_line_of_the_module_tree_says_what_it_is_for() -> None:
    listed = dict(entries())
    report([f"{name}: its docstring is missing" for name, purpose in listed.items() if not purpose])
    assert {"protocol/", "protocol/errors.py", "coordinator/learner/", "bench/harness.py", "docs/"} <= listed.keys()


def commands_of(program: str) -> dict[str, Any]:
    """Every command of a program, hidden ones too: full name → what typer made of it."""
    module = importlib.import_module(PROGRAMS[program])
    apps = [value for value in vars(module).values() if isinstance(value, typer.Typer)]
    assert apps, f"{module.__name__} holds no typer.Typer"
    named = getattr(module, "app", apps[0])
    return dict(walk(program, typer.main.get_command(named)))


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a command and its groups."""
    children: Mapping[str, Any] | None = getattr(command, "commands", None)
    if children is None:
        yield name, command
    else:
        for child, below in children.items():
            yield from walk(f"{name} {child}", below)


def options_of(command: Any) -> set[str]:
    """The long names of a command's options, `--no-` forms included."""
    names = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    return {name for name in names if name.startswith("--")} - {"--help"}


def documented_commands() -> dict[str, str]:
    """Every command that docs/commands.md gives a heading, and the text below it."""
    parts = re.split(rf"^#+ `?((?:{'|'.join(PROGRAMS)})(?: [a-z][a-z-]*)*).*$", text(COMMANDS), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_and_option_is_documented_and_every_documented_one_exists() -> None:
    real = {name: command for program in PROGRAMS for name, command in commands_of(program).items()}
    groups = {" ".join(words) for name in real for words in prefixes(name.split())}
    documented = documented_commands()
    problems = [f"{name}: has no heading" for name in real if name not in documented]
    problems += [f"{name}: no such command" for name in documented if name not in real and name not in groups]
    for name in real.keys() & documented.keys():
        said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", documented[name])) - {"--help"}
        problems += [f"{name}: {option} is not explained" for option in sorted(options_of(real[name]) - said)]
        problems += [f"{name}: {option} does not exist" for option in sorted(said - options_of(real[name]))]
    report([f"{COMMANDS}: {problem}" for problem in problems])


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
    """What the command's own parser does not like about a line that is typed, files apart."""
    typed = shlex.split(example.removeprefix(name))
    context = command.make_context(name, [], resilient_parsing=True)
    try:
        given, rest, _ = command.make_parser(context).parse_args(typed)
    except Exception as error:  # whatever the parser raises, the example is wrong
        return [f"{example}: {error}"]
    wanted = [one.name for one in command.params if one.required and given.get(one.name) in (None, ())]
    return [f"{example}: nothing takes {rest}"] * bool(rest) + [f"{example}: {one} is missing" for one in wanted]


def prefixes(words: list[str]) -> Iterator[list[str]]:
    """Every proper beginning of a list."""
    yield from (words[:count] for count in range(1, len(words)))


def make_targets() -> set[str]:
    """What `make` knows by name; a bench counts if its file exists."""
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
    """Why a command line would not run here, or nothing."""
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


def test_links_between_documents_lead_somewhere() -> None:
    problems = []
    for path in (path for path in files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text(path)):
            if "://" not in target and not target.startswith("mailto:") and not (ROOT / path.parent / target).exists():
                problems.append(f"{path}: {target}")
    report(problems)


def errors_below(base: type[SwarmError]) -> Iterator[type[SwarmError]]:
    """An error and every special case of it."""
    yield base
    for child in base.__subclasses__():
        yield from errors_below(child)


def rows_between(marks: str) -> list[str]:
    """The rows of a table in docs/protocol.md."""
    block = re.search(rf"<!-- {marks} -->\n(.*?)<!-- /{marks} -->", text(PROTOCOL), re.DOTALL)
    assert block, f"{PROTOCOL}: no table between <!-- {marks} --> and <!-- /{marks} -->"
    return block[1].splitlines()


def test_every_error_stands_in_the_protocol_document() -> None:
    with_codes = (path for path in python_files(*ROOMS) if re.search(r"^    code\b.* = ", text(path), re.MULTILINE))
    for path in with_codes:
        importlib.import_module(".".join(path.with_suffix("").parts))
    ours = [error for error in errors_below(SwarmError) if error.__module__.partition(".")[0] in ROOMS]
    wire = [f"| `{e.code}` | {e.http_status} | {e.fault} | {e.__doc__} |" for e in ERRORS.values()]
    local = [f"| `{e.code}` | {e.fault} | {e.__doc__} |" for e in ours if e not in ERRORS.values()]
    problems = []
    for marks, real in (("errors", wire), ("local errors", local)):
        said = rows_between(marks)
        problems += [f"not there: {row}" for row in real if row not in said]
        problems += [f"no such error: {row}" for row in said if row not in real]
    report([f"{PROTOCOL}: {problem}" for problem in problems])


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


def test_the_document_names_the_tests_that_play_attacks() -> None:
    said = re.findall(r"^\| .+? \| `tests/.+ \|$", text(ADVERSARIES), re.MULTILINE)
    real = [f"| {one.attack} | {one.played_by} |" for one in OUTSIDERS]
    problems = [f"not there: {row}" for row in real if row not in said]
    problems += [f"not in tests/adversaries/outsiders.py: {row}" for row in said if row not in real]
    report([f"{ADVERSARIES}: {problem}" for problem in problems])
