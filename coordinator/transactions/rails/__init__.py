"""Rails: the ways to move the money of a payout batch. A rail has two functions.

- `send` pays a batch and returns the payment's reference. It is called again after every failure and crash, so it must
  find out whether it has paid this batch before: the batch's `key` is the idempotency key for that.
- `status` returns the status of a reference.
- A person pays the batches of some rails, by a file that `files` writes, and `Manual` trusts the reference.
- A plug-in is named in `payouts.rail` as `module:function`; the function builds the rail from the `payouts` settings.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from coordinator.config import PayoutsSection
from coordinator.config.money import BY_HAND
from coordinator.transactions.rails.base import Rail
from protocol.errors import ConfigInvalid
from protocol.start import allow_left_out


def scheme(settings: PayoutsSection) -> str:
    """Return the prefix of the addresses that this round pays to; empty if any address is accepted."""
    return f"{settings.rail}:" if settings.rail in (*BY_HAND, "evm") and settings.rail != "manual" else ""


def open_rail(settings: PayoutsSection, folder: Path, reference: str) -> Rail:
    """Return the rail of the settings; a person gives `reference`, relative files are below the round's folder."""
    if reference and settings.rail not in BY_HAND:
        raise ConfigInvalid(f"Rail {settings.rail} finds its references itself.", hint="Leave --reference out.")
    match settings.rail:
        case "evm":
            from coordinator.transactions.rails.evm import open_evm

            return open_evm(settings, folder)
        case rail if rail in BY_HAND:
            from coordinator.transactions.rails.base import Manual

            return Manual(reference, rail)
        case _:
            return _plug_in(settings.rail)(settings)


def _plug_in(name: str) -> Callable[[PayoutsSection], Rail]:
    module, _, function = name.partition(":")
    allow_left_out()  # an operator's rail may sign with a cloud's library
    try:
        made: Callable[[PayoutsSection], Rail] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigInvalid(
            f"payouts.rail: {error}.", hint=f"Rails: {', '.join(BY_HAND)}, evm, or module:function."
        ) from None
    return made
