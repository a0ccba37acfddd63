"""Leases taken without the means or the will to answer them, and prices that change under way."""

from pathlib import Path

from protocol.work.lease import Lease
from tests.adversaries.nodes import Adversary, Samples
from tests.coordinator.world import PRICE


class Griefer(Adversary):
    """Takes all the leases it gets, and lets them expire."""

    attack = "lease griefing: claims, and lets expire"
    wants = 64

    def weights(self, lease: Lease) -> Path | None:
        return None

    def work(self, lease: Lease, said: Samples) -> None:
        self.cheated.add(lease.lease_id)


class Braggart(Adversary):
    """Asks for ten times the groups that it answers, and answers the first few: the others go to nobody meanwhile."""

    attack = "throughput lie: asks for 40 groups a turn, answers 4"
    wants = 40
    hands = 4
    done = 0

    def ask(self) -> tuple[Lease, ...]:
        self.done = 0
        return super().ask()

    def work(self, lease: Lease, said: Samples) -> None:
        if self.done == self.hands:
            self.cheated.add(lease.lease_id)
        else:
            self.done += 1
            self.submit(lease, said)


class PriceRaiser(Adversary):
    """Bids low for its leases, and asks five times as much before it answers them."""

    attack = "price game: bids low, asks more before it answers"

    def ask(self) -> tuple[Lease, ...]:
        self._bid(PRICE)
        leases = super().ask()
        self._bid(5 * PRICE)
        return leases

    def work(self, lease: Lease, said: Samples) -> None:
        verdict = self.submit(lease, said)
        if verdict.outcome == "accepted" and verdict.credit_micros > verdict.tokens * PRICE // 10**6:
            self.cheated.add(lease.lease_id)

    def _bid(self, price: int) -> None:
        self.arena.world.join(self.number, price)
