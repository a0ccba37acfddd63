"""The shape of the tree: one class per name, no circles of imports, and no fragments that only one module uses.

- The layers of the packages are contracts of import-linter, in pyproject.toml.
- A package that hides many of its modules says in `__all__` what others may import, without importing it itself:
  start-up stays short, and a reader begins with those modules.
- A class with much state or many parameters says why it is one object.
- Rows of the store have names and types between functions.
- An exception is a line in a table here, with its reason.
"""

import ast
import functools
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tidy.repository import ROOMS, imports, python_files, report, text, tree

FRAGMENT_LINES = 80

ONE_PER_SUBJECT = ("coordinator/api/", "swarm_node/commands/")
"""Folders whose modules are one for each caller or command, however short."""

FRAGMENTS = {
    "coordinator/service/agent_sessions.py": "a machine of its own, with time as an argument",
    "coordinator/tasks/group_play.py": "one turn of a group, without the service that asks for it",
    "coordinator/environments/verifiers_harness.py": "a program of verifiers, which imports it by name",
    "coordinator/learner/embedded.py": "torch, apart from the text of the policy, which is read without it",
    "coordinator/pages/feed.py": "one page per module",
    "coordinator/pages/usage.py": "one page per module",
    "coordinator/service/tls.py": "certificates are a subject of their own, beside the wiring in app",
    "coordinator/tasks/reward_exact.py": "a reward function, as an operator's own is a module",
    "swarm_node/engine/foreign.py": "a program of its own, run by another interpreter",
    "swarm_node/engine/vllm/step_times.py": "a division that is tested without vLLM's environment",
    "swarm_node/engine/vllm/worker.py": "loaded by vLLM's own worker process",
    "swarm_node/ledger/listing_check.py": "one check of a log, as ledger_check beside it",
    "swarm_node/owner/live_view.py": "draws on a terminal; its lines are in status_lines",
}
"""Modules below `FRAGMENT_LINES` lines that one other module imports, and why they are not part of it."""


HIDDEN_SHARE = 1 / 3
"""A package in which so many modules are its own names the others in `__all__`."""

PROGRAMS = ("coordinator.commands", "echo_swarm.tinker")
"""Packages that nothing imports but the program itself, by name."""

ATTRIBUTES_MAX = 15
PARAMETERS_MAX = 8

LARGE_CLASSES = {
    "coordinator/learner/loop.py:Learner": "the loop's parts: model, optimizer, data, reports, each an object itself",
    "coordinator/learner/memory.py:Estimate": "one figure per attribute, as `learner check` prints them",
    "coordinator/service/backup/following.py:Follower": "paths and positions of one copy",
    "coordinator/service/round.py:Round": "what handlers and timers share; each part has a module of its own",
    "coordinator/sim/world.py:Simulation": "the parts of a simulated round, wired to each other by its events",
    "swarm_node/allowance/governor.py:Governor": "readings, limits and what follows from them, updated in one step",
    "swarm_node/engine/client.py:EngineClient": "a child process: pipe, model, pending answers, figures",
    "swarm_node/engine/torch/qwen3.py:Qwen3": "the tensors and sizes of one model",
    "swarm_node/p2p/download.py:_Download": "one download: the picker and the connections that carry out its orders",
    "swarm_node/p2p/fetch.py:Upstream": "the state of one connection's requests",
    "swarm_node/p2p/yamux_machine.py:YamuxMachine": "a state machine: every attribute is a part of its state",
    "swarm_node/picker/picker.py:Picker": "a state machine over chunks and sources, which keeps indexes of both",
    "swarm_node/picker/sources.py:SourceState": "what the picker knows of one source, updated by each of its answers",
    "swarm_node/versions/fetcher.py:VersionFetcher": "the parts of a download, each an object itself",
}
"""`path:class` → why it has more attributes, or parameters of its constructor, than others."""

ROW_ROOMS = ("coordinator/transactions", "coordinator/reports", "ledger")
"""Folders whose functions pass rows of the store to each other."""

NAMELESS = re.compile(r"(?:(?:list|Sequence|Iterable|Iterator)\[)?(?:Any|sa\.Row\w*(?:\[.*\])?)\]?")

NAMELESS_ROWS = {
    "coordinator/transactions/rails/evm.py:ask": "the JSON of a node of another network",
    "ledger/prepared.py:scalar": "the value of one column, of any type",
    "ledger/prepared.py:scalar_one": "the value of one column, of any type",
    "ledger/prepared.py:scalars": "the values of one column, of any type",
    "ledger/prepared.py:values": "values in the driver's own form",
}
"""`path:function` → why it may take or return rows without names; private helpers of `ledger.prepared` do."""


