"""Work handed on: garbage told of groups that somebody else has to finish."""

from pathlib import Path

from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Adversary, Samples
from tests.coordinator.world import fragment


class Teller(Adversary):
    """Tells of tokens that nobody sampled, gives the lease back, and is paid when another has finished the group."""

    attack = "fragments: garbage told, and the lease given back"

    def weights(self, lease: Lease) -> Path | None:
        return None

    def work(self, lease: Lease, said: Samples) -> None:
        if lease.prefixes:  # its own, come back
            self.arena.world.give_back(self.key, lease)
            return
        self.cheated.add(lease.lease_id)
        arena = self.arena
        filler = arena.text.encode("7")
        made = arena.prefilled(lease, [filler * (arena.stage.max_new_tokens - 1)] * lease.samples)
        fragments = {number: unpack_tokens(sample.tokens).tolist() for number, sample in enumerate(made)}
        arena.world.tell(self.key, fragment(self.key, lease, fragments), held=[lease])
        arena.world.give_back(self.key, lease)
