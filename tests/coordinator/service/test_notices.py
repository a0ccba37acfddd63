"""Messages to the operator over real sockets: a webhook that checks the signature, and a mail server."""

import asyncio
import hashlib
import hmac
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coordinator.config import Config, load
from coordinator.service import notices
from coordinator.service.notices import OperatorNotices
from coordinator.store.state import Database
from tests.certificates import write_certificate
from tests.coordinator.world import empty_store

pytestmark = pytest.mark.asyncio

ROUND_ID = "ab" * 32
STATUS = {
    "alarms": [{"code": "no_rewards", "severity": "critical", "text": "No rewards: it hangs."}],
    "incidents": [],
    "finished": False,
    "update": 3,
}
QUIET: dict[str, Any] = STATUS | {"alarms": []}


class Hook:
    """A webhook's receiver."""

    def __init__(self) -> None:
        self.posts: list[tuple[bytes, dict[str, str]]] = []
        self.status = 200
        self.path = "/hook/secret-in-the-path"

    async def receive(self, request: web.Request) -> web.Response:
        self.posts.append((await request.read(), dict(request.headers)))
        return web.Response(status=self.status, headers={"Location": "/elsewhere"})


@asynccontextmanager
async def hook() -> AsyncIterator[tuple[Hook, str]]:
    made, app = Hook(), web.Application()
    app.router.add_post(made.path, made.receive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield made, f"http://127.0.0.1:{port}{made.path}"
    finally:
        await runner.cleanup()


class MailServer:
    """An SMTP server: it answers what smtplib asks, checks the login, and keeps the mail."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, answer: bytes = b"250 ok") -> None:
        self.mail: list[str] = []
        self.logins: list[str] = []
        self._tls, self._answer = tls, answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: bytes) -> None:
            writer.write(line + b"\r\n")

        say(b"220 test")
        while line := (await reader.readline()).decode().rstrip("\r\n"):
            word = line.split(" ")[0].upper()
            if word == "EHLO":
                say(b"250-test")
                say(b"250-AUTH PLAIN")
                say(b"250 STARTTLS" if self._tls else b"250 8BITMIME")
            elif word == "STARTTLS" and self._tls:
                say(b"220 go")
                await writer.drain()
                await writer.start_tls(self._tls)
            elif word == "AUTH":
                self.logins.append(line)
                say(b"235 ok")
            elif word == "DATA":
                say(b"354 go")
                body = (await reader.readuntil(b"\r\n.\r\n")).decode()
                if self._answer.startswith(b"250"):
                    self.mail.append(body)
                say(self._answer)
            elif word == "QUIT":
                say(b"221 bye")
                break
            else:
                say(b"250 ok")
        writer.close()


@asynccontextmanager
async def mail_server(server: MailServer) -> AsyncIterator[str]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await listening.wait_closed()


def settings(folder: Path, *words: str) -> Config:
    chosen = [f"notify.{word}" for word in ("hold_s=0", *words)]
    return load(None, [f"round.directory={folder}", 'round.title="Sums"', *chosen])


@asynccontextmanager
async def round_of(config: Config) -> AsyncIterator[Callable[[], OperatorNotices]]:
    """A store, and the round's messages as each start of the coordinator makes them."""
    store = config.round.directory / "state.db"
    store.write_bytes(empty_store())
    database = Database(store)
    yield lambda: OperatorNotices(config, ROUND_ID, database)
    database.close()


async def test_a_webhook_gets_signed_messages_once_over_restarts(tmp_path: Path) -> None:
    async with hook() as (receiver, url), round_of(settings(tmp_path, f"webhook={url}")) as start:
        for _ in range(3):  # as after three restarts
            await start().observe(STATUS)
            await start().send()
        made = start()
        await made.observe(QUIET)
        await made.observe(QUIET)
        await made.send()
        await made.send()
    assert [json.loads(body)["state"] for body, _ in receiver.posts] == ["begins", "ends"]
    body, headers = receiver.posts[0]
    said = json.loads(body)
    assert (said["code"], said["severity"], said["text"]) == ("no_rewards", "critical", "No rewards: it hangs.")
    assert said["round"] == {"id": ROUND_ID, "title": "Sums", "url": "http://127.0.0.1:8700"}
    assert headers["Idempotency-Key"] == said["id"]
    at, digest = (part.partition("=")[2] for part in headers["Swarm-Signature"].split(","))
    key = (tmp_path / "notify.key").read_bytes()
    assert hmac.new(key, f"{at}.".encode() + body, hashlib.sha256).hexdigest() == digest
    assert (tmp_path / "notify.key").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_a_webhook_that_refuses_is_tried_again_and_its_url_stays_out_of_the_log(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hook() as (receiver, url), round_of(settings(tmp_path, f"webhook={url}")) as start:
        receiver.status = status
        made = start()
        with caplog.at_level(logging.INFO):
            await made.observe(STATUS)
            await made.send()
            await made.send()
        assert len(receiver.posts) == 1, "the second try waits for its pause"
        [(notice, tries)] = [(each, each.waiting) for each in (await made.waiting())]
        assert (notice.code, tries["webhook"][0]) == ("no_rewards", 1)
    assert f"127.0.0.1: ClientResponseError {status}" in caplog.text
    assert "secret" not in caplog.text


async def test_a_webhook_that_is_away_stops_nothing(tmp_path: Path) -> None:
    async with round_of(settings(tmp_path, "webhook=http://127.0.0.1:1/x")) as start:
        made = start()
        await made.observe(STATUS)
        await made.send()
        assert len(await made.waiting()) == 1


async def test_mail_goes_by_tls_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificate(tmp_path, "mail")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "tls.crt"))
    monkeypatch.setenv(notices.PASSWORD, "very secret")
    secure = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secure.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    server = MailServer(tls=secure)
    async with mail_server(server) as address:
        words = ('mail_to=["a@example.org", "b@example.org"]', "mail_from=swarm@example.org", f"smtp={address}")
        async with round_of(settings(tmp_path, *words, "smtp_user=swarm")) as start:
            made = start()
            await made.observe(STATUS)
            await made.send()
            assert await made.waiting() == ()
    (mail,) = server.mail
    assert "Subject: [Sums] ALARM: no_rewards (critical)" in mail
    assert "To: a@example.org, b@example.org" in mail
    assert f"Message-ID: <{ROUND_ID[:16]}-1@echo-swarm.invalid>" in mail
    assert "No rewards: it hangs." in mail
    assert len(server.logins) == 1


