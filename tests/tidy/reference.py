"""`make reference`: the reference pages, made from the code that they describe.

- docs/reference/commands.md: every command of all programs, as its `--help` describes it.
- docs/reference/settings.md: every key of a round's file, from the models in `coordinator.config`.
- docs/reference/errors.md: every error code with its hints, and every reason for a refusal that has no error.
- docs/reference/metrics.md: every metric of `/metrics`, and every figure of an update.
- docs/reference/messages.md: the fields of every message, from the models in `protocol` and `ledger`.
- docs/reference/states.md: the states of leases, groups and rollouts, from their transition tables.
- docs/glossary.md: the glossary in the docstring of `protocol`.
- The pages depend on nothing but the code: no terminal, no environment variable, no home folder, no clock.
"""

import ast
import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer
import typer.main
from aiohttp import web

import protocol
from coordinator.api import public as answers
from coordinator.config import manual
from coordinator.config.fixed import FIXED
from coordinator.pages import metric_words
from coordinator.reports import metrics
from coordinator.rules import selection
from coordinator.rules.lifecycle import GROUP_MOVES, ROLLOUT_MOVES
from protocol.errors import ERRORS, SwarmError
from protocol.work import messages
from protocol.work.lease import TRANSITIONS, LeaseState
from swarm_node.commands.options import DEFAULT_HOME
from tests.tidy import message_reference
from tests.tidy.repository import ROOMS, ROOT, python_files, text, tree

PROGRAMS = {
    "swarm-node": "swarm_node.cli",
    "swarm-coordinator": "coordinator.cli",
    "echo-swarm-tinker": "echo_swarm.tinker.__main__",
}
NOTE = "<!-- Written by `make reference` from the code. Do not edit this page. -->"
EXTRAS = re.compile(r"^(.*?)\s*\[((?:[^\[\]]|\[[^\[\]]*\])*)\]$", re.DOTALL)
"""A help text and what typer adds to it: default, bounds and environment variable."""


def pages() -> dict[Path, str]:
    """Return the text of every page by its path."""
    folder = Path("docs/reference")
    return {
        folder / "commands.md": "\n".join(commands_page()) + "\n",
        folder / "settings.md": "\n".join(settings_page()) + "\n",
        folder / "errors.md": "\n".join(errors_page()) + "\n",
        folder / "metrics.md": "\n".join(metrics_page()) + "\n",
        folder / "messages.md": "\n".join(messages_page()) + "\n",
        folder / "states.md": "\n".join(states_page()) + "\n",
        Path("docs/glossary.md"): "\n".join(glossary_page()) + "\n",
    }


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table whose first row is its heading."""
    for count, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in row) + " |"
        if not count:
            yield "|" + "---|" * len(row)


def code(value: str) -> str:
    """Return a value as code, and an empty one as nothing."""
    return f"`{value}`" if value else ""


def program(name: str) -> Any:
    """Return what typer made of a program."""
    return typer.main.get_command(importlib.import_module(PROGRAMS[name]).app)


def commands_of(name: str) -> dict[str, Any]:
    """Return every command of a program by its full name, hidden commands too."""
    return dict(walk(name, program(name)))


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a command and its groups."""
    children: Mapping[str, Any] | None = getattr(command, "commands", None)
    if children is None:
        yield name, command
    else:
        for child, below in children.items():
            yield from walk(f"{name} {child}", below)


def commands_page() -> Iterator[str]:
    """Yield the lines of the page of commands."""
    yield from ("# Commands", "", NOTE, "")
    yield "`swarm-node` is for node owners, `swarm-coordinator` for operators, `echo-swarm-tinker` for trainers."
    yield "`--help` prints the same text."
    yield "An error is one line on stderr that ends in its code in brackets: see [errors](errors.md)."
    for name in PROGRAMS:
        root = program(name)
        yield from ("", f"## {name}", "", root.help or "", "")
        yield from options_table(name, root)
        for full, command in sorted(commands_of(name).items()):
            if not command.hidden:
                yield from ("", f"### `{full}`", "")
                yield from command_lines(full, command)


