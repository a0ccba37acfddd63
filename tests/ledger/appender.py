"""A program for the crash test: appends to the ledger file it is given until it is killed.

- Prints the content hash of an entry only after its commit: a printed line is an acknowledgement.
- Goes on where the file stands: every claim is credited, then posted or voided.
"""

import sys
from itertools import count
from pathlib import Path

from ledger import store
from ledger.book import EntryOutcome
from ledger.entry import Entry
from tests.ledger.engines import sqlite_file
from tests.ledger.values import credit, post, void


def main(path: Path) -> None:
    engine = sqlite_file(path)
    with engine.connect() as conn:
        first = sum(row.entry.kind == "pending" for row in store.entries(conn, 0, 1_000_000))
    for number in count(first):
        settlement: Entry = post(number) if number % 3 else void(number)
        for entry in (credit(number, of=number % 4), settlement):
            with engine.begin() as conn:
                outcome = store.append(conn, entry, 0)
            if outcome is not EntryOutcome.APPLIED:
                sys.exit(f"{entry} was refused: {outcome}")
            print(entry.content_hash, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
