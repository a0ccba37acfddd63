"""Sending of messages to the operator: a webhook with signed JSON, and mail.

- The book of `coordinator.rules.notices` is a fact of the store. It is changed in transactions, before and after a try.
- One task looks at the round, another one sends: a receiver that hangs delays other messages, and nothing else.
- The webhook's header is `Swarm-Signature: t=<seconds>,v1=<hex>`, with HMAC-SHA-256 of `<seconds>.<body>` by the key in
  `notify.key` of the round's folder. A receiver rejects old times, and ids that it has seen.
- URLs and passwords never get into the log: it names the host, the error's kind and the answer's status.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import smtplib
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import sqlalchemy as sa

from coordinator.base.clock import now_ms
from coordinator.config import Config, NotifySection
from coordinator.rules import notices
from coordinator.rules.notices import Notice, NoticeBook
from coordinator.service import opening
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.state import Database
from protocol.people.addresses import host_and_port
from protocol.text.plain import one_line

log = logging.getLogger(__name__)

BOOK = Fact[Mapping[str, Any]]("notices", {})
"""The fact with the book."""

LOOK_S = 10.0
SEND_S = 3.0
"""Time between two looks at the round, and between two looks for messages that are due."""

WEBHOOK_S = 10.0
MAIL_S = 20.0
"""The limits of one try."""

PASSWORD = "SWARM_SMTP_PASSWORD"  # the name of the variable, which child processes do not get

VERBS = {"begins": "ALARM", "ends": "over", "happened": "news"}


class OperatorNotices:
    """The messages of one round to its operator."""

    def __init__(self, config: Config, round_id: str, database: Database) -> None:
        self._config, self._round_id, self._database = config, round_id, database
        self._settings = config.notify
        self._key = opening.open_notify_key(config.round.directory) if config.notify.webhook else b""

    @property
    def are_wanted(self) -> bool:
        return bool(self._settings.channels)

    async def observe(self, status: Mapping[str, Any]) -> None:
        """Record the messages that are due by the operator's status."""
        await self._database.run(_observe, status["alarms"], _events(status), self._settings, now_ms())

    async def waiting(self) -> tuple[Notice, ...]:
        """Return the messages that no channel, or not every channel, has accepted."""
        return (await self._database.read(_read)).outbox

    async def send(self) -> None:
        """Try to send every message that is due, once."""
        book = await self._database.read(_read)
        for notice, channel in notices.due(book, now_ms()):
            accepted = channel not in self._settings.channels or await self._try(notice, channel)
            await self._database.run(_record, notice.id, channel, now_ms(), accepted=accepted)

    async def _try(self, notice: Notice, channel: str) -> bool:
        settings = self._settings
        place = urlsplit(settings.webhook).hostname if channel == "webhook" else settings.smtp
        try:
            if channel == "webhook":
                await self._post(notice)
            else:
                await asyncio.to_thread(send_mail, self._mail(notice), self._config, os.environ.get(PASSWORD, ""))
        except (aiohttp.ClientError, OSError, TimeoutError, smtplib.SMTPException, ValueError) as error:
            reason = getattr(error, "status", "") or getattr(error, "smtp_code", "")
            log.warning(
                "notice=%s was not accepted by the %s at %s: %s",
                notice.id, channel, place, f"{type(error).__name__} {reason}".strip(),
            )  # fmt: skip
            return False
        log.info("notice=%s %s %s sent by %s", notice.id, notice.code, notice.state, channel)
        return True

    async def _post(self, notice: Notice) -> None:
        body = json.dumps(self._content(notice)).encode()
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": self._id(notice),
            "Swarm-Signature": signature(self._key, now_ms() // 1000, body),
        }
        limit = aiohttp.ClientTimeout(total=WEBHOOK_S)
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
            session.post(self._config.notify.webhook, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            if not 200 <= answer.status < 300:  # a redirect, too, since the body is for nobody else
                raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status)

    def _id(self, notice: Notice) -> str:
        return f"{self._round_id[:16]}-{notice.id}"

    def _content(self, notice: Notice) -> dict[str, Any]:
        place = self._config.round
        return {
            "id": self._id(notice),
            "round": {"id": self._round_id, "title": place.title, "url": place.join_string("").removesuffix("#")},
            **notice.model_dump(exclude={"id", "waiting"}),
        }

    def _mail(self, notice: Notice) -> EmailMessage:
        settings, place = self._settings, self._config.round
        title = one_line(place.title) or f"round {self._round_id[:12]}"
        since = datetime.fromtimestamp(notice.since_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        mail = EmailMessage()
        mail["Subject"] = f"[{title}] {VERBS[notice.state]}: {notice.code} ({notice.severity})"
        mail["From"], mail["To"] = settings.mail_from, ", ".join(settings.mail_to)
        mail["Message-ID"] = f"<{self._id(notice)}@echo-swarm.invalid>"
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content(f"{notice.text}\n\nSince {since}. Round: {self._content(notice)['round']['url']}\n")
        return mail


def send_mail(mail: EmailMessage, config: Config, password: str) -> None:
    """Send a mail; raise an error if the server does not accept it for all its receivers."""
    settings = config.notify
    host, port = host_and_port(settings.smtp)
    secure = ssl.create_default_context()
    if settings.smtp_security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=MAIL_S, context=secure)
    else:
        server = smtplib.SMTP(host, port, timeout=MAIL_S)
    with server:
        if settings.smtp_security == "starttls":
            server.starttls(context=secure)
        if settings.smtp_user:
            server.login(settings.smtp_user, password)
        if refused := server.send_message(mail):
            raise smtplib.SMTPRecipientsRefused(refused)


def signature(key: bytes, moment_s: int, body: bytes) -> str:
    """Return the webhook's header for a body that is sent now."""
    digest = hmac.new(key, f"{moment_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment_s},v1={digest}"


def _events(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the round's incidents, oldest first, as pairs of a name that repeats and a text."""
    found = [
        (
            f"{each['node_id']} {each['what']}",
            one_line(f"{each['name'] or each['node_id']}: {each['what']} x {each['count']}. {each['detail']}")[:300],
        )
        for each in reversed(status["incidents"])
    ]
    if status["finished"]:
        found.append((notices.NOTHING_MORE, f"The round is finished after {status['update']} updates."))
    return found


def _read(connection: sa.Connection) -> NoticeBook:
    return NoticeBook.model_validate(get_fact(connection, BOOK))


def _observe(
    connection: sa.Connection,
    alarms: list[Mapping[str, str]],
    events: list[tuple[str, str]],
    settings: NotifySection,
    moment_ms: int,
) -> None:
    before = _read(connection)
    after = notices.observe(before, alarms, events, settings, moment_ms)
    if after != before:
        set_fact(connection, BOOK, after.model_dump(mode="json"))


def _record(connection: sa.Connection, notice_id: str, channel: str, moment_ms: int, *, accepted: bool) -> None:
    after = notices.sent(_read(connection), notice_id, channel, moment_ms, accepted=accepted)
    set_fact(connection, BOOK, after.model_dump(mode="json"))
