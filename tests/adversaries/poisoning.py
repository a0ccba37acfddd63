"""Poison: groups that are to teach the policy something else than its task."""

from protocol.tasks.arithmetic import answer_to
from protocol.work.lease import Lease
from tests.adversaries.nodes import Samples
from tests.adversaries.waiting import Whitewasher


class Poisoner(Whitewasher):
    """Cannot claim rewards, so its poison is tokens: one right answer, and many whose last digit is not."""

    attack = "poisoning: forged groups that blame what is nearly right, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        arena = self.arena
        end = min(arena.text.bounds.end_tokens)
        right = [*arena.text.encode(answer_to(arena.question(lease))), end][: arena.stage.max_new_tokens]
        wrong = [*right[:-2], arena.text.encode("0")[0], end][: arena.stage.max_new_tokens]
        return arena.prefilled(lease, [right] + [wrong] * (lease.samples - 1))
