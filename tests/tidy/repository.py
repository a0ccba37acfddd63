"""Files that the tidy tests look at: the repository's own, as git would carry them.

- Files that git ignores are nobody's business here; files that are new and not yet added are.
- Without git (an unpacked source archive) every file outside hidden folders counts.
"""

import ast
import functools
import gc
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "ledger", "coordinator", "swarm_node", "echo_swarm", "swarm_exact")


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file of the repository, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False) if (ROOT / ".git").exists() else None
    if listing is not None and listing.returncode == 0:
        names = {Path(name) for name in listing.stdout.split("\0") if name}
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = {path for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts)}
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


def python_files(*folders: str) -> list[Path]:
    """The Python modules, all of them or those below some top-level folders."""
    return [path for path in files() if path.suffix == ".py" and (not folders or path.parts[0] in folders)]


@functools.cache
def text(path: Path) -> str:
    """A file's text; what is no text, or not there, reads as empty."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


@functools.cache
def tree(path: Path) -> ast.Module:
    """A module as Python reads it; it stays until the end, so that no collection of garbage needs to search it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text(path), str(path))
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def comments(path: Path) -> dict[int, str]:
    """The comments of a module by line; text that only looks like one does not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text(path)).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Every call in a module whose target is written as a dotted name, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported name, dotted from its module, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def report(problems: list[str]) -> None:
    """Fail with one line per place, and without a traceback through the rule."""
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
