"""Rails: who moves the money of a payout batch. Two functions are all that one needs.

- `send` pays a batch and says by which reference that can be found. It is called again after every failure and crash,
  so it must find out whether it has paid this batch before: the batch's `key` is the idempotency key for that.
- `status` says what became of a reference.
- A plug-in is named in `payouts.rail` as `module:function`; the function makes the rail of the `payouts` settings.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from coordinator.config import PayoutsSection
from ledger import payees
from ledger.payees import Payee
from protocol.errors import ConfigInvalid


class Status(StrEnum):
    """What became of a payment."""

    UNDER_WAY = "under_way"
    DONE = "done"
    FAILED = "failed"  # for certain and for ever: the batch may be sent again


@dataclass(frozen=True)
class Batch:
    """Who gets what; the same bytes whenever it is asked for."""

    round_id: str
    number: int
    payees: Sequence[Payee]

    @property
    def key(self) -> bytes:
        return payees.key(self.round_id, self.number)

    @property
    def root(self) -> bytes:
        return payees.root(self.payees)

    @property
    def amount_micros(self) -> int:
        return sum(payee.amount_micros for payee in self.payees)


class Rail(Protocol):
    """What moves money."""

    def send(self, batch: Batch) -> str: ...

    def status(self, reference: str) -> Status: ...


def scheme(settings: PayoutsSection) -> str:
    """What the addresses that this round pays to begin with; empty where any will do."""
    return "evm:" if settings.rail == "evm" else ""


def open_rail(settings: PayoutsSection, folder: Path, reference: str) -> Rail:
    """The rail that the operator chose; a reference is a person's word, relative files are below the round's folder."""
    if reference and settings.rail != "manual":
        raise ConfigInvalid(f"Rail {settings.rail} knows its references itself.", hint="Leave --reference out.")
    match settings.rail:
        case "manual":
            from coordinator.money.rails.manual import Manual

            return Manual(reference)
        case "evm":
            from coordinator.money.rails.evm import open_evm

            return open_evm(settings, folder)
        case _:
            return _plug_in(settings.rail)(settings)


def _plug_in(name: str) -> Callable[[PayoutsSection], Rail]:
    module, _, function = name.partition(":")
    try:
        made: Callable[[PayoutsSection], Rail] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigInvalid(f"payouts.rail: {error}.", hint="Rails: manual, evm, or module:function.") from None
    return made
