"""One origin, whatever it is like: verified bytes, or an error by name that costs nothing but time."""

import errno
import gzip
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from protocol.errors import (
    ChunkMismatch,
    MessageTooLarge,
    Overloaded,
    SwarmError,
    UnknownChunk,
    Unreachable,
    WrongAddress,
)
from protocol.policy.chunks import chunk_id
from protocol.policy.origin import OriginList, chunk_path
from protocol.wire.message import Message
from swarm_node.coordinator_api.join_string import is_public, resolve
from swarm_node.coordinator_api.origin import Origin, Patience, no_answer, open_origin
from tests.certificates import write_certificate
from tests.swarm_node import web as manners
from tests.swarm_node.web import Handler, Manner, serves, web

CHUNK = bytes(range(250)) * 4
NAME = chunk_id(CHUNK)
FILES = {f"round/{chunk_path(NAME)}": CHUNK, "round/metadata/1.root.json": b"{}"}
HASTY = Patience(silence_s=1.5, grace_s=3.0)
PATIENT_SECONDS = 60.0
MB = 1_000_000

pytestmark = pytest.mark.trio


@asynccontextmanager
async def origin(manner: Manner, *, own_network: bool = True) -> AsyncIterator[tuple[Origin, manners.Web]]:
    with web(manner) as server, trio.fail_after(PATIENT_SECONDS):
        made = open_origin(f"{server.url}/round", own_network=own_network, patience=HASTY)
        yield made, server
        await made.close()


async def test_an_honest_origin_serves_chunks_and_documents() -> None:
    async with origin(serves(FILES)) as (here, _):
        assert await here.chunk(NAME, len(CHUNK)) == CHUNK
        assert await here.document("1.root.json", 100) == b"{}"
        assert await here.document("2.root.json", 100) is None


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_name_that_cannot_be_asked_for_is_unreachable(host: str) -> None:
    made = open_origin(f"http://{host}", own_network=True, patience=HASTY)
    with pytest.raises(Unreachable):
        await made.file("x", 100)
    await made.close()


@pytest.mark.parametrize(
    ("manner", "error"),
    [
        (manners.lies, ChunkMismatch),
        (manners.lacks, UnknownChunk),
        (manners.hides, UnknownChunk),
        (manners.fails, Unreachable),
        (manners.stalls, Unreachable),
        (manners.stalls_midway, Unreachable),
        (manners.drips, Unreachable),
        (manners.never_ends, MessageTooLarge),
        (manners.goes_away_midway, Unreachable),
    ],
)
async def test_origin_of_bad_manners_is_an_error_by_name(manner: Manner, error: type[SwarmError]) -> None:
    async with origin(manner) as (here, _):
        with pytest.raises(error):
            await here.chunk(NAME, len(CHUNK))


@pytest.mark.parametrize(("said", "pause_s"), [("7", 7.0), ("86400", 60.0), ("soon", 0.0)])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_for_load_has_its_own_name_and_its_pause(status: int, said: str, pause_s: float) -> None:
    async with origin(lambda request: request.answer(status, b"busy", Retry_After=said)) as (here, _):
        with pytest.raises(Overloaded) as caught:
            await here.file("ledger/tile/0/000", 100)
        assert caught.value.retry_after_s == pause_s


async def test_endless_data_costs_no_memory() -> None:
    async with origin(manners.never_ends) as (here, _):
        tracemalloc.start()
        try:
            with pytest.raises(MessageTooLarge):
                await here.chunk(NAME, MB)
            with pytest.raises(MessageTooLarge):
                await here.document("timestamp.json", MB)
            assert tracemalloc.get_traced_memory()[1] < 4 * MB
        finally:
            tracemalloc.stop()


async def test_one_byte_more_than_was_signed_is_refused() -> None:
    async with origin(lambda request: request.answer(200, CHUNK + b"x")) as (here, _):
        with pytest.raises(MessageTooLarge):
            await here.chunk(NAME, len(CHUNK))


async def test_zip_bomb_is_not_unpacked() -> None:
    """A chunk is refused by its label, and without one it is what it is: other bytes."""
    bomb = gzip.compress(bytes(100 * MB))

    def labelled(request: Handler) -> None:
        assert request.headers["Accept-Encoding"] == "identity"
        request.answer(200, bomb, Content_Encoding="gzip")

    for manner, error in ((labelled, Unreachable), (lambda request: request.answer(200, bomb), ChunkMismatch)):
        async with origin(manner) as (here, _):
            tracemalloc.start()
            try:
                with pytest.raises(error):
                    await here.chunk(NAME, MB)
                assert tracemalloc.get_traced_memory()[1] < 10 * MB
            finally:
                tracemalloc.stop()


