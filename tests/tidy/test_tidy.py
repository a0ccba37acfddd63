"""The rules of the house that a formatter cannot see, kept over every file of the repository.

- A failure lists every place, so that one run is enough to mend them all.
- An exception to a rule is a line in a table here, with its reason.
"""

import ast
import re
from pathlib import Path

from tests.tidy.repository import ROOMS, ROOT, calls, comments, files, imports, python_files, report, text, tree

MODULE_MAX_LINES = 600
FUNCTION_MAX_LINES = 60
DECISION_MAX_LINES = 65
TWO_SCREENS_LINES = 100

LONG_FUNCTIONS: dict[str, str] = {}
"""`path:function` → why it reads better in one piece."""

PATCHED_CONSTANTS = {
    "BODY_TOKENS_MAX": "of the auditor's model: how its work is cut, which must not change what it finds",
    "CHUNK_BYTES": "of the learner's head, as above; it would have to pass through three functions for a test alone",
    "HEAD_LOGITS_MAX": "as BODY_TOKENS_MAX",
    "PADDED_MAX": "of the learner's packing, as CHUNK_BYTES",
}
"""Constants of ours that tests set, and why they are no arguments."""

IMPURE_CALLS = ("open", "input", "print", "datetime.now", "datetime.utcnow", "datetime.today", "date.today")
SEEDED_GENERATORS = {"Generator", "Philox", "SeedSequence"}

HOME_LIKE = "|".join(["home", "root", "Users", "mnt", "srv", "opt", "work", "tmp", "private"])
MACHINE_PATH = re.compile(rf"(?<![\w./:~$}}*-])/(?:{HOME_LIKE})/[\w.-]+")


def test_every_module_says_what_it_is() -> None:
    report([f"{path}: no docstring" for path in python_files() if not ast.get_docstring(tree(path))])


def test_no_module_is_too_long_to_hold_in_mind() -> None:
    counts = {path: len(text(path).splitlines()) for path in python_files()}
    report([f"{path}: {lines} lines" for path, lines in counts.items() if lines > MODULE_MAX_LINES])


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of code; the signature and the docstring are declarations and cost nothing."""
    first, *rest = function.body
    start = rest[0] if rest and ast.get_docstring(function) is not None else first
    return (function.end_lineno or function.lineno) - start.lineno + 1


def test_no_function_is_too_long_to_hold_in_mind() -> None:
    long = {
        f"{path}:{node.name}": body_lines(node)
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > FUNCTION_MAX_LINES
    }
    report([f"{name}: {lines} lines" for name, lines in long.items() if name not in LONG_FUNCTIONS])
    report([f"{name}: allowed to be long, but is not" for name in LONG_FUNCTIONS if name not in long])


def test_every_folder_of_modules_is_a_package() -> None:
    """Else `import protocol` in a test may find `tests/protocol`, and mypy sees one file under two names."""
    modules = python_files("tests", "bench", *ROOMS)
    folders = {parent for path in modules for parent in path.parents if parent != Path()}
    report([f"{folder}: no __init__.py" for folder in sorted(folders) if folder / "__init__.py" not in files()])


def reason_in(comment: str) -> bool:
    """Return True if a comment says more than its directive."""
    rest = re.sub(r"type:\s*ignore(\[[\w, -]*\])?|noqa(:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?|pragma:\s*no cover", "", comment)
    return len(re.findall(r"[^\W\d_]{2,}", rest)) >= 2


def test_every_ignore_gives_its_reason() -> None:
    problems = []
    ignore = re.compile(r"#\s*(type:\s*ignore|noqa)")
    for path in python_files():
        said = comments(path) if ignore.search(text(path)) else {}
        for line, comment in said.items():
            if ignore.search(comment) and not reason_in(comment):
                problems.append(f"{path}:{line}: {comment} (say why, on the same line)")
    report(problems)


def catches_everything(node: ast.AST) -> bool:
    """Return True if a handler swallows whatever comes; one that only cleans up and raises on does not."""
    return (
        isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and ast.unparse(node.body[-1]) != "raise"
    )


def test_every_catch_of_everything_gives_its_reason() -> None:
    problems = []
    for path in python_files():
        caught = list(filter(catches_everything, ast.walk(tree(path))))
        said = comments(path) if caught else {}
        for node in caught:
            assert isinstance(node, ast.ExceptHandler)
            nearby = range(node.lineno - 1, node.body[0].lineno + 1)
            if not any(reason_in(said.get(line, "")) for line in nearby):
                problems.append(f"{path}:{node.lineno}: catches everything (say why in a comment beside it)")
    report(problems)


def test_tests_wait_for_events_and_not_for_time_to_pass() -> None:
    banned = ("time.sleep", "sleep")
    report([f"{p}:{line}: {name}" for p in python_files("tests") for line, name in calls(p) if name in banned])


def test_tests_pass_bounds_as_arguments_and_patch_no_constant_of_ours() -> None:
    problems, patched_names = [], set()
    for path in python_files("tests"):
        ours = {name.rpartition(".")[2] for _, name in imports(path) if name.partition(".")[0] in ROOMS} | set(ROOMS)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
                whole = patched(node)
                first, last = whole.partition(".")[0], whole.rpartition(".")[2]
                patched_names.add(last)
                if last.isupper() and last not in PATCHED_CONSTANTS and first in ours:
                    problems.append(f"{path}:{node.lineno}: {whole}")
    report([*problems, *(f"{name}: no test sets it" for name in PATCHED_CONSTANTS if name not in patched_names)])


def patched(call: ast.Call) -> str:
    """Return what `monkeypatch.setattr` sets, dotted; of a module given as an object, from its name in the test on."""
    parts = [part.value if isinstance(part, ast.Constant) else ast.unparse(part) for part in call.args[:2]]
    return ".".join(map(str, parts)) if not isinstance(call.args[0], ast.Constant) else str(parts[0])


def test_tests_use_fakes_and_not_patches() -> None:
    patches = ("unittest.mock", "mock.", "pytest_mock")
    found = [(path, line, name) for path in python_files("tests") for line, name in imports(path)]
    report([f"{path}:{line}: {name}" for path, line, name in found if name.startswith(patches)])


def test_the_handshake_rests_on_no_unmaintained_library() -> None:
    """libp2p requires noiseprotocol and brings a handshake on top of it: our programs import neither (decision 7)."""
    forbidden = ("noise", "libp2p.security.noise")
    report(
        [
            f"{path}:{line}: {name}"
            for path in python_files(*ROOMS)
            for line, name in imports(path)
            if any(name == module or name.startswith(f"{module}.") for module in forbidden)
        ]
    )


def pure_modules() -> list[Path]:
    """The modules that may not do I/O, read a clock, or draw from global randomness."""
    return [path for path in python_files("protocol", "ledger") if path != Path("ledger/store.py")]


def test_pure_rooms_touch_no_file_clock_or_global_chance() -> None:
    """Builtins, and names inside modules that are fine otherwise, which import-linter can't see."""
    problems = [f"{p}:{line}: {name}()" for p in pure_modules() for line, name in calls(p) if name in IMPURE_CALLS]
    for path in pure_modules():
        for line, name in imports(path):
            if name.startswith("pathlib") and name != "pathlib.PurePosixPath":
                problems.append(f"{path}:{line}: {name} (only PurePosixPath names a file without touching it)")
        for line, name in calls(path):
            head, _, last = name.rpartition(".")
            if head in ("np.random", "numpy.random") and last not in SEEDED_GENERATORS:
                problems.append(f"{path}:{line}: {name}() (draw from a generator seeded by an argument)")
    report(problems)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    problems = []
    for path in files():
        for number, line in enumerate(text(path).splitlines(), 1):
            problems += [f"{path}:{number}: {found}" for found in MACHINE_PATH.findall(line)]
    report(problems)


