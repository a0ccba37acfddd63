"""Structural mismatch: work that counts as more than what is looked at, since two readers see two things in it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgpack

from protocol.policy import chunks
from protocol.wire import canonical
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Adversary, Samples
from tests.coordinator.world import ROUND

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena

TOKEN = 4
"""Bytes of a token, and of its log-probability."""


def told(lease: Lease, said: Samples, at: int, previous: str = "") -> Fragment:
    """Return a fragment with the next token of every incomplete sample."""
    span = slice(TOKEN * at, TOKEN * (at + 1))
    parts = tuple(
        FragmentPart(sample=number, start=at, tokens=sample.tokens[span], logprobs=sample.logprobs[span], finish="")
        for number, sample in enumerate(said)
        if len(sample.tokens) > span.stop
    )
    return Fragment(round_id=ROUND, lease_id=lease.lease_id, lease_digest=lease.digest, previous=previous, parts=parts)


def longest(said: Samples) -> int:
    """Tokens of the longest sample."""
    return max(len(sample.tokens) for sample in said) // TOKEN


class ToldTwice(Adversary):
    """Samples, tells of each first token, hands the group on to itself, and answers with all tokens once more."""

    attack = "structural mismatch: told tokens answered again, prefilled"
    wants = 1

    def work(self, lease: Lease, said: Samples) -> None:
        if lease.prefixes or longest(said) < 2:
            self.submit(lease, said)
            return
        world = self.arena.world
        world.tell(self.key, self.key.seal("fragment", told(lease, said, 0).to_bytes()), held=[lease])
        world.give_back(self.key, lease)
        for again in self.ask():  # at once, before anybody else goes on with it
            self.cheated.add(again.lease_id)
            self.submit(again, self.repeated(again, said))

    def repeated(self, lease: Lease, said: Samples) -> Samples:
        """Return all samples, without the beginnings that the prefixes already have."""
        tokens = [unpack_tokens(sample.tokens).tolist() for sample in said]
        before = [unpack_tokens(prefix.tokens).tolist() for prefix in lease.prefixes] or [[] for _ in tokens]
        most = self.arena.stage.max_new_tokens
        whole = self.arena.prefilled(lease, [(old + new)[:most] for old, new in zip(before, tokens, strict=True)])
        return tuple(
            sample.model_copy(
                update={"tokens": sample.tokens[TOKEN * len(old) :], "logprobs": sample.logprobs[TOKEN * len(old) :]}
            )
            for old, sample in zip(before, whole, strict=True)
        )


def with_first(**change: object) -> Callable[[Fragment], Fragment]:
    """The fragment, but for its first part."""
    return lambda sound: sound.model_copy(
        update={"parts": (sound.parts[0].model_copy(update=change), *sound.parts[1:])}
    )


PARTS: dict[str, Callable[[Fragment], Fragment]] = {
    "tokens that were told before": with_first(start=0),
    "tokens behind a gap": with_first(start=2),
    "a sample twice": lambda sound: sound.model_copy(update={"parts": (*sound.parts, sound.parts[0])}),
    "a sample beyond the group": with_first(sample=63),
    "two log-probabilities for a token": with_first(logprobs=bytes(2 * TOKEN)),
    "an end that is none": with_first(finish="stop"),
    "another lease": lambda sound: sound.model_copy(update={"lease_digest": "0" * 64}),
    "nothing told before": lambda sound: sound.model_copy(update={"previous": ""}),
}
"""Changes to a second fragment that would go with the first."""

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "keys in another order": lambda payload: msgpack.packb(dict(reversed(canonical.decode(payload).items()))),
    "a length in a longer form": lambda payload: b"\xde\x00" + bytes([payload[0] & 0x0F]) + payload[1:],
    "a key twice": lambda payload: bytes([payload[0] + 1]) + payload[1:] + canonical.encode("samples") + b"\x90",
    "a text in a longer form": lambda payload: payload.replace(b"\xd9\x40", b"\xda\x00\x40", 1),
    "text as bytes": lambda payload: canonical.encode(canonical.decode(payload) | {"round_id": ROUND.encode()}),
    "bytes behind the end": lambda payload: payload + b"\xc0",
}
"""Other bytes of a claim's payload that a careless reader takes for the same claim, or for another one."""


class Disagreeing(Adversary):
    """Works, but tells of each group what does not go together, or says its answer in other bytes."""

    attack = f"structural mismatch: {len(PARTS)} kinds of parts and {len(FORMS)} of bytes that disagree"

    def __init__(self, arena: "Arena", number: int) -> None:
        super().__init__(arena, number)
        self.taken: list[str] = []
        """Kinds that were not refused."""
        self.overpaid: list[str] = []
        """Kinds behind which an answer was paid for more than its tokens."""

    def work(self, lease: Lease, said: Samples) -> None:
        kinds = [*PARTS, *FORMS]
        kind = kinds[len(self.cheated) % len(kinds)]
        self.cheated.add(f"{lease.lease_id}/{kind}")
        refused = self.in_parts(lease, said, PARTS[kind]) if kind in PARTS else self.in_bytes(lease, said, FORMS[kind])
        self.taken += [] if refused else [kind]
        verdict = self.submit(lease, said)
        if verdict.tokens > sum(len(sample.tokens) // TOKEN for sample in said):
            self.overpaid.append(kind)
            self.cheated.add(lease.lease_id)

    def in_parts(self, lease: Lease, said: Samples, spoil: Callable[[Fragment], Fragment]) -> bool:
        """Return True if a fragment that does not fit its predecessor is rejected."""
        if longest(said) < 3:
            return True  # the policy has said too little to tell of it twice
        world, sound = self.arena.world, told(lease, said, 0)
        spoilt = spoil(told(lease, said, 1, chunks.digest(sound.to_bytes())))
        assert world.tell(self.key, self.key.seal("fragment", sound.to_bytes()), held=[lease]).taken
        if world.tell(self.key, self.key.seal("fragment", spoilt.to_bytes()), held=[lease]).taken:
            return False
        self.codes.append("not taken")
        self._was_noticed()
        return True

    def in_bytes(self, lease: Lease, said: Samples, spoil: Callable[[bytes], bytes]) -> bool:
        """Return True if a claim in another encoding is rejected."""
        return self.send(self.key.seal("rollout", spoil(self.claim(lease, said)))).outcome == "rejected"
