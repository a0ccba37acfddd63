"""Hostile payloads: claims that no engine could have made, signed as they should be; and a rival's name on them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from protocol.wire import canonical
from protocol.work.lease import Lease
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens
from tests.adversaries.nodes import Adversary, Samples

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena

Spoil = Callable[["Hostile", Lease, Samples], bytes]


def with_first(change: Callable[[Sample], dict[str, object]]) -> Spoil:
    """The honest claim, but for its first sample."""

    def spoil(node: "Hostile", lease: Lease, said: Samples) -> bytes:
        first, *rest = said
        return node.claim(lease, (first.model_copy(update=change(first)), *rest))

    return spoil


def with_fields(**change: object) -> Spoil:
    """The honest claim, but for these fields."""

    def spoil(node: "Hostile", lease: Lease, said: Samples) -> bytes:
        value = canonical.decode(node.claim(lease, said))
        assert isinstance(value, dict)
        return canonical.encode(value | change)

    return spoil


def logprobs(value: float) -> Callable[[Sample], dict[str, object]]:
    def change(sample: Sample) -> dict[str, object]:
        return {"logprobs": pack_logprobs(np.full(len(sample.tokens) // 4, value, "<f4"))}

    return change


SPOILT: dict[str, tuple[Spoil, str]] = {
    "log-probability NaN": (with_first(logprobs(float("nan"))), "logprobs_invalid"),
    "log-probability -inf": (with_first(logprobs(float("-inf"))), "logprobs_invalid"),
    "log-probability above 0": (with_first(logprobs(9.0)), "logprobs_invalid"),
    "log-probability +1e-6": (with_first(logprobs(1e-6)), "logprobs_invalid"),
    "log-probability -3e38": (with_first(logprobs(-3e38)), "logprobs_invalid"),
    "token 2^32 - 1": (with_first(lambda s: {"tokens": pack_tokens([2**32 - 1])}), "tokens_invalid"),
    "no tokens": (with_first(lambda s: {"tokens": b"", "logprobs": b""}), "tokens_invalid"),
    "half a token": (with_first(lambda s: {"tokens": s.tokens[:-1]}), "tokens_invalid"),
    "a thousand tokens": (with_first(lambda s: {"tokens": pack_tokens([5] * 1000)}), "tokens_invalid"),
    "a finish that is none": (
        with_first(lambda s: {"finish": "length" if s.finish == "stop" else "stop"}),
        "tokens_invalid",
    ),
    "fewer log-probabilities": (with_first(lambda s: {"logprobs": s.logprobs[:-4]}), "logprobs_invalid"),
    "fewer samples": (lambda node, lease, said: node.claim(lease, said[:-1]), "lease_mismatch"),
    "another lease's words": (with_fields(lease_digest="2" * 64), "lease_mismatch"),
    "a digest that is a number": (with_fields(lease_digest=2**63 - 1), "malformed_message"),
    "another round": (with_fields(round_id="b" * 64), "lease_mismatch"),
    "a field too many": (with_fields(reward=1.0), "malformed_message"),
    "garbage": (lambda *_: b"\xff" * 100, "malformed_message"),
    "a nest of 10,000": (lambda *_: b"\x91" * 10_000, "message_too_large"),
    "ten megabytes": (lambda *_: bytes(10**7), "message_too_large"),
}
"""The spoilt messages that are sent, each with the error that names it."""


class Hostile(Adversary):
    """Works, and spoils every claim in another way."""

    attack = "hostile payloads: " + f"{len(SPOILT)} kinds"

    def __init__(self, arena: "Arena", number: int) -> None:
        super().__init__(arena, number)
        self.said: dict[str, set[str]] = {}
        """The answers to each kind of message."""

    def work(self, lease: Lease, said: Samples) -> None:
        self.cheated.add(lease.lease_id)
        name = list(SPOILT)[(len(self.cheated) - 1) % len(SPOILT)]
        spoil, _ = SPOILT[name]
        verdict = self.send(self.key.seal("rollout", spoil(self, lease, said)))
        self.said.setdefault(name, set()).add(verdict.code)
        self.arena.world.give_back(self.key, lease)  # of what names no lease, none has ended


class FalseAccuser(Adversary):
    """Has overheard which leases a rival holds, and answers them with garbage before the rival can."""

    attack = "false accusation: garbage for a rival's leases"

    def ask(self) -> tuple[Lease, ...]:
        arena = self.arena
        rival = next(node for node in arena.nodes if not isinstance(node, Adversary))
        for lease in arena.world.offer(rival.key, version=arena.version, groups=1).leases:
            self.cheated.add(lease.lease_id)
            self.submit(lease, arena.prefilled(lease, [[5]] * lease.samples))
            rival.work(lease, arena.sample(arena.policy(lease.version), lease))
        return ()
