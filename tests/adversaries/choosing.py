"""Choices that a lease leaves nobody: among samples, among prompts, and where a sample ends."""

from pathlib import Path

import numpy as np

from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Adversary, Samples

ATTEMPTS = 4


class BestOfMany(Adversary):
    """Draws every sample several times, and sends the one that earns the most."""

    attack = f"best of {ATTEMPTS}, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        arena = self.arena
        attempts = [said]
        for number in range(1, ATTEMPTS):
            attempts.append(arena.sample(arena.policy(lease.version), lease, seed=lease.seed ^ number))
        rewards = [arena.rewards(lease, attempt) for attempt in attempts]
        best = np.argmax(rewards, axis=0)  # the leased one, where none is better
        chosen = [attempts[attempt][place] for place, attempt in enumerate(best.tolist())]
        return arena.prefilled(lease, [unpack_tokens(sample.tokens).tolist() for sample in chosen])


class EarlyEnd(Adversary):
    """Samples one token of each completion, and ends it there: less work for the same lease."""

    attack = "length: ended early, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        end = min(self.arena.text.bounds.end_tokens)
        return self.arena.prefilled(lease, [[int(unpack_tokens(sample.tokens)[0]), end] for sample in said])


class Padded(Adversary):
    """Goes on after the end, to be paid for more tokens."""

    attack = "length: padded to the longest, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        arena, longest = self.arena, self.arena.stage.max_new_tokens
        ends, filler = arena.text.bounds.end_tokens, arena.text.encode("0")[0]
        rows = [[t for t in unpack_tokens(sample.tokens).tolist() if t not in ends] for sample in said]
        return arena.prefilled(lease, [(row + [filler] * longest)[:longest] for row in rows])


class CherryPicker(Adversary):
    """Gives back the leases whose sums need a carry, and does the others honestly."""

    attack = "cherry-picking: gives hard prompts back"

    def weights(self, lease: Lease) -> Path | None:
        return None if self.is_hard(lease) else super().weights(lease)

    def is_hard(self, lease: Lease) -> bool:
        first, second = self.arena.question(lease).rstrip("=").split("+")
        return int(first) % 10 + int(second) % 10 > 9

    def work(self, lease: Lease, said: Samples) -> None:
        if self.is_hard(lease):
            self.cheated.add(lease.lease_id)
            self.arena.world.give_back(self.key, lease)
        else:
            self.submit(lease, said)
