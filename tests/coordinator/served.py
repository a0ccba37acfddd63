"""A whole coordinator in this process, and what nodes, the learner and strangers say to it over HTTP."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from aiohttp import ClientResponse, web
from aiohttp.test_utils import BaseTestServer, TestClient

from coordinator.api.guard import Bounds
from coordinator.app import make_runner
from coordinator.base.clock import now_ms
from coordinator.config import load
from coordinator.service.round import Round
from protocol import limits
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.learning import Publication, UploadedFile
from protocol.work.lease import Lease
from protocol.work.messages import (
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Register,
    Submission,
    SubmissionReply,
    Verdict,
    seal_request,
)
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.policy_files import END_TOKEN, encode, policy_files
from tests.coordinator.world import empty_store

M = TypeVar("M", bound=Message)
Client = TestClient[web.Request, None]

SETTINGS = [
    "learner.groups_per_update=2",
    "sampling.samples_per_group=2",
    "sampling.max_new_tokens=6",
    "publish.chunk_size_bytes=1024",
    "leases.newcomer_leases=16",
    "audit.first_groups=0",
    "audit.floor=0",
    "audit.trusted_floor=0",
]


class Server(BaseTestServer):
    """The coordinator's own server on a free port."""

    def __init__(self, round_: Round, bounds: Bounds | None) -> None:
        super().__init__()
        self._round, self._bounds = round_, bounds

    async def _make_runner(self, **_options: object) -> web.AppRunner:
        return make_runner(self._round, self._bounds)


class Served:
    """A round, its client, and the words of both sides."""

    def __init__(self, round_: Round, client: Client) -> None:
        self.round = round_
        self.client = client

    @property
    def operator(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.round.operator_token}"}

    def sealed(self, key: NodeKey, path: str, message: Message, *, late_ms: int = 0, nonce: bytes = b"") -> bytes:
        return seal_request(
            key,
            round_id=self.round.round_id,
            path=path,
            nonce=nonce or secrets.token_bytes(limits.NONCE_BYTES),
            now_ms=now_ms() - late_ms,
            body=message,
        )

    async def post(self, path: str, data: bytes) -> ClientResponse:
        return await self.client.post(path, data=BytesIO(data))

    async def call(self, key: NodeKey, path: str, message: Message, kind: type[M]) -> M:
        """A signed request that must succeed."""
        response = await self.post(path, self.sealed(key, path, message))
        data = await response.read()
        assert response.status == 200, canonical.decode(data)
        return kind.from_bytes(data)

    async def join(self, number: int = 1, price_micros_per_mtok: int = 1_000_000) -> NodeKey:
        key, address = NodeKey(number.to_bytes(32)), "127.0.0.1:1"
        message = Register(
            name=f"n{number}", price_micros_per_mtok=price_micros_per_mtok, addresses=(address,), agent=""
        )
        await self.call(key, "/v1/nodes", message, HeartbeatReply)
        return key

    async def lease(self, key: NodeKey, groups: int = 1) -> tuple[Lease, ...]:
        reply = await self.call(key, "/v1/leases", LeaseRequest(version=1, groups=groups), LeaseReply)
        return reply.leases

    async def submit(self, key: NodeKey, *rollouts: bytes) -> tuple[Verdict, ...]:
        reply = await self.call(key, "/v1/rollouts", Submission(rollouts=rollouts), SubmissionReply)
        return reply.verdicts

    def answer(self, key: NodeKey, lease: Lease) -> bytes:
        tokens = [*encode("85"), END_TOKEN]
        assert len(unpack_tokens(lease.prompt)) == len("47+38=")
        sample = Sample(tokens=pack_tokens(tokens), logprobs=pack_logprobs([-0.5] * 3), finish="stop")
        claim = RolloutClaim(
            round_id=self.round.round_id,
            lease_id=lease.lease_id,
            lease_digest=lease.digest,
            samples=(sample,) * lease.samples,
        )
        return key.seal("rollout", claim.to_bytes())

    async def publish(self, version: int = 1, weights: bytes = b"weights") -> None:
        """Publish a version as the learner does."""
        files = policy_files(weights)
        for name, data in files.items():
            path = f"/v1/learner/uploads/{version}/{name}?digest={chunks.digest(data)}"
            assert (await self.client.put(path, data=BytesIO(data), headers=self.operator)).status == 204
        uploads = tuple(UploadedFile(path=name, digest=chunks.digest(data)) for name, data in files.items())
        message = Publication(version=version, update=version - 1, files=uploads)
        response = await self.client.post("/v1/learner/versions", data=message.to_bytes(), headers=self.operator)
        assert response.status == 204, await response.read()


@asynccontextmanager
async def serve(folder: Path, *settings: str, bounds: Bounds | None = None) -> AsyncIterator[Served]:
    store = folder / "round" / "state.db"
    if not store.exists():
        store.parent.mkdir(exist_ok=True)
        store.write_bytes(empty_store())
    round_ = Round(load(None, [f"round.directory={folder / 'round'}", *SETTINGS, *settings]))
    with closing(round_):
        client: Client = TestClient(Server(round_, bounds))
        async with client:
            yield Served(round_, client)
