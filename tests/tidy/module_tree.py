"""`make tree`: every package and module with the first line of its docstring.

- `make tree ARGS=WORD` prints only those with WORD in their path or purpose.
- Packages and modules of the product and of bench/ are listed. Of other folders, such as docs/, only the top is.
- A folder without modules has its purpose in `PURPOSES`.
"""

import ast
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repository import ROOMS, files, python_files, tree

PURPOSES = {
    "docs/": "Everything to read: how to join, to operate, the protocol, decisions",
    "examples/": "Rounds that are ready to launch, and the data and rewards of some",
    "installers/": "Installers for nodes, service files, images and dashboards",
    "tests/": "All tests; tests/processes starts real programs, tests/adversaries plays the attacks",
}


def entries() -> Iterator[tuple[str, str]]:
    """Yield (path, purpose) of every folder and module in the order of the tree; a folder ends in `/`."""
    names = {f"{path.parts[0]}/" for path in files() if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    for path in python_files(*ROOMS, "bench"):
        names |= {f"{parent}/" for parent in path.parents if parent != Path()}
        names |= {str(path)} if path.name != "__init__.py" else set()
    for name in sorted(names, key=lambda name: Path(name).parts):
        yield name, PURPOSES.get(name) or _purpose(Path(name) / "__init__.py" if name.endswith("/") else Path(name))


def _purpose(module: Path) -> str:
    docstring = ast.get_docstring(tree(module)) if module in files() else None
    return (docstring or "").partition("\n")[0].rstrip(".")


def lines(word: str = "") -> Iterator[str]:
    """Yield the tree, two spaces a level; with a word, whole paths of the lines that have it."""
    for name, purpose in entries():
        path = Path(name)
        label = "  " * (len(path.parts) - 1) + path.name + ("/" if name.endswith("/") else "")
        if word.casefold() in f"{name} {purpose}".casefold():
            yield f"{name:<44}  {purpose}" if word else f"{label:<32}  {purpose}"


def main() -> None:
    """Print the tree, or the lines that have the words of the command line; a reader such as `head` may stop early."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("\n".join(lines(" ".join(sys.argv[1:]))))


if __name__ == "__main__":
    main()