def module_name(path: Path) -> str:
    """Return the dotted name of a module or package."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def product_imports() -> dict[str, set[str]]:
    """Return the modules of the product that each of them imports."""
    names = {module_name(path): path for path in python_files(*ROOMS)}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for _, imported in imports(path):
            target = imported if imported in names else imported.rpartition(".")[0]
            if target in names and target != name:
                graph[name].add(target)
    return graph


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in python_files(*ROOMS):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    report([f"class {name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1])


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter(product_imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]), pytrace=False)


def test_a_short_module_that_one_other_imports_gives_its_reason() -> None:
    importers = defaultdict(set)
    for name, targets in product_imports().items():
        for target in targets:
            importers[target].add(name)
    fragments = {
        str(path)
        for path in python_files(*ROOMS)
        if path.name != "__init__.py"
        and len(text(path).splitlines()) < FRAGMENT_LINES
        and len(importers[module_name(path)]) == 1
    }
    short = {path for path in fragments if not path.startswith(ONE_PER_SUBJECT)}
    report(
        [f"{path}: join it with its importer, or give a reason in FRAGMENTS" for path in sorted(short - set(FRAGMENTS))]
    )
    report([f"{path}: is no fragment" for path in sorted(set(FRAGMENTS) - short)])
    needless = [folder for folder in ONE_PER_SUBJECT if not any(path.startswith(folder) for path in fragments)]
    report([f"{folder}: has no fragment" for folder in needless])


def package_of(name: str) -> str:
    """Return the package of a room that a module is in; the module itself if it is in none."""
    return ".".join(name.split(".")[:2])


def declared(package: str) -> set[str] | None:
    """Return what a package names in `__all__`; None if it names nothing."""
    path = Path(*package.split("."), "__init__.py")
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def imported_from_outside() -> dict[str, dict[str, str]]:
    """Return, for each package, its modules that others import, and one of those that do."""
    outside: dict[str, dict[str, str]] = defaultdict(dict)
    for name, targets in product_imports().items():
        for target in targets:
            if target.count(".") > 1 and package_of(target) != package_of(name):
                outside[package_of(target)][target.split(".", 2)[2]] = name
    return outside


def test_others_import_from_a_package_what_it_names() -> None:
    """Lazily imported modules count, too; a package without `__all__` is open as a whole."""
    modules: dict[str, set[str]] = defaultdict(set)
    for name in product_imports():
        if name.count(".") > 1:
            modules[package_of(name)].add(name.split(".", 2)[2])
    problems, hidden_programs = [], set[str]()
    outside = imported_from_outside()
    for package, names in modules.items():
        used, face = outside[package], declared(package)
        if face is None:
            hidden = len([name for name in names if not any(f"{each}.".startswith(f"{name}.") for each in used)])
            hides = hidden >= 3 and hidden >= HIDDEN_SHARE * len(names)
            if hides and package in PROGRAMS:
                hidden_programs.add(package)
            elif hides:
                problems.append(f"{package}: name in __all__ what others import: {sorted(used)}")
            continue
        problems += [f"{used[name]}: {package} does not name {name} in __all__" for name in sorted(set(used) - face)]
        problems += [f"{package}: nobody imports {name}" for name in sorted(face & names - set(used))]
    needless = sorted(set(PROGRAMS) - hidden_programs)
    problems += [f"{each}: remove from PROGRAMS; it is gone, has __all__ or hides too little" for each in needless]
    report(problems)


def test_no_module_imports_a_private_name_of_another() -> None:
    report(
        [
            f"{path}:{line}: {name}"
            for path in python_files(*ROOMS)
            for line, name in imports(path)
            if re.search(r"\._[a-z]", name) and name.partition(".")[0] in ROOMS
        ]
    )


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names that a class sets on itself; those of a data class are its fields, which are not counted."""
    targets: list[ast.expr] = []
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets.append(node.target)
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {part.attr for part in parts if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"}


def parameters(cls: ast.ClassDef) -> int:
    """Return the number of parameters of a class's own constructor."""
    made = [node.args for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return len(made[0].args) + len(made[0].kwonlyargs) - 1 if made else 0


def test_a_class_with_much_state_gives_its_reason() -> None:
    """Fields of data classes, named tuples, settings and messages do not count: their form is their content's."""
    large = {
        f"{path}:{node.name}": f"{len(attributes(node))} attributes, {parameters(node)} parameters"
        for path in python_files(*ROOMS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and (len(attributes(node)) > ATTRIBUTES_MAX or parameters(node) > PARAMETERS_MAX)
    }
    report([f"{name}: {size}" for name, size in large.items() if name not in LARGE_CLASSES])
    report([f"{name}: is not large" for name in LARGE_CLASSES if name not in large])


def test_rows_of_the_store_have_names_and_types() -> None:
    """A row that is passed on is a `NamedTuple`: `Prepared` and `read_rows` hold its fields to the statement's."""
    nameless = set()
    for path in python_files(*ROOMS):
        if not str(path).startswith(ROW_ROOMS):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                named = [item.annotation for item in (*node.args.args, *node.args.kwonlyargs) if item.arg != "values"]
                said = [ast.unparse(annotation) for annotation in (*named, node.returns) if annotation]
                if any(NAMELESS.fullmatch(each) for each in said):
                    nameless.add(f"{path}:{node.name}")
    private = {name for name in nameless if name.startswith("ledger/prepared.py:_")}
    report([f"{name}: name the row's type" for name in sorted(nameless - private - set(NAMELESS_ROWS))])
    report([f"{name}: has names" for name in sorted(set(NAMELESS_ROWS) - nameless)])
