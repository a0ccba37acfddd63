"""Payment by a person, who then gives the reference: `payout settle --reference`.

Rail manual has the CSV file alone. Rails sepa, paypal, stripe and lightning have a file for the bank, the service or
the node's program, too (`coordinator.transactions.rails.files`).
"""

from coordinator.transactions.rails.base import Status, TransferBatch
from protocol.errors import PayoutFailed

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
