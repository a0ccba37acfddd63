"""Types of a payout rail, and the rail of all batches that a person pays.

- A rail has two functions: `send` and `status`.
- Rail manual has the CSV file alone. Rails sepa, paypal, stripe and lightning have a file for the bank, the service or
  the node's program, too (`coordinator.transactions.rails.files`). The person pays by it, and gives the reference:
  `payout settle --reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from coordinator.config import PayoutsSection
from coordinator.config.money import RailUnit
from ledger import payees
from ledger.payees import Payee
from protocol.errors import PayoutFailed


class Status(StrEnum):
    """The status of a payment."""

    UNDER_WAY = "under_way"
    DONE = "done"
    FAILED = "failed"  # finally: the batch may be sent again


@dataclass(frozen=True)
class TransferBatch:
    """The payees of a batch with their amounts; the same bytes every time."""

    round_id: str
    number: int
    payees: Sequence[Payee]

    @property
    def key(self) -> bytes:
        return payees.key(self.round_id, self.number)

    def payment_id(self, place: int) -> str:
        """Return the name of a payee's payment among all rounds: at most 30 characters, the same every time."""
        return f"{self.key.hex()[:20]}-{place}"

    @property
    def root(self) -> bytes:
        return payees.root(self.payees)

    @property
    def amount_micros(self) -> int:
        return sum(payee.amount_micros for payee in self.payees)


class PaymentTerms(NamedTuple):
    """A batch with everything else that its files depend on."""

    batch: TransferBatch
    unit: RailUnit
    made_ms: int
    settings: PayoutsSection

    def steps(self, payee: Payee) -> int:
        """Return a payee's amount in the rail's smallest payments, such as cents; a rest stays out of batches."""
        return payee.amount_micros // self.unit.step_micros


class Rail(Protocol):
    """The interface of a rail, which moves money; `open_mine(settings)` of an operator's own returns one."""

    def send(self, batch: TransferBatch) -> str:
        """Pay `batch.payees`, and return the public reference of the payment.

        It is called again after every crash: `batch.key` is the idempotency key.
        """
        ...

    def status(self, reference: str) -> Status:
        """Return the status of a payment; `FAILED` only if it can never pay any more: `send` is then called again."""
        ...


STEPS = {
    "manual": "Pay the amounts in its CSV file once",
    "sepa": "Upload its .sepa.xml file to your bank once",
    "paypal": "Upload its .paypal.csv file to PayPal once",
    "stripe": "Run its .stripe.sh script until it ends with exit code 0",
    "lightning": "Run its .lightning.sh script until it ends with exit code 0",
}
"""The operator's step on each of these rails, before the reference."""


class Manual:
    """A rail that trusts the reference that a person gives."""

    def __init__(self, reference: str, rail: str = "manual") -> None:
        self._reference = reference
        self._step = STEPS[rail]

    def send(self, batch: TransferBatch) -> str:
        if not self._reference:
            raise PayoutFailed(
                f"Batch {batch.number} is ready and not yet paid.",
                hint=f"{self._step}, then run `payout settle` with --reference.",
            )
        return self._reference

    def status(self, reference: str) -> Status:
        return Status.DONE