def command_lines(name: str, command: Any) -> Iterator[str]:
    """Yield the usage, the help, the options and the example of one command."""
    arguments = [param for param in command.params if not param.opts[0].startswith("-")]
    words = [one.metavar or one.name.upper() for one in arguments]
    shown = [word if one.required else f"[{word}]" for one, word in zip(arguments, words, strict=True)]
    yield f"    {' '.join([name, '[OPTIONS]', *shown])}"
    for paragraph in (command.help or "").split("\n\n"):
        yield ""
        verbatim = paragraph.startswith("\b\n")
        lines = [line.rstrip() for line in paragraph.removeprefix("\b\n").splitlines()]
        yield from (f"    {line}" for line in lines) if verbatim else lines
    if command.params:
        yield ""
        yield from options_table(name, command)
    for part in filter(None, (command.epilog or "").split("\n\n")):
        label, _, value = part.partition(": ")
        yield ""
        yield f"{label}: `{value}`" if label == "Example" else part


def options_table(name: str, command: Any) -> Iterator[str]:
    """Yield a table of the arguments and options of one command."""
    context = command.make_context(name, [], resilient_parsing=True)
    rows = [("option", "default and bounds", "meaning")]
    for option in command.params:
        named, said = option.get_help_record(context) or (option.opts[-1], "hidden")
        meaning, extras = found.groups() if (found := EXTRAS.match(said)) else (said, "")
        rows.append((f"`{named}`", without_home(extras), without_home(meaning)))
    yield from table(*rows)


def without_home(said: str) -> str:
    """Return a text in which the user's home folder is `~`."""
    return said.replace(str(DEFAULT_HOME), "~/.local/share/echo-swarm").replace(str(Path.home()) + "/", "~/")


def settings_page() -> Iterator[str]:
    """Yield the lines of the page of settings."""
    yield from ("# Settings", "", NOTE, "")
    yield "A round has one TOML file. Every key has a default; an unknown key is rejected with the nearest name."
    yield "`swarm-coordinator config explain ROUND.toml` prints the same with the values of a file. Where an objective"
    yield "or a correction is `not set`, `learner.algorithm` decides: see [learning](../learning.md). `round.mode`"
    yield "changes other defaults: see [operating](../operate.md#modes). What `init` writes may be edited until the"
    yield "first launch; it fixes the settings that say so, since the round's history depends on them."
    for section, model in manual.sections().items():
        yield from ("", f"## {section}", "", (model.__doc__ or "").partition("\n")[0], "")
        rows = [("key", "type", "default", "unit", "bounds", "meaning", "may change")]
        for key in manual.every(section):
            default = code(manual.written(key.default)) if key.default is not None else "not set"
            kind = code(manual.type_name(key.field.annotation))
            changes = "until the first launch" if key.path in FIXED else "at each launch"
            rows.append((code(key.path), kind, default, key.unit, key.bounds, key.meaning, changes))
        yield from table(*rows)


def all_errors() -> list[type[SwarmError]]:
    """Return every error of ours that has a code of its own."""
    for path in python_files(*ROOMS):
        if re.search(r"^    code\b.* = ", text(path), re.MULTILINE):
            importlib.import_module(".".join(path.with_suffix("").parts))
    ours = [error for error in errors_below(SwarmError) if error.__module__.partition(".")[0] in ROOMS]
    return [error for error in ours if "code" in vars(error)]


def errors_below(base: type[SwarmError]) -> Iterator[type[SwarmError]]:
    """Yield an error and every special case of it."""
    yield base
    for child in base.__subclasses__():
        yield from errors_below(child)


