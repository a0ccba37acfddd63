"""Forged results: tokens that nobody sampled for this lease, with the log-probabilities of a true prefill."""

from pathlib import Path

from protocol.tasks.arithmetic import answer_to
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Adversary, Samples


class Canned(Adversary):
    """Computes the sum, says it, and is rewarded in full for every sample."""

    attack = "forged: canned right answers, prefilled"

    def weights(self, lease: Lease) -> Path | None:
        return None

    def forge(self, lease: Lease, said: Samples) -> Samples:
        tokens = self.spoken(answer_to(self.arena.question(lease)))
        return self.arena.prefilled(lease, [tokens] * lease.samples)

    def spoken(self, text: str) -> list[int]:
        """A completion that says this, as far as there is room."""
        arena = self.arena
        return [*arena.text.encode(text), min(arena.text.bounds.end_tokens)][: arena.stage.max_new_tokens]


class OldWork(Adversary):
    """Works once, and answers every later lease with that."""

    attack = "replay: own old work for new leases, prefilled"
    first: Samples = ()

    def weights(self, lease: Lease) -> Path | None:
        return None if self.first else super().weights(lease)

    def cheats(self, lease: Lease) -> bool:
        return bool(self.first)

    def forge(self, lease: Lease, said: Samples) -> Samples:
        return self.arena.prefilled(lease, [unpack_tokens(sample.tokens).tolist() for sample in self.first])

    def work(self, lease: Lease, said: Samples) -> None:
        super().work(lease, said)
        self.first = self.first or said


class SentTwice(Adversary):
    """Works, and sends everything three times: the same bytes, and under a new signature of other bytes."""

    attack = "replay: the same work sent again"

    def work(self, lease: Lease, said: Samples) -> None:
        self.submit(lease, said)
        again = self.submit(lease, said)
        assert again.outcome == "already_accepted"
        self.cheated.add(lease.lease_id + "/again")
        self.submit(lease, said[::-1])


class Copied(Adversary):
    """Has a peer who does the work of its own lease, and passes that on as an answer to this one."""

    attack = "plagiarism: a peer's rollouts, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        peers = self.arena.sample(self.arena.policy(lease.version), lease, seed=lease.seed ^ 1)
        return self.arena.prefilled(lease, [unpack_tokens(sample.tokens).tolist() for sample in peers])

    def weights(self, lease: Lease) -> Path | None:
        return None


class OneToken(Adversary):
    """Works, and changes the first token of one sample of a group for the better."""

    attack = "plagiarism: one token edited, prefilled"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        arena = self.arena
        tokens = [unpack_tokens(sample.tokens).tolist() for sample in said]
        wanted = arena.text.encode(answer_to(arena.question(lease)))[0]
        wrong = [row for row in tokens if row[0] != wanted and len(row) > 1]
        if not wrong:
            return said  # there is nothing to improve
        wrong[0][0] = wanted
        return arena.prefilled(lease, tokens)
