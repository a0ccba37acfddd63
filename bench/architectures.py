"""Every architecture through every part, and the table of docs/architectures.md, which it writes.

- Policies are tiny and random (`tests.architectures.zoo`); a part works within 1e-3 nats of each sequence alone.
- A row of the table has all architectures with the same results.
- `tests/architectures` tries each of them again, and fails if the table is not current.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.architectures import stages, zoo

DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"

BEGIN, END = "<!-- table -->", "<!-- /table -->"

HEADINGS = ("Launch", "Learner", "LoRA", "Publishing", "torch engine", "New version", "llama engine", "Auditor")


def documented() -> dict[str, stages.Row]:
    """Return the results of each architecture as the table has them."""
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    found: dict[str, stages.Row] = {}
    for line in table[2:]:
        *results, named = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {name: stages.Row(*results) for name in re.findall(r"(?:^|, )(.+?) `\w+`", named)}
    return found


def table_lines(found: dict[str, stages.Row]) -> list[str]:
    """Return the table: a row for each result, with its architectures in the order of the zoo."""
    named: dict[stages.Row, list[str]] = {}
    for name, row in found.items():
        named.setdefault(row, []).append(f"{name} `{zoo.ARCHITECTURES[name][0]}`")
    heading = "| " + " | ".join((*HEADINGS, "Architectures, each with its `model_type`")) + " |"
    rows = ["| " + " | ".join((*row, ", ".join(names))) + " |" for row, names in named.items()]
    return [heading, "|---" * (len(HEADINGS) + 1) + "|", *rows]


def main() -> int:
    """Try every architecture, and write the table."""
    found: dict[str, stages.Row] = {}
    for name in zoo.ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = stages.row(name, Path(folder))
        print(name, *found[name], sep=" | ", flush=True)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text("\n".join([before + BEGIN, *table_lines(found), END + rest.partition(END)[2]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
