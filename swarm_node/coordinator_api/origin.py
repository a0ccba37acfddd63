"""One origin: a web server whose word is worth nothing and whose bytes prove themselves.

- No redirect is followed: an origin would else choose whom this machine talks to.
- Nothing is unpacked: a small answer cannot unfold into a large one.
- An answer is read up to the size that was signed for, and no further, within a time that the size allows.
- A name that leads into this machine's own network is not followed, unless the coordinator lies there, too.
- Any failure is `Unreachable` or `UnknownChunk`; it costs time and nothing else.
"""

from dataclasses import dataclass

import httpx
import trio

from protocol.errors import MessageTooLarge, UnknownChunk, Unreachable
from protocol.ids import ChunkId
from protocol.limits import KIB
from protocol.policy import chunks
from protocol.policy.origin import chunk_path, document_path
from swarm_node.coordinator_api.addresses import allowed

PLAIN = {"Accept-Encoding": "identity"}
"""No compression: a small reply must not be able to unfold into a large one."""


@dataclass(frozen=True)
class Patience:
    """How long an origin may keep us waiting."""

    silence_s: float = 5.0
    """For a connection, and for each next byte."""
    grace_s: float = 5.0
    rate_bytes_per_s: float = 128 * KIB
    """A whole answer may take the grace and the time its size needs at this rate: slower origins do not help."""


STRANGERS = Patience()
COORDINATORS = Patience(silence_s=30.0, grace_s=30.0, rate_bytes_per_s=64 * KIB)
"""The last resort may be busy."""

ABSENT = (403, 404, 410)
"""Object stores answer 403 for what does not exist, so as not to tell what does."""


class Origin:
    """A base URL and the connections to it."""

    def __init__(self, url: str, client: httpx.AsyncClient, patience: Patience) -> None:
        self.url = url.rstrip("/")
        self._client = client
        self._patience = patience

    async def document(self, name: str, max_bytes: int) -> bytes | None:
        """A trust document, unverified, or None if there is none of that name."""
        return await self.file(document_path(name), max_bytes)

    async def chunk(self, chunk: ChunkId, size_bytes: int) -> bytes:
        """A chunk, verified."""
        data = await self.file(chunk_path(chunk), size_bytes)
        if data is None:
            raise UnknownChunk(f"{self.url} does not keep chunk {chunk[:12]}….")
        chunks.verify(chunk, data)
        return data

    async def close(self) -> None:
        await self._client.aclose()

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        """Any file below the base, unverified, or None if there is none."""
        url = f"{self.url}/{path}"
        try:
            with trio.fail_after(self._patience.grace_s + max_bytes / self._patience.rate_bytes_per_s):
                return await self._answer(url, max_bytes)
        except trio.TooSlowError:
            raise Unreachable(f"{url} is too slow for {max_bytes} bytes.") from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            raise Unreachable(
                f"{self.url} does not answer ({type(error).__name__}: {error}).",
                hint="Check the address and this machine's network connection.",
            ) from error

    async def _answer(self, url: str, max_bytes: int) -> bytes | None:
        async with self._client.stream("GET", url) as response:
            if response.status_code in ABSENT:
                return None
            if response.status_code != 200:
                raise Unreachable(f"{url} answers with status {response.status_code}, and not with a file.")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Unreachable(f"{url} answers packed, though it was asked not to.")
            return await read_at_most(response, max_bytes)


async def read_at_most(response: httpx.Response, max_bytes: int) -> bytes:
    """The body of an open response, exactly as it was sent."""
    data = bytearray()
    # Cancelled rather than left by an error: that alone ends the generators below in order.
    with trio.CancelScope() as enough:
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > max_bytes:
                enough.cancel()
    if len(data) > max_bytes:
        raise MessageTooLarge(f"{response.url} answers with more than {max_bytes} bytes.")
    return bytes(data)


def open_origin(url: str, *, own_network: bool, patience: Patience = STRANGERS) -> Origin:
    """An origin somebody told us of; only a round of the own network may name machines of the own network."""
    transport = httpx.AsyncHTTPTransport() if own_network else PublicOnly()
    client = httpx.AsyncClient(
        transport=transport, timeout=patience.silence_s, headers=PLAIN, follow_redirects=False, trust_env=False
    )
    return Origin(url, client, patience)


class PublicOnly(httpx.AsyncBaseTransport):
    """Resolves a name itself and connects to the public address it found, so that no second answer can differ."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        found = await allowed(host, own_network=False)
        if not found:
            raise httpx.ConnectError(f"{host} leads to no public address")
        request.url = request.url.copy_with(host=found[0])
        request.extensions = {**request.extensions, "sni_hostname": host}
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()
