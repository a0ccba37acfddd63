"""Every architecture through every part, and the table of docs/architectures.md, which it writes.

- Policies are tiny and random (`tests.architectures.zoo`); a part works within 1e-3 nats of each sequence alone.
- `tests/architectures` makes each row again, and compares it with the table: a table that is not current fails there.
"""

import sys
import tempfile
from pathlib import Path

from tests.architectures import stages, zoo

DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"

BEGIN, END = "<!-- table -->", "<!-- /table -->"

HEADINGS = ("Launch", "Learner", "LoRA", "Publishing", "torch engine", "New version", "llama engine", "Auditor")


def documented() -> dict[str, stages.Row]:
    """The rows of the table as it stands."""
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {name: stages.Row(*columns) for name, _, *columns in cells}


def main() -> int:
    """Try every architecture, and write the table."""
    lines = ["| " + " | ".join(("Architecture", "`model_type`", *HEADINGS)) + " |", "|---" * (2 + len(HEADINGS)) + "|"]
    for name, (kind, _) in zoo.ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = stages.row(name, Path(folder))
        lines.append(f"| {name} | `{kind}` | " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
