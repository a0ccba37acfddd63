"""Client of an origin: an untrusted web server, whose files are verified by their hash.

- No redirect is followed: otherwise an origin could choose the servers that this machine contacts.
- Nothing is decompressed: a small answer cannot expand into a large one.
- An answer is read up to the signed size, within a time that depends on the size.
- A name that leads into this machine's own network is refused, unless the coordinator is in that network, too.
- Every failure is `Unreachable` or `UnknownChunk`; it costs only time. A refusal for load is `Overloaded`, which is
  `Unreachable`, too.
"""

import errno
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import trio

from protocol.errors import MessageTooLarge, Overloaded, UnknownChunk, Unreachable, WrongAddress
from protocol.ids import ChunkId
from protocol.limits import KIB
from protocol.policy import chunks
from protocol.policy.origin import chunk_path, document_path
from swarm_node.coordinator_api.join_string import allowed

PLAIN = {"Accept-Encoding": "identity"}
"""No compression: a small reply must not expand into a large one."""


@dataclass(frozen=True)
class Patience:
    """Time limits of an origin."""

    silence_s: float = 5.0
    """Time-out of connecting, and of each read."""
    grace_s: float = 5.0
    rate_bytes_per_s: float = 128 * KIB
    """A whole answer may take `grace_s` plus its size at this rate: slower origins do not help."""


STRANGERS = Patience()
COORDINATORS = Patience(silence_s=30.0, grace_s=30.0, rate_bytes_per_s=64 * KIB)
"""The coordinator is the last source, and may be busy."""

ABSENT = (403, 404, 410)
"""Object stores answer 403 for missing files, so as not to reveal which files exist."""


UNKNOWN = (*ABSENT, 405, 501)
"""Servers of files answer 405 or 501 to a request that is not for a file."""

BUSY = (429, 503)
"""Refusals for load: of a coordinator (503), and of a proxy or web server that limits requests (either)."""

LATER = "Try again in a few minutes."

RETRY_AFTER_MAX_S = 60.0
"""Upper limit of Retry-After, so that a proxy's mistake cannot stop a node for a day."""


class Origin:
    """An origin, by its base URL."""

    def __init__(self, url: str, client: httpx.AsyncClient, patience: Patience) -> None:
        self.url = url.rstrip("/")
        self._client = client
        self._patience = patience

    async def document(self, name: str, max_bytes: int) -> bytes | None:
        """Fetch a trust document, unverified; None if it does not exist."""
        return await self.file(document_path(name), max_bytes)

    async def chunk(self, chunk: ChunkId, size_bytes: int) -> bytes:
        """Fetch and verify a chunk."""
        data = await self.file(chunk_path(chunk), size_bytes)
        if data is None:
            raise UnknownChunk(f"{self.url} does not have chunk {chunk[:12]}….")
        chunks.verify(chunk, data)
        return data

    async def close(self) -> None:
        await self._client.aclose()

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        """Fetch a file below the base URL, unverified; None if it does not exist."""
        return await self._fetch("GET", path, None, max_bytes)

    async def post(self, path: str, content: bytes, max_bytes: int) -> bytes | None:
        """Return the answer to a request that changes nothing, unverified; None if this server does not know it."""
        return await self._fetch("POST", path, content, max_bytes)

    async def _fetch(self, method: str, path: str, content: bytes | None, max_bytes: int) -> bytes | None:
        url = f"{self.url}/{path}"
        try:
            with trio.fail_after(self._patience.grace_s + max_bytes / self._patience.rate_bytes_per_s):
                return await self._answer(method, url, content, max_bytes)
        except trio.TooSlowError:
            raise Unreachable(f"{url} is too slow for {max_bytes} bytes.") from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, UnicodeError) as error:  # a name of empty labels
            raise no_answer(f"{self.url} does not answer", error) from error

    async def _answer(self, method: str, url: str, content: bytes | None, max_bytes: int) -> bytes | None:
        async with self._client.stream(method, url, content=content) as response:
            if response.status_code in (ABSENT if method == "GET" else UNKNOWN):
                return None
            if response.status_code in BUSY:
                raise Overloaded(f"{url} is overloaded.", hint=LATER, retry_after_s=retry_after_s(response))
            if response.status_code != 200:
                raise Unreachable(f"{url} returned HTTP status {response.status_code} instead of a file.")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Unreachable(f"{url} returned a compressed answer, although compression was not accepted.")
            return await read_at_most(response, max_bytes)