DECISIONS = Path("docs/decisions")
DECISION_STATUS = re.compile(r"^\*\*Status:\*\* (\w+); last changed (\d{4}-\d\d-\d\d)\b", re.MULTILINE)


def decisions() -> list[Path]:
    """Return the decision records in the order of their numbers, without the list of them."""
    return [path for path in files() if path.parent == DECISIONS and path.name != "README.md"]


def test_decisions_are_numbered_and_short() -> None:
    records = decisions()
    too_long = {path: lines for path in records if (lines := len(text(path).splitlines())) > DECISION_MAX_LINES}
    problems = [f"{path}: {lines} lines, at most {DECISION_MAX_LINES}" for path, lines in too_long.items()]
    parts = [(path, part) for path in records for part in ("Context", "Decision", "Consequences")]
    problems += [f"{path}: no part {part}" for path, part in parts if f"\n## {part}\n" not in text(path)]
    problems += [f"{path}: no status with a date" for path in records if not DECISION_STATUS.search(text(path))]
    problems += [f"{path}: no negative consequence" for path in records if "\n- Negative: " not in text(path)]
    wrong = [
        path for number, path in enumerate(records, 1) if not re.fullmatch(rf"{number:02}-[a-z0-9-]+\.md", path.name)
    ]
    problems += [f"{path}: the numbers have a gap or the name is no NN-short-name.md" for path in wrong]
    titles = [path for number, path in enumerate(records, 1) if not text(path).startswith(f"# {number}. ")]
    problems += [f"{path}: the title does not begin with the number" for path in titles]
    report(problems)
    assert records, f"{DECISIONS} has no records"


def decision_row(path: Path) -> str:
    """Return the row of one record in the list of decisions."""
    number, _, subject = text(path).splitlines()[0].removeprefix("# ").partition(". ")
    status = DECISION_STATUS.search(text(path))
    return f"| {number} | [{subject}]({path.name}) | {', '.join(status.groups()) if status else ''} |"


def test_the_list_of_decisions_matches_the_records() -> None:
    listed = re.findall(r"^\| \d+ \|.*$", text(DECISIONS / "README.md"), re.MULTILINE)
    expected = [decision_row(path) for path in decisions()]
    problems = [f"missing row: {row}" for row in expected if row not in listed]
    problems += [f"wrong row: {row}" for row in listed if row not in expected]
    report([f"{DECISIONS}/README.md: {problem}" for problem in problems])
    assert listed == expected, "the rows are not in the order of the numbers"


def test_references_to_decisions_name_existing_records() -> None:
    """`decision 12` in code, docs and settings must be the number of a record."""
    numbers = {int(path.name[:2]) for path in decisions()}
    reference = re.compile(r"\b[Dd]ecisions?\s+#?\s*(\d+)\b")
    problems = []
    for path in files():
        named = {int(number) for number in reference.findall(text(path))}
        problems += [f"{path}: there is no decision {number}" for number in sorted(named - numbers)]
    report(problems)


def test_contributing_fits_on_two_screens() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= TWO_SCREENS_LINES