def errors_page() -> Iterator[str]:
    """Yield the lines of the page of errors and refusals."""
    yield from ("# Errors and refusals", "", NOTE, "")
    yield "A program prints an error as one line: what happened, what to do next, and the code in brackets. The fault"
    yield "names the side that caused it. Codes marked `local` never cross the wire. `…` stands for a value."
    found = hints()
    for error in sorted(all_errors(), key=lambda error: error.code):
        status = f"HTTP {error.http_status}" if error in ERRORS.values() else "local"
        yield from ("", f"## {error.code}", "", f"{status}, fault: {error.fault}.", (error.__doc__ or "").strip())
        known = sorted(found.get(error.__name__, set()))
        yield from ["", "What to do next, as the message says:", "", *(f"- {hint}" for hint in known)] if known else []
    yield from ("", "## Why a node gets no work", "")
    yield "`reason` of a reply without leases, with the meaning that `protocol/work/messages.py` gives:"
    yield from ("", *(f"- `{reason}`" for reason in get_args(messages.Reason) if reason))
    yield from ("", docstring_after(Path("protocol/work/messages.py"), "Reason"))
    yield from ("", "## Why a prompt is left out", "")
    yield "Label `reason` of `echo_swarm_prompts_left_out_total`:"
    yield from ("", *(f"- `{reason}`" for reason in get_args(selection.Reason)))


def docstring_after(path: Path, name: str) -> str:
    """Return the text below the assignment of a name in a module."""
    body = tree(path).body
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(below, ast.Expr):
            return str(ast.literal_eval(below.value))
    return ""


Texts = Mapping[str, set[str]]
"""The texts that each name may stand for."""


def hints() -> dict[str, set[str]]:
    """Return the hints that our code gives by the name of the error; `…` stands for what only the moment knows."""
    found: dict[str, set[str]] = {}
    for path in python_files(*ROOMS):
        for scope, known in scopes(path) if "hint=" in text(path) else ():
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
                for value in (word.value for word in call.keywords if word.arg == "hint"):
                    name = ast.unparse(call.func).rpartition(".")[2]
                    found.setdefault(name, set()).update(each for each in texts(value, known) if re.search(r"\w", each))
    return found


def scopes(path: Path) -> Iterator[tuple[ast.AST, Texts]]:
    """Yield a module and each of its functions, with the texts of the names there: its own and imported constants."""
    module = constants(path)
    yield tree(path), module
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, {**module, **assigned(ast.walk(node), module)}


@functools.cache
def constants(path: Path) -> Texts:
    """Return the texts of a module's constants, and of those that it imports from our modules."""
    found: dict[str, set[str]] = {}
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            place = Path(*node.module.split("."))
            there = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if text(file)), None)
            if there and place.parts[0] in ROOMS and any(each.name.isupper() for each in node.names):
                known = constants(there)
                found |= {each.asname or each.name: known[each.name] for each in node.names if each.name in known}
    return found | assigned(tree(path).body, found)