async def test_redirect_is_not_followed_wherever_it_leads() -> None:
    with web(serves(FILES)) as elsewhere:
        for target in (
            f"{elsewhere.url}/round/{chunk_path(NAME)}", "file:///etc/passwd", "http://169.254.169.254/latest/meta-data/",
            "//127.0.0.1:22/", "gopher://127.0.0.1:6379/_FLUSHALL", "",
        ):  # fmt: skip
            async with origin(manners.redirects_to(target)) as (here, _):
                with pytest.raises(Unreachable, match="302"):
                    await here.chunk(NAME, len(CHUNK))
        assert not elsewhere.asked


async def test_origin_inside_our_own_network_is_not_called_for_a_public_round() -> None:
    async with origin(serves(FILES), own_network=False) as (here, server):
        with pytest.raises(Unreachable, match="no public address"):
            await here.chunk(NAME, len(CHUNK))
        for name in ("localhost", "127.1", "0x7f000001", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
            disguised = open_origin(f"http://{name}:{server.port}/round", own_network=False, patience=HASTY)
            with pytest.raises(Unreachable):
                await disguised.chunk(NAME, len(CHUNK))
            await disguised.close()
        assert not server.asked


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("9.9.9.9", True), ("2620:fe::fe", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fc00::1", False), ("ff02::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:9.9.9.9", True),
    ],
)  # fmt: skip
async def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


async def test_a_name_that_means_nothing_has_no_address() -> None:
    assert await resolve("x" * 70 + ".invalid") == []


@pytest.mark.parametrize(
    "url",
    [
        "", "example.org", "ftp://example.org", "file:///etc/passwd", "http://", "http:///x", "http://a b/",
        "http://user:password@example.org", "http://example.org?q=1", "http://example.org/#f", "http://example.org/",
        "http://example.org/../x", "http://example.org/a/.hidden", "http://example.org/%2e%2e", "http://example.org\n",
        "http://example.org/a\r\nHost: b", "http://example.org:123456", "http://" + "a" * 300, "http://-a/",
    ],
)  # fmt: skip
async def test_path_trick_in_an_origins_url_is_refused(url: str) -> None:
    with pytest.raises(SwarmError):
        OriginList.from_value({"urls": [url]})


async def test_an_ordinary_url_is_an_origin() -> None:
    urls = ["https://cdn.example.org/round-1", "http://127.0.0.1:9000/bucket/a_b", "http://[2001:db8::1]:80"]
    parsed: Message = OriginList.from_value({"urls": urls})
    assert parsed.to_bytes()


async def test_a_handshake_that_failed_without_a_reason_is_described_by_its_error() -> None:
    error = OSError("the connection was reset")
    error.__cause__ = ssl.SSLError(1, "handshake")
    assert no_answer("It does not answer", error).message == "It does not answer (OSError: the connection was reset)."


async def test_a_request_without_an_answer_in_time_says_so() -> None:
    late = no_answer("It does not answer", httpx.ReadTimeout(""))
    assert late.message == "It does not answer: no answer in time."
    assert no_answer("It does not answer", httpx.ReadError("")).message == "It does not answer (ReadError)."


async def test_a_name_that_no_host_has_is_told_from_one_that_cannot_be_resolved_now() -> None:
    failed = httpx.ConnectError("")
    failed.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert no_answer("It does not answer", failed).message == "It does not answer: there is no host of this name."
    assert isinstance(no_answer("", failed), WrongAddress)
    failed.__cause__ = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert no_answer("It does not answer", failed).message == "It does not answer: its name cannot be resolved now."
    assert not isinstance(no_answer("", failed), WrongAddress)


async def test_of_a_host_with_several_addresses_the_one_that_says_why_is_named() -> None:
    """The first address of `localhost` cannot even be tried without IPv6."""
    failed = httpx.ConnectError("all attempts to connect failed")
    untried = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    failed.__cause__ = ExceptionGroup("", [untried, ConnectionRefusedError(errno.ECONNREFUSED, "refused")])
    assert no_answer("It does not answer", failed).message.startswith("It does not answer: connection refused.")


async def test_a_certificate_that_nobody_vouches_for_is_named_as_the_reason(tmp_path: Path) -> None:
    write_certificate(tmp_path, "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def greet(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.do_handshake()

    with trio.fail_after(PATIENT_SECONDS):
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_ssl_over_tcp, greet, 0, context, host="127.0.0.1")
            listeners: list[trio.SSLListener[trio.SocketStream]] = await nursery.start(serve)
            listener = listeners[0].transport_listener
            assert isinstance(listener, trio.SocketListener)
            port = listener.socket.getsockname()[1]
            for scheme, says in (
                ("https", "its certificate is not valid here (self-signed certificate)."),
                ("http", "("),
            ):
                here = open_origin(f"{scheme}://127.0.0.1:{port}", own_network=True, patience=HASTY)
                with pytest.raises(Unreachable) as failed:
                    await here.chunk(NAME, len(CHUNK))
                await here.close()
                assert says in failed.value.message
                assert ("SSL_CERT_FILE" in failed.value.hint) == (scheme == "https")
            nursery.cancel_scope.cancel()
