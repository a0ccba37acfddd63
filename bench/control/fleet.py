"""Ten thousand nodes as their signatures: everything they would say, signed shortly before it is sent."""

import secrets
import time
from collections.abc import Iterator, Sequence

from protocol import limits
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import Heartbeat, LeaseRequest, Register, Submission, Transfer, seal_request
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens
from tests.coordinator.policy_files import END_TOKEN, encode

Prepared = list[tuple[str, bytes]]

PRICE = 1_000_000
"""Micro-units for a million tokens, one for each: every lease reserves something, every answer earns something, and the
usual budget lasts for the whole load."""


class Fleet:
    """A number of nodes in a round."""

    def __init__(self, round_id: str, keys: Sequence[NodeKey], first: int = 0) -> None:
        self._round_id = round_id
        self.keys = keys
        self._first = first
        """The place of its first node in the whole fleet."""

    @classmethod
    def of(cls, round_id: str, size: int) -> "Fleet":
        return cls(round_id, [NodeKey(number.to_bytes(32)) for number in range(1, size + 1)])

    def parts(self, size: int) -> Iterator["Fleet"]:
        """Yield its nodes, `size` at a time."""
        for first in range(0, len(self.keys), size):
            yield Fleet(self._round_id, self.keys[first : first + size], first)

    def registrations(self) -> Prepared:
        return [
            self._signed(
                key,
                "/v1/nodes",
                Register(name=f"n{n}", price_micros_per_mtok=PRICE, addresses=(), shares=False, agent="bench"),
            )
            for n, key in enumerate(self.keys, self._first)
        ]

    def heartbeats(self) -> Prepared:
        moved = Transfer(from_peers=10**9, from_seeder=10**9, from_http=0, to_peers=10**9)
        beat = Heartbeat(
            session="0" * 16, version=1, phase="generating", tokens_per_s=900.5, transfer=moved, blames=(), reached=()
        )
        return [self._signed(key, "/v1/heartbeat", beat) for key in self.keys]

    def lease_requests(self) -> Prepared:
        return [self._signed(key, "/v1/leases", LeaseRequest(version=1, groups=1)) for key in self.keys]

    def submissions(self, leases: list[Lease]) -> Prepared:
        """Each node's answer to its lease, of those of the whole fleet."""
        own = leases[self._first : self._first + len(self.keys)]
        return [
            self._signed(key, "/v1/rollouts", Submission(rollouts=(self._answer(key, lease),)))
            for key, lease in zip(self.keys, own, strict=True)
        ]

    def _answer(self, key: NodeKey, lease: Lease) -> bytes:
        sample = Sample(
            tokens=pack_tokens([*encode("85"), END_TOKEN]), logprobs=pack_logprobs([-0.5] * 3), finish="stop"
        )
        claim = RolloutClaim(
            round_id=self._round_id,
            lease_id=lease.lease_id,
            lease_digest=lease.digest,
            samples=(sample,) * lease.samples,
        )
        return key.seal("rollout", claim.to_bytes())

    def _signed(self, key: NodeKey, path: str, message: Message) -> tuple[str, bytes]:
        nonce, now_ms = secrets.token_bytes(limits.NONCE_BYTES), time.time_ns() // 1_000_000
        return path, seal_request(key, round_id=self._round_id, path=path, nonce=nonce, now_ms=now_ms, body=message)
