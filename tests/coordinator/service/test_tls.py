"""HTTPS with a certificate of the operator's own: served, renewed without a restart, refused with a reason."""

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from coordinator.api.guard import Bounds, Runner, listen
from coordinator.config import Config, load
from coordinator.service import tls
from protocol.errors import ConfigInvalid
from tests.certificates import write_certificate
from tests.coordinator.served import serve


def config(folder: Path) -> Config:
    files = [f"round.{name}={folder / file}" for name, file in (("tls_certificate", "tls.crt"), ("tls_key", "tls.key"))]
    return load(None, [f"round.directory={folder}", "round.tls_listen=127.0.0.1:8443", *files])


async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


@pytest.mark.asyncio
async def test_a_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not(tmp_path: Path) -> None:
    write_certificate(tmp_path, "first")
    settings = config(tmp_path)
    secure = tls.context(settings)
    assert secure is not None

    app = web.Application()
    app.add_routes([web.get("/", hello)])
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await web.SockSite(runner, listener, ssl_context=secure).start()

    async def asked(trusted: Path) -> str:
        verify = ssl.create_default_context(cafile=str(trusted))
        async with aiohttp.ClientSession() as session, session.get(f"https://127.0.0.1:{port}/", ssl=verify) as answer:
            return await answer.text()

    first = tmp_path / "first.crt"
    first.write_bytes((tmp_path / "tls.crt").read_bytes())
    assert await asked(first) == "hello"
    write_certificate(tmp_path, "second")
    await tls.reload(secure, settings)
    assert await asked(tmp_path / "tls.crt") == "hello"
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked(first)
    second = tmp_path / "second.crt"
    second.write_bytes((tmp_path / "tls.crt").read_bytes())
    (tmp_path / "tls.crt").write_text("half a file")
    await tls.reload(secure, settings)
    assert await asked(second) == "hello"
    await runner.cleanup()


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.asyncio
async def test_who_never_ends_a_tls_handshake_is_cut_and_others_are_served(tmp_path: Path, begun: bytes) -> None:
    write_certificate(tmp_path, "one")
    secure = tls.context(config(tmp_path))
    assert secure is not None
    app = web.Application()
    app.add_routes([web.get("/", hello)])
    runner = Runner(app)
    await runner.setup()
    await listen(runner, "127.0.0.1:0", secure, handshake_s=0.5)
    host, port = runner.addresses[0][:2]
    slow = [await asyncio.open_connection(host, port) for _ in range(50)]
    for _, writer in slow:
        writer.write(begun)
    verify = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    async with aiohttp.ClientSession() as session, session.get(f"https://{host}:{port}/", ssl=verify) as answer:
        assert await answer.text() == "hello"
        for reader, writer in slow:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    async with aiohttp.ClientSession() as session, session.get(f"https://{host}:{port}/", ssl=verify) as answer:
        assert await answer.text() == "hello"
    await runner.cleanup()


@pytest.mark.asyncio
async def test_a_request_in_the_same_packet_as_the_end_of_the_handshake_is_answered(tmp_path: Path) -> None:
    write_certificate(tmp_path, "one")
    async with serve(tmp_path) as served:
        runner = served.client.server.runner
        assert isinstance(runner, Runner)
        await listen(runner, "127.0.0.1:0", tls.context(config(tmp_path)), handshake_s=3600.0)
        (port,) = {port for _, port in runner.addresses} - {served.client.port}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        verify = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        line = verify.wrap_bio(came, goes, server_hostname="127.0.0.1")
        is_agreed = False
        while not is_agreed:
            try:
                line.do_handshake()
                is_agreed = True
            except ssl.SSLWantReadError:
                writer.write(goes.read())
                came.write(await reader.read(2**16))
        line.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write(goes.read())
        answer = b""
        while not answer:
            came.write(await reader.read(2**16))
            with suppress(ssl.SSLWantReadError):  # so far there were only session tickets
                answer = line.read(2**16)
        assert b" 200 " in answer.splitlines()[0]
        writer.close()


@pytest.mark.asyncio
async def test_tls_handshakes_of_one_address_count_as_its_connections(tmp_path: Path) -> None:
    """Else a thousand silent ones would have every file that this process may open."""
    write_certificate(tmp_path, "one")
    secure = tls.context(config(tmp_path))
    bounds = Bounds(proxies=(), look_s=0.02)
    async with serve(tmp_path, "round.connections_per_address=3", bounds=bounds) as served:
        runner = served.client.server.runner
        assert isinstance(runner, Runner)
        await listen(runner, "127.0.0.1:0", secure, handshake_s=3600.0)
        (port,) = {port for _, port in runner.addresses} - {served.client.port}
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for reader, _ in lines[3:]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
        assert len(runner.handshakes) == 3
        for _, writer in lines:
            writer.close()
        while runner.handshakes:
            assert (await served.client.get("/healthz")).status == 200
        verify = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                async with session.get(f"https://127.0.0.1:{port}/healthz", ssl=verify) as answer:
                    assert answer.status == 200


@pytest.mark.parametrize("fault", ["missing", "of another key", "no PEM"])
def test_a_certificate_that_cannot_be_served_is_refused_at_the_start(tmp_path: Path, fault: str) -> None:
    if fault != "missing":
        write_certificate(tmp_path, "one")
    if fault == "of another key":
        certificate = (tmp_path / "tls.crt").read_bytes()
        write_certificate(tmp_path, "two")
        (tmp_path / "tls.crt").write_bytes(certificate)
    if fault == "no PEM":
        (tmp_path / "tls.crt").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigInvalid, match=r"tls\.crt"):
        tls.context(config(tmp_path))


def test_nodes_are_sent_to_the_secure_address(tmp_path: Path) -> None:
    assert config(tmp_path).round.join_string("ab") == "https://127.0.0.1:8443#ab"
