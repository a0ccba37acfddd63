"""Free keys that would hold up a broadcast: they register, beat as if they held the newest version, and never help.

- All keys of a crowd live on one thread, so that hundreds of them cost little; what others do to them is counted.
- Each asks for its plan, and signs receipts that praise others of the crowd: what a key can say for nothing.
- `dead` names a port that nobody listens on; `silent` accepts a stream and never answers; `drip` sends a byte of a
  chunk each second; `callers` names no address and calls those whom the plan says, never to answer; `liars` sends
  wrong bytes.
"""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Literal, TypeVar, get_args

import httpx
import trio

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path
from protocol.wire.frames import Chunk, Have, Want
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.messages import (
    Fetched,
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    PeerUpload,
    PlanRequest,
    Register,
    Transfer,
    TransferReceipt,
    seal_request,
)
from swarm_node.p2p.host import Host, open_host
from swarm_node.p2p.link import Link

Mode = Literal["dead", "silent", "drip", "callers", "liars"]
MODES: tuple[Mode, ...] = get_args(Mode)

PRICE = 1_000_000
DRIP_S = 1.0
PRAISED = 8
"""Others that a receipt names."""

M = TypeVar("M", bound=Message)


class Key:
    """A free key of a crowd."""

    def __init__(self, crowd: "FreeKeys", mode: Mode) -> None:
        self.crowd, self.mode = crowd, mode
        self.seed = secrets.token_bytes(32)
        self.signer = NodeKey(self.seed)
        self.name = self.signer.node_id
        self._session = secrets.token_hex(8)
        self.host: Host | None = None

    async def appear(self, http: httpx.AsyncClient, address: str) -> None:
        addresses = (address,) if address else ()
        message = Register(
            name=f"key-{self.name[-6:]}", price_micros_per_mtok=PRICE, addresses=addresses, shares=True, agent="key"
        )
        await self._call(http, "/v1/nodes", message, HeartbeatReply)

    async def beat(self, http: httpx.AsyncClient) -> int:
        """Say that it holds the newest version; the number of that."""
        nothing = Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0)
        message = Heartbeat(
            session=self._session,
            version=self.crowd.newest,
            phase="mirroring",
            tokens_per_s=0.0,
            transfer=nothing,
            blames=(),
            reached=(),
        )
        return (await self._call(http, "/v1/heartbeat", message, HeartbeatReply)).newest_version

    async def follow(self, http: httpx.AsyncClient, version: int) -> None:
        """Ask for the plan, call whom it says, and praise others."""
        plan = await self._call(http, "/v1/plan", PlanRequest(version=version), FetchPlan)
        if self.host is not None:
            self.host.call(peer for peer in plan.calls if peer.address)
        others = secrets.SystemRandom().sample(self.crowd.names, min(PRAISED, len(self.crowd.names)))
        receipt = TransferReceipt(
            round_id=self.crowd.round_id,
            version=version,
            seconds=0.5,
            uploads=tuple(
                PeerUpload(peer_id=name, size_bytes=limits.MIB, busy_s=0.1) for name in others if name != self.name
            ),
        )
        await self._call(
            http, "/v1/fetched", Fetched(receipt=self.signer.seal("receipt", receipt.to_bytes())), HeartbeatReply
        )

    async def answer(self, link: Link) -> None:
        """Handle a stream."""
        self.crowd.streams += 1
        with suppress(PeerFault):
            if self.mode != "callers" and (held := self.crowd.held()):
                for start in range(0, len(held), limits.EXCHANGE_HAVE_NAMES_MAX):
                    await link.send(Have(held[start : start + limits.EXCHANGE_HAVE_NAMES_MAX]), stall_s=5.0)
            while True:
                for message in await link.receive():
                    if isinstance(message, Want):
                        self.crowd.wants += 1
                        await self._betray(link, message.chunk)

    async def _betray(self, link: Link, chunk: ChunkId) -> None:
        data = bytearray((self.crowd.blobs / blob_path(chunk)).read_bytes())
        if self.mode == "liars":
            data[len(data) // 2] ^= 1
            await link.send(Chunk(chunk, bytes(data)), stall_s=5.0)
        elif self.mode == "drip":
            frame = struct.pack(">BI", 3, 32 + len(data)) + bytes.fromhex(chunk) + data
            await link._stream.write(frame[:64])
            for byte in frame[64:]:
                await trio.sleep(DRIP_S)
                with suppress(Exception):  # the requester has gone
                    await link._stream.write(bytes([byte]))

    async def _call(self, http: httpx.AsyncClient, path: str, message: Message, kind: type[M]) -> M:
        sealed = seal_request(
            self.signer,
            round_id=self.crowd.round_id,
            path=path,
            nonce=secrets.token_bytes(limits.NONCE_BYTES),
            now_ms=time.time_ns() // 1_000_000,
            body=message,
        )
        response = await http.post(path, content=sealed)
        response.raise_for_status()
        return kind.from_bytes(response.content)


class FreeKeys:
    """A crowd of keys, as long as it is open."""

    def __init__(self, join_string: str, blobs: Path, modes: tuple[Mode, ...], count: int, *, beat_s: float) -> None:
        self.url, _, self.round_id = join_string.partition("#")
        self.blobs, self._beat_s = blobs, beat_s
        self.keys = [Key(self, mode) for _, mode in zip(range(count), cycle(modes), strict=False)]
        self.names = [key.name for key in self.keys]
        self.newest = 1
        self.streams = self.wants = 0
        """Streams that honest nodes opened to them, and chunks asked of them."""
        self.settled = 0
        """The newest version whose plan all have asked for, and whose receipts all have sent."""
        self._up, self._end = threading.Event(), trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="free keys")

    def open(self) -> None:
        """Return when all have registered."""
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Fall silent."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def held(self) -> tuple[ChunkId, ...]:
        """Every chunk of the round, as if it were here."""
        return tuple(ChunkId(path.name) for path in self.blobs.glob("??/*"))

    def _run(self) -> None:
        try:
            trio.run(self._live)
        except BaseException as failure:  # raised again by whoever waits
            self._failure = failure
        self._up.set()

    async def _live(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        timeout = httpx.Timeout(60.0)
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout) as http, AsyncExitStack() as hosts:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
                for key in self.keys:
                    await key.appear(http, await self._listen(key, hosts) if key.mode != "dead" else nowhere)
                for key in self.keys:
                    self.newest = max(self.newest, await key.beat(http))
                self._up.set()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat, http)
                    await self._end.wait()
                    nursery.cancel_scope.cancel()

    async def _listen(self, key: Key, hosts: AsyncExitStack) -> str:
        key.host = await hosts.enter_async_context(open_host(key.seed, "127.0.0.1", 0))
        key.host.serve(key.answer)
        return key.host.addresses[0] if key.mode != "callers" else ""

    async def _beat(self, http: httpx.AsyncClient) -> None:
        """Beat in turns, all of them in `beat_s`; of a version that is new, ask for the plan and praise in passing."""
        followed = {key.name: 0 for key in self.keys}
        for key in cycle(self.keys):
            await trio.sleep(self._beat_s / len(self.keys))
            self.newest = max(self.newest, await key.beat(http))
            if followed[key.name] < self.newest:
                followed[key.name] = self.newest
                await key.follow(http, self.newest)
                self.settled = min(followed.values())


@contextmanager
def free_keys(
    join_string: str, blobs: Path, modes: tuple[Mode, ...], count: int, *, beat_s: float
) -> Iterator[FreeKeys]:
    """A crowd that is registered and beats."""
    crowd = FreeKeys(join_string, blobs, modes, count, beat_s=beat_s)
    crowd.open()
    try:
        yield crowd
    finally:
        crowd.close()
