"""Rails: who moves the money of a payout batch. Two functions are all that one needs.

- `send` pays a batch and says by which reference that can be found. It is called again after every failure and crash,
  so it must find out whether it has paid this batch before: the batch's `key` is the idempotency key for that.
- `status` says what became of a reference.
- A plug-in is named in `payouts.rail` as `module:function`; the function makes the rail of the `payouts` settings.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from coordinator.config import PayoutsSection
from coordinator.transactions.rails.base import Rail
from protocol.errors import ConfigInvalid


def scheme(settings: PayoutsSection) -> str:
    """What the addresses that this round pays to begin with; empty where any will do."""
    return "evm:" if settings.rail == "evm" else ""


def open_rail(settings: PayoutsSection, folder: Path, reference: str) -> Rail:
    """The rail that the operator chose; a reference is a person's word, relative files are below the round's folder."""
    if reference and settings.rail != "manual":
        raise ConfigInvalid(f"Rail {settings.rail} knows its references itself.", hint="Leave --reference out.")
    match settings.rail:
        case "manual":
            from coordinator.transactions.rails.manual import Manual

            return Manual(reference)
        case "evm":
            from coordinator.transactions.rails.evm import open_evm

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