def assigned(nodes: Iterable[ast.AST], known: Texts) -> dict[str, set[str]]:
    """Return the texts that are assigned to names."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, set()).update(texts(node.value, {**known, **found}))
    return found


def texts(node: ast.expr, known: Texts) -> set[str]:
    """Return the texts that an expression may be, as they stand in the code, with `…` for what is put into them."""
    match node:
        case ast.Constant(value=str() as value):
            return {value}
        case ast.JoinedStr():
            return {"".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)}
        case ast.Name():
            return known.get(node.id, set())
        case ast.IfExp():
            return texts(node.body, known) | texts(node.orelse, known)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return {re.sub(r"\{\w*\}", "…", each) for each in texts(template, known)}
    return set()


def metrics_page() -> Iterator[str]:
    """Yield the lines of the page of metrics."""
    yield from ("# Metrics", "", NOTE, "")
    yield "`GET /metrics` of the coordinator returns these in the text format of Prometheus. A restart of the"
    yield "coordinator does not reset the counters; it resets `echo_swarm_http_seconds`. Amounts are in the operator's"
    yield "unit, times in seconds, sizes in bytes."
    yield ""
    rows = [("name", "type", "labels", "help")]
    for family in metrics.FAMILIES:
        suffix = "_total" if family.kind == "counter" else ""
        rows.append((f"`echo_swarm_{family.name}{suffix}`", family.kind, code(family.label), family.help))
    yield from table(*sorted(rows[:1]), *sorted([*rows[1:], *process_metrics()]))
    yield from ("", "## Figures of each update", "")
    yield "The training page shows these; `learner/metrics.jsonl` and boards have them, too."
    yield ""
    captions = [metric_words.caption(name) for name in sorted(metric_words.KNOWN)]
    yield from table(("figure", "title", "meaning"), *((code(one.raw), one.title, one.about) for one in captions))
    yield ""
    yield "Exactly, with d_t = log π_old − log μ over the tokens that are judged, and w_t the weight of each:"
    yield ""
    yield from figures_in_docstrings()


def figures_in_docstrings() -> Iterator[str]:
    """Yield the lines of the learner's docstrings that define a figure."""
    for module in ("objective", "policy"):
        said = ast.get_docstring(tree(Path(f"coordinator/learner/{module}.py"))) or ""
        for line in said.splitlines():
            figure = re.match(r"    ([a-z_/0-9]+)(, \S+)*  ", line)
            if figure and figure[1] in metric_words.KNOWN:
                yield line


def messages_page() -> Iterator[str]:
    """Yield the lines of the page of messages."""
    yield from ("# Messages", "", NOTE, "")
    yield "The type and the bounds of every field, bounds included. [The protocol](../protocol.md) and [the"
    yield "ledger](../ledger.md) have their meaning, and what these types do not say."
    for path, found in message_reference.sections():
        yield from ("", f"## `{path}`")
        for model in found:
            yield from ("", f"### {model.__name__}", "", (model.__doc__ or "").strip().partition("\n")[0])
            if fields := message_reference.rows(model):
                yield ""
                yield from table(("field", "type and bounds"), *fields)


def process_metrics() -> Iterator[tuple[str, str, str, str]]:
    """Yield the metrics of the process itself: those about its answers."""
    app = web.Application()
    answers.measure(app)
    app[answers.ANSWERED].labels("GET", "/", "200").observe(0)
    for family in app[answers.REGISTRY].collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        yield f"`{family.name}`", family.type, shown, family.documentation


def glossary() -> dict[str, str]:
    """Return the glossary of `protocol`: term → meaning."""
    _, _, listed = (protocol.__doc__ or "").partition("Glossary")
    joined = re.sub(r"\n {2,}", " ", listed)
    return dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", joined, re.MULTILINE))


def glossary_page() -> Iterator[str]:
    """Yield the lines of the page of words."""
    yield from ("# Glossary", "", NOTE, "")
    yield from ("The same words in code, API, pages and documents.", "")
    yield from (f"- **{term}**: {meaning}" for term, meaning in glossary().items())


def states_page() -> Iterator[str]:
    """Yield the page of states: for each state, those that may follow."""
    yield from ("# States", "", NOTE, "")
    yield "A move that is not listed cannot happen: each change compares the state before in the same statement."
    leases: dict[str, list[str]] = {state.value: [] for state in LeaseState}
    for (before, event), after in TRANSITIONS.items():
        leases[before].append(f"`{after}` ({event})")
    yield from ("", "## Leases", "", "The event that moves a lease is in brackets.", "")
    yield from table(
        ("state", "may become"), *((f"`{state}`", ", ".join(after) or "–") for state, after in leases.items())
    )
    for title, moves in (("Groups", GROUP_MOVES), ("Rollouts", ROLLOUT_MOVES)):
        yield from ("", f"## {title}", "")
        rows = ((f"`{state}`", ", ".join(f"`{one}`" for one in after) or "–") for state, after in moves.items())
        yield from table(("state", "may become"), *rows)


def main() -> None:
    """Write every page."""
    for path, page in pages().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
