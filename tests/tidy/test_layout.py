"""The shape of the tree: one class per name, no circles of imports, and no fragments that only one module uses.

- The layers of the packages are contracts of import-linter, in pyproject.toml.
- Rows of the store have names and types between functions.
- An exception is a line in a table here, with its reason.
"""

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tidy.repository import ROOMS, imports, python_files, report, text, tree

FRAGMENT_LINES = 80

ONE_PER_SUBJECT = ("coordinator/api/", "coordinator/commands/", "swarm_node/commands/", "coordinator/store/migrations/")
"""Folders whose modules are one for each caller, command or step, however short."""

FRAGMENTS = {
    "coordinator/environments/games/episodes.py": "problems and a class, as each module with an environment has them",
    "coordinator/environments/games/poker_tables.py": "numbers that a solver has made",
    "coordinator/tasks/group_play.py": "one turn of a group, without the service that asks for it",
    "coordinator/endpoint/sample_stream.py": "one sample that grows, pure, apart from the requests that read it",
    "coordinator/environments/verifiers_harness.py": "a program of verifiers, which imports it by name",
    "coordinator/learner/embedded.py": "torch, apart from the text of the policy, which is read without it",
    "coordinator/learner/state_root.py": "the specification of a state's root, which the log relies on",
    "coordinator/config/notify.py": "a section of its own, as each module of settings has one subject",
    "coordinator/pages/feed.py": "one page per module",
    "coordinator/pages/metric_words.py": "words of metrics, apart from the page that shows them",
    "coordinator/learner/tracked_settings.py": "what leaves the machine as settings, apart from the boards it goes to",
    "coordinator/pages/samples.py": "text of nodes on a page, apart from the figures of training",
    "coordinator/service/tls.py": "certificates are a subject of their own, beside the wiring in app",
    "coordinator/tasks/reward_exact.py": "a reward function, as an operator's own is a module",
    "coordinator/transactions/rails/files.py": "writes what each rail's module returns",
    "coordinator/transactions/rails/manual.py": "one module per rail",
    "coordinator/transactions/rails/paypal.py": "one module per rail",
    "coordinator/transactions/rails/scripts.py": "one module for the two rails that have a script",
    "coordinator/transactions/rails/sepa.py": "one module per rail",
    "protocol/wire/generation.py": "the one number that changes with the protocol",
    "swarm_node/engine/cards.py": "the choice of cards, pure, beside the pool that starts their children",
    "swarm_node/engine/described.py": "a program of its own: the child that describes a model",
    "swarm_node/engine/foreign.py": "a program of its own, run by another interpreter",
    "swarm_node/engine/policy_text.py": "the limits of a hostile tokenizer, apart from the commands of a session",
    "swarm_node/engine/vllm/step_times.py": "a division that is tested without vLLM's environment",
    "swarm_node/engine/vllm/worker.py": "loaded by vLLM's own worker process",
    "swarm_node/keys/rotation.py": "one module per kind of key operation",
    "swarm_node/ledger/audit_report.py": "the form of one document",
    "swarm_node/ledger/listing_check.py": "one check of a log, as ledger_check beside it",
    "swarm_node/ledger/payouts.py": "the form of one document",
    "swarm_node/owner/live_view.py": "draws on a terminal; its lines are in status_lines",
    "swarm_node/seed.py": "a program of its own: the seeder",
    "swarm_node/versions/disk_space.py": "pure arithmetic of a version's size, beside the follower that acts on it",
    "swarm_node/versions/milestones.py": "a stopwatch on its own clock",
    "swarm_node/work/version_failures.py": "a machine of its own: which version fails, apart from who works",
}
"""Modules below `FRAGMENT_LINES` lines that one other module imports, and why they are not part of it."""


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
    short = {
        str(path)
        for path in python_files(*ROOMS)
        if path.name != "__init__.py"
        and not str(path).startswith(ONE_PER_SUBJECT)
        and len(text(path).splitlines()) < FRAGMENT_LINES
        and len(importers[module_name(path)]) == 1
    }
    report(
        [f"{path}: join it with its importer, or give a reason in FRAGMENTS" for path in sorted(short - set(FRAGMENTS))]
    )
    report([f"{path}: is no fragment" for path in sorted(set(FRAGMENTS) - short)])


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