async def test_mail_without_the_tls_that_is_asked_for_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody between the two machines gets the password by leaving out STARTTLS."""
    monkeypatch.setenv(notices.PASSWORD, "very secret")
    server = MailServer()
    async with mail_server(server) as address:
        words = ('mail_to=["a@example.org"]', "mail_from=swarm@example.org", f"smtp={address}", "smtp_user=swarm")
        async with round_of(settings(tmp_path, *words)) as start:
            made = start()
            await made.observe(STATUS)
            await made.send()
            assert len(await made.waiting()) == 1
    assert (server.mail, server.logins) == ([], [])
    assert "very secret" not in caplog.text


async def test_mail_that_the_server_refuses_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = MailServer(answer=b"451 later")
    async with mail_server(server) as address:
        words = ('mail_to=["a@example.org"]', "mail_from=swarm@example.org", f"smtp={address}", "smtp_security=none")
        async with round_of(settings(tmp_path, *words)) as start:
            made = start()
            await made.observe(STATUS)
            await made.send()
            assert len(await made.waiting()) == 1
    assert "SMTPDataError 451" in caplog.text


async def test_the_title_of_a_round_adds_no_header_to_a_mail(tmp_path: Path) -> None:
    server = MailServer()
    async with mail_server(server) as address:
        words = ('mail_to=["a@example.org"]', "mail_from=swarm@example.org", f"smtp={address}", "smtp_security=none")
        config = settings(tmp_path, *words)
        title = config.round.model_copy(update={"title": "x\r\nBcc: thief@example.org"})
        async with round_of(config.model_copy(update={"round": title})) as start:
            made = start()
            await made.observe(STATUS)
            await made.send()
    (mail,) = server.mail
    assert "\nBcc:" not in mail
