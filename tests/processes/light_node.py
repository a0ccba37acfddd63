"""A light node: speaks the whole protocol as an honest node does, without engine and data plane.

- Its completions are random but well-formed: as likely as an untrained policy would make them.
- A whole crowd of them costs little, so they make load; and each signs whatever a test wants signed.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import httpx
import numpy as np

from protocol import limits
from protocol.errors import NotFound, SwarmError, UnknownNode, Unreachable
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import (
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    Transfer,
    Verdict,
    seal_request,
)
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens

M = TypeVar("M", bound=Message)

VOCABULARY, END = 320, 2
"""Size and end token of the embedded tokenizer."""

PRICE = 1_000_000


class LightNode:
    """An identity and its HTTP client; with several coordinator addresses it tries the next if one fails."""

    def __init__(self, join_string: str, *others: str, seed: bytes | None = None, max_new_tokens: int = 8) -> None:
        url, _, self.round_id = join_string.partition("#")
        self._doors = deque([url, *(other.partition("#")[0] for other in others)])
        self.seed = seed or secrets.token_bytes(32)
        self.key = NodeKey(self.seed)
        self._max_new_tokens = max_new_tokens
        self._chance = np.random.default_rng(list(self.seed))
        self._session = secrets.token_hex(8)
        self.http = httpx.Client(base_url=url, timeout=30)

    def close(self) -> None:
        self.http.close()

    def register(self, addresses: tuple[str, ...] = ()) -> HeartbeatReply:
        name = f"light-{self.key.node_id[-6:]}"
        message = Register(
            name=name, price_micros_per_mtok=PRICE, addresses=addresses, shares=bool(addresses), agent="light"
        )
        return self.call("/v1/nodes", message, HeartbeatReply)

    def beat(self, version: int = 0) -> HeartbeatReply:
        moved = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)
        message = Heartbeat(
            session=self._session,
            version=version,
            phase="idle",
            tokens_per_s=1.0,
            transfer=moved,
            blames=(),
            reached=(),
        )
        return self.call("/v1/heartbeat", message, HeartbeatReply)

    def lease(self, version: int, groups: int = 1, *, turns_only: bool = False) -> tuple[Lease, ...]:
        message = LeaseRequest(version=version, groups=groups, continues=turns_only, finishing=turns_only)
        return self.call("/v1/leases", message, LeaseReply).leases

    def give_back(self, leases: Iterable[Lease]) -> None:
        message = ReturnLeases(lease_ids=tuple(lease.lease_id for lease in leases))
        self.call("/v1/leases/return", message, HeartbeatReply)

    def submit(self, *rollouts: bytes) -> tuple[Verdict, ...]:
        return self.submitted(*rollouts).verdicts

    def submitted(self, *rollouts: bytes) -> SubmissionReply:
        """Submit rollouts; return the whole reply, with the next turns of episodes."""
        return self.call("/v1/rollouts", Submission(rollouts=rollouts), SubmissionReply)

    def claim(self, lease: Lease) -> RolloutClaim:
        """A well-formed answer to a lease."""
        return RolloutClaim(
            round_id=self.round_id,
            lease_id=lease.lease_id,
            lease_digest=lease.digest,
            samples=tuple(self._sample() for _ in range(lease.samples)),
        )

    def answer(self, lease: Lease) -> bytes:
        """The signed answer."""
        return self.key.seal("rollout", self.claim(lease).to_bytes())

    def turn(self, lease: Lease, tokens: Sequence[int]) -> bytes:
        """A signed turn in which every sample that goes on says these tokens."""
        said = Sample(tokens=pack_tokens(list(tokens)), logprobs=pack_logprobs([-1.0] * len(tokens)), finish="stop")
        ends = [prefix.finish for prefix in lease.prefixes] or [""] * lease.samples
        samples = tuple(Sample(tokens=b"", logprobs=b"", finish=end) if end else said for end in ends)
        claim = RolloutClaim(
            round_id=self.round_id, lease_id=lease.lease_id, lease_digest=lease.digest, samples=samples
        )
        return self.key.seal("rollout", claim.to_bytes())

    def call(self, path: str, message: Message, kind: type[M]) -> M:
        """Send a signed request; raise a named error, or `Unreachable` without an answer."""
        try:
            response = self.http.post(path, content=self.sealed(path, message))
        except httpx.HTTPError as error:
            self._doors.rotate(-1)
            self.http.base_url = self._doors[0]
            raise Unreachable(f"{path}: {error}") from error
        if response.is_error:
            raise SwarmError.from_wire(canonical.decode(response.content))
        return kind.from_bytes(response.content)

    def sealed(self, path: str, message: Message) -> bytes:
        """The bytes of a signed request that was not sent before."""
        return seal_request(
            self.key,
            round_id=self.round_id,
            path=path,
            nonce=secrets.token_bytes(limits.NONCE_BYTES),
            now_ms=time.time_ns() // 1_000_000,
            body=message,
        )

    def _sample(self) -> Sample:
        """Draw a sample up to the end token, or as long as it may be; every token as likely as chance."""
        drawn = self._chance.integers(0, VOCABULARY, self._max_new_tokens)
        ends = np.flatnonzero(drawn == END)
        tokens = drawn[: ends[0] + 1] if len(ends) else drawn
        return Sample(
            tokens=pack_tokens(tokens.tolist()),
            logprobs=pack_logprobs([-float(np.log(VOCABULARY))] * len(tokens)),
            finish="stop" if len(ends) else "length",
        )


class Labourer(threading.Thread):
    """A light node that works until it is told to stop, and repeats itself until it has an answer.

    It samples for `samples_for_s`; at 0, coordinator and learner compute without a pause for as long as it works.
    """

    def __init__(
        self, *join_strings: str, groups: int = 2, max_new_tokens: int = 8, samples_for_s: float = 0.0
    ) -> None:
        super().__init__(name="labourer")
        self.node = LightNode(*join_strings, max_new_tokens=max_new_tokens)
        self._groups = groups
        self._samples_for_s = samples_for_s
        self._enough = threading.Event()
        self.leased: list[str] = []
        """The leases that it heard of."""
        self.acknowledged: dict[str, tuple[bytes, Verdict]] = {}
        """Lease id → what was sent and the verdict that came back."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self._work()
        except BaseException as failure:  # told to whoever joins
            self.failure = failure

    def finish(self) -> None:
        """End after the work in hand has its verdicts."""
        self._enough.set()
        self.join(timeout=60)
        self.node.close()
        if self.failure is not None:
            raise self.failure
        assert not self.is_alive(), "a labourer waits for a verdict that never comes"

    def _work(self) -> None:
        try:
            newest = self.node.beat().newest_version
            leases = self.node.lease(newest, self._groups) if newest else ()
        except UnknownNode:
            with suppress(Unreachable):
                self.node.register()
            return
        except (Unreachable, NotFound):
            self._enough.wait(0.05)
            return
        self.leased += [lease.lease_id for lease in leases]
        answers = {lease.lease_id: self.node.answer(lease) for lease in leases}
        if not answers:
            self._enough.wait(0.2)
            return
        self._enough.wait(self._samples_for_s)
        while True:
            with suppress(Unreachable):
                # In the order of the answers: a verdict on one of an unknown lease, which is not decoded, names none.
                for answer, verdict in zip(list(answers.items()), self.node.submit(*answers.values()), strict=True):
                    self.acknowledged[answer[0]] = (answer[1], verdict)
                return
            threading.Event().wait(0.05)


@contextmanager
def at_work(*join_strings: str, others: Iterable[str] = (), samples_for_s: float = 0.0) -> Iterator[list[Labourer]]:
    """A labourer each, as long as the body takes; they end while there is a coordinator left to answer them."""
    crowd = [Labourer(join_string, *others, samples_for_s=samples_for_s) for join_string in join_strings]
    for labourer in crowd:
        labourer.start()
    try:
        yield crowd
    finally:
        for labourer in crowd:
            labourer.finish()