CHECK = "Check the address and this machine's network connection."
CHECK_FORM = "Check the port, and whether the address begins with http:// or https://."

ILLEGAL = "illegal "
"""The beginning of h11's text for an answer that is not HTTP."""

NO_SUCH_HOST = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""Reasons that OpenSSL gives if the other side answers without TLS."""


def no_answer(what: str, error: Exception) -> Unreachable:
    """Return the error of a failed request, with its reason, most of which are in its causes."""
    for cause in _causes(error):
        if (said := _of_cause(what, cause)) is not None:
            return said
    if isinstance(error, httpx.TimeoutException):  # it has no text
        return Unreachable(f"{what}: no answer in time.", hint=CHECK)
    if isinstance(error, httpx.RemoteProtocolError) and str(error).startswith(ILLEGAL):
        return WrongAddress(f"{what}: the server there does not speak HTTP.", hint=CHECK_FORM)
    named = f"{type(error).__name__}: {error}".removesuffix(": ").removesuffix(".")
    return Unreachable(f"{what} ({named}).", hint=CHECK_FORM if isinstance(error, httpx.RemoteProtocolError) else CHECK)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; a group has one for each address of a host."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def _of_cause(what: str, cause: BaseException) -> Unreachable | None:
    """Return the error in plain words for a cause that says why nobody answered; None for any other."""
    match cause:
        case ssl.SSLCertVerificationError():
            return Unreachable(
                f"{what}: its certificate is not valid here ({cause.verify_message.rstrip('.')}).",
                hint="Check the address and this machine's clock. If the operator signs certificates without a public "
                "authority, name the authority's file in the variable SSL_CERT_FILE.",
            )
        case ssl.SSLError(reason=str(reason)) if reason in NO_TLS:
            return WrongAddress(
                f"{what}: the server there does not speak TLS.", hint="Try http:// instead of https://."
            )
        case ssl.SSLError(reason=str(reason)):
            return Unreachable(f"{what} (TLS: {reason}).", hint=CHECK)
        case socket.gaierror(errno=number) if number in NO_SUCH_HOST:
            return WrongAddress(f"{what}: there is no host of this name.", hint="Check the spelling of the address.")
        case socket.gaierror():
            return Unreachable(f"{what}: its name cannot be resolved now.", hint="Check this machine's network.")
        case ConnectionRefusedError():
            return Unreachable(
                f"{what}: connection refused. No program listens at this port.",
                hint="Check the address. If it is right, the coordinator does not run now: ask its operator.",
            )
        case OSError(errno=number) if number in NO_ROUTE:
            return Unreachable(f"{what}: the network does not lead there.", hint=CHECK)
    return None


def retry_after_s(response: httpx.Response) -> float:
    """Return the pause of Retry-After, bounded; its other form, a date, is ignored: it would need equal clocks."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() else 0.0


async def read_at_most(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of an open response, exactly as sent."""
    data = bytearray()
    # Cancelled rather than ended by an exception: only that closes the generators below in order.
    with trio.CancelScope() as enough:
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > max_bytes:
                enough.cancel()
    if len(data) > max_bytes:
        raise MessageTooLarge(f"{response.url} returned more than {max_bytes} bytes.")
    return bytes(data)


def open_origin(url: str, *, own_network: bool, patience: Patience = STRANGERS) -> Origin:
    """Open an origin from a list; only a coordinator in the own network may list machines in the own network."""
    transport = httpx.AsyncHTTPTransport() if own_network else PublicOnly()
    client = httpx.AsyncClient(
        transport=transport, timeout=patience.silence_s, headers=PLAIN, follow_redirects=False, trust_env=False
    )
    return Origin(url, client, patience)


class PublicOnly(httpx.AsyncBaseTransport):
    """Transport that resolves a name itself and connects to the checked public address, without a second lookup."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        addresses = await allowed(host, own_network=False)
        if not addresses:
            raise httpx.ConnectError(f"{host} has no public address")
        request.url = request.url.copy_with(host=addresses[0])
        request.extensions = {**request.extensions, "sni_hostname": host}
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()
