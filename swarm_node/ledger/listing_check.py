"""Check of a round's listing against the round's own log: what it says that it has paid must be what the log proves.

1. A checkpoint that is served now covers at least as many entries as the listing names.
2. The entries are valid one after the other, and give the root that the listing's checkpoint has.
3. At the sizes that a directory's curator saw, the log has the roots that the curator saw.
4. After each payment, and at the end, the log has paid, owes and was given what the listing says (`ledger.listing`).

- A failure of 4 is a lie: the ledger's key has signed both the listing and the log. That is `ProofInvalid`, and nothing
  else is. A log that is not served, or changed on the way, leaves the listing unproved.
"""

from collections.abc import Sequence

from ledger import book
from ledger.book import BookBroken
from ledger.checkpoint import open_checkpoint
from ledger.directory import Sighting
from ledger.listing import LogTotals, OpenListing
from ledger.proof import ledger_keys
from ledger.tiles import TILE_HASHES
from protocol.errors import MalformedMessage, NotCanonical, ProofInvalid, RolledBack, UntrustedMetadata
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_verify import ReadLog


async def check_listing(
    reader: LogReader,
    said: OpenListing,
    sightings: Sequence[Sighting] = (),
) -> None:
    """Read the log that a listing names, and raise `ProofInvalid` if it does not prove what the listing says."""
    size = said.checkpoint.size
    served = open_checkpoint(await reader.checkpoint(), ledger_keys(await reader.roots(), said.round_id)[:1])
    if served.size < size:  # (1)
        raise RolledBack(
            f"{said.name} serves a log of {served.size} entries, but its listing names {size}.",
            hint="Try again later; if it does not change, report it to the operator and other participants.",
        )
    seen = {sighting.size: sighting.root for sighting in sightings if said.still_has(sighting.size)}
    totals = LogTotals(said)
    log = ReadLog(totals.add)
    for stop in sorted({*totals.sizes, *(stop for stop in seen if stop <= size)}):
        await _read_to(reader, log, stop, size, said)
        totals.reach(stop, log.state)
        if stop in seen and seen[stop] != log.root(stop).hex():  # (3)
            raise UntrustedMetadata(f"{said.name} serves another log of {stop} entries than its curator saw.")
    try:
        book.check(log.state)
    except BookBroken as error:
        raise UntrustedMetadata(f"The log of {said.name} does not add up: {error}") from None
    totals.finish(log.root(size))  # (2, 4)


async def _read_to(reader: LogReader, log: ReadLog, stop: int, size: int, said: OpenListing) -> None:
    """Read the entries up to `stop` in a log of `size` entries (2)."""
    while log.size < stop:
        number = log.size // TILE_HASHES
        first = number * TILE_HASHES
        try:
            # Half a file is `ProofInvalid`, too; whoever sent it need not be the round.
            log.add((await reader.entries(number, size))[log.size - first : stop - first])
        except (MalformedMessage, NotCanonical, BookBroken, ProofInvalid) as error:
            raise UntrustedMetadata(f"The log of {said.name} is not valid: {error}") from None
