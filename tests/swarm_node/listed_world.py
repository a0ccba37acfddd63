"""Rounds that list themselves, truly or not, and directories of them; a real log and real keys behind each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import store
from ledger.accounts import OUTSIDE, AccountKind
from ledger.directory import Directory, KnownRound, ListedRound, Sighting, make_directory
from ledger.entry import Deposit, Entry
from ledger.listing import LIFETIME_MS, OpenListing, open_listing
from protocol.limits import DAY_MS
from protocol.policy.description import RoundDescription
from protocol.text.money import Unit
from protocol.wire.signing import NodeKey, canonical_json, to_sign
from tests.ledger.values import batch, credit, deposit, paid, payout, post
from tests.swarm_node.log_world import NOW, Log

NOW_MS = 1_790_000_000_000
CURATOR = NodeKey(bytes(31) + b"\x07")

PAYING: list[Entry] = [
    *(deposit(10**9), deposit(500, "gift/1-ab")),
    *(credit(1, price=10**6), credit(2, price=10**6), post(1), post(2)),
    *(batch(1, micros=150), payout(1, micros=150), paid(1)),
]
"""A round that has paid 150 of 200 micro-units."""


class ListedLog(Log):
    """A round with a listing, which is true unless a test changes it."""

    def __init__(
        self, folder: Path, title: str = "Rivers", entries: Sequence[Entry] = PAYING, unit: str = "EUR"
    ) -> None:
        made = SignedMetadata.create(folder / "keys", folder / "metadata", 3600.0, NOW, unit=Unit(unit, 2))
        super().__init__(made, entries)
        self.title = title

    def signed(self, **changes: Any) -> dict[str, Any]:
        """Return the signed part of a listing, with changes to it."""
        with self.engine.begin() as conn:
            note, balances = store.checkpoint(conn) or b"", store.balances(conn)
            log = store.entries(conn, 0, 10_000)
        held = {
            kind: sum(micros for account, micros in balances.items() if account.kind is kind) for kind in AccountKind
        }
        about = dict.fromkeys(("description", "purpose", "licence", "operator", "contact"), "")
        description = RoundDescription(round_id=self.round_id, title=self.title, **about)
        gifts = [one.entry.amount_micros for one in log if isinstance(one.entry, Deposit) and one.entry.is_gift]
        ends = [one.index + 1 for one in log if one.entry.kind == "paid"]
        paid_micros = held[AccountKind.PAID]
        said: dict[str, Any] = {
            "kind": "echo-swarm/listing",
            "url": "http://rivers.example:8700",
            "description": description.model_dump(),
            "task": "arithmetic",
            "model": {"name": "hf://some/model", "architecture": "qwen3", "weights_bytes": 10**9},
            "prices": {"lowest": 1_000_000, "highest": 2_000_000, "maximum": 5_000_000},
            "budget_micros": 10**8,
            "update": 3,
            "max_updates": 1000,
            "nodes": 2,
            "waiting_permille": 250,
            "finished": False,
            "made_ms": NOW_MS,
            "expires_ms": NOW_MS + LIFETIME_MS,
            "checkpoint": note.decode(),
            "cosigned": [],
            "totals": {
                "deposited_micros": -balances.get(OUTSIDE, 0),
                "gifts_micros": sum(gifts),
                "owed_micros": held[AccountKind.PAYABLE] + held[AccountKind.PAYING],
                "paid_micros": paid_micros,
            },
            "payments": [{"size": end, "ms": NOW_MS - DAY_MS, "paid_micros": paid_micros} for end in ends[-1:]],
        }
        return said | changes

    def listing(self, **changes: Any) -> dict[str, Any]:
        """Return a listing that the round's own key has signed, whatever it says."""
        signed = self.signed(**changes)
        signature = self.metadata.sign_for_ledger(to_sign("listing", canonical_json(signed)))
        return {
            "signed": signed,
            "signature": signature.hex(),
            "roots": [root.decode() for root in self.metadata.roots()],
        }

    def boast(self, micros: int) -> dict[str, Any]:
        """Return a listing that says that more was paid than the log proves."""
        signed = self.signed()
        payments = [payment | {"paid_micros": micros} for payment in signed["payments"]]
        return self.listing(totals=signed["totals"] | {"paid_micros": micros}, payments=payments)

    def open(self, **changes: Any) -> OpenListing:
        return open_listing(self.listing(**changes))

    def sighting(self, **changes: Any) -> Sighting:
        """Return what an honest curator sees now."""
        said, checkpoint = self.signed(), self.checkpoint()
        seen = {
            "ms": NOW_MS,
            "size": checkpoint.size,
            "root": checkpoint.root.hex(),
            "paid_micros": said["totals"]["paid_micros"],
        }
        return Sighting(**(seen | changes))

    def known(self) -> KnownRound:
        return KnownRound(self.open())


def directory(*listings: dict[str, Any], key: NodeKey = CURATOR, **changes: Any) -> bytes:
    """Return the file of a directory with these listings."""
    fields: dict[str, Any] = {
        "name": "rounds.example",
        "number": 1,
        "made_ms": NOW_MS,
        "expires_ms": NOW_MS + 7 * DAY_MS,
        "rounds": tuple(ListedRound(listing=listing, sightings=()) for listing in listings),
        "refused": (),
    }
    return json.dumps(make_directory(Directory(**(fields | changes)), key)).encode()
