"""The owner's page against other users, other sites and other programs of this machine, over real sockets."""

import logging
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from swarm_node.allowance.governor import Governor, UploadCounter
from swarm_node.base import http_server
from swarm_node.base.clock import now_ms
from swarm_node.owner.control_socket import FOLDER
from swarm_node.owner.page.access import COOKIE, FILE, SESSIONS_MAX, TOKEN_LIFE_MS, NoPage, PageKey, read_key
from swarm_node.owner.page.server import PageSources, serving_page
from tests.swarm_node.owner.page_world import page_of

pytestmark = pytest.mark.trio

DEADLINE_S = 30.0


class Browser:
    """An HTTP client that sends what a browser would, and follows no redirect by itself."""

    def __init__(self, key: PageKey, client: httpx.AsyncClient) -> None:
        self.key, self._client = key, client
        self.cookie = ""

    async def open(self, token: str = "") -> httpx.Response:
        """Open the page by a token, and keep the cookie."""
        token = token or self.key.make_token(now_ms())
        reply = await self._client.get(self.key.address, params={"token": token})
        self.cookie = reply.headers.get("set-cookie", "").partition(";")[0]
        return reply

    async def get(self, place: str = "", **headers: str) -> httpx.Response:
        return await self._client.get(self.key.address + place, headers=self._own(headers))

    async def post(self, place: str, form: dict[str, Any], **headers: str) -> httpx.Response:
        own = {"origin": "http://" + urlsplit(self.key.address).netloc} | headers
        return await self._client.post(self.key.address + place, data=form, headers=self._own(own))

    async def raw(self, method: str, path: str, **headers: str) -> httpx.Response:
        return await self._client.request(method, f"http://127.0.0.1:{self.key.port}{path}", headers=self._own(headers))

    def secret_path(self) -> str:
        """Return the secret part of the path."""
        return urlsplit(self.key.address).path.strip("/")

    def _own(self, headers: dict[str, str]) -> dict[str, str]:
        cookie = {"cookie": self.cookie} if self.cookie else {}
        return cookie | {name.replace("_", "-"): value for name, value in headers.items() if value}


@asynccontextmanager
async def page(home: Path, **options: Any) -> AsyncIterator[tuple[Governor, Browser]]:
    """A page, and a browser that has not opened it."""
    with trio.fail_after(DEADLINE_S):
        async with page_of(home, **options) as (governor, key), httpx.AsyncClient(timeout=DEADLINE_S) as client:
            client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # each browser keeps its own
            yield governor, Browser(key, client)


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncIterator[tuple[Governor, Browser]]:
    """A page, and the browser of its owner."""
    async with page(home, **options) as (governor, browser):
        await browser.open()
        yield governor, browser


async def said(browser: Browser, data: bytes) -> bytes:
    """Send bytes on a connection of their own, and return the whole answer."""
    answer = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", browser.key.port) as stream:
        try:
            await stream.send_all(data)
            async for part in stream:
                answer += part
        except trio.BrokenResourceError:
            pass
    return bytes(answer)


async def test_another_user_cannot_read_the_key_which_ends_with_the_agent(tmp_path: Path) -> None:
    async with page(tmp_path):
        path = tmp_path / FOLDER / FILE
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()
    with pytest.raises(NoPage, match="serves no page"):
        read_key(tmp_path)


async def test_a_key_file_that_waited_for_us_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    path, target = tmp_path / FOLDER / FILE, tmp_path / "mine"
    path.parent.mkdir()
    target.touch(mode=0o644)
    path.symlink_to(target)
    async with page(tmp_path):
        assert target.read_bytes() == b""
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600


async def test_the_token_leaves_the_address_for_a_cookie_that_no_other_port_is_sent(tmp_path: Path) -> None:
    async with page(tmp_path) as (_, browser):
        reply = await browser.open()
        assert (reply.status_code, "token" in reply.headers["location"]) == (303, False)
        prefix = urlsplit(browser.key.address).path
        parts = {part.strip() for part in reply.headers["set-cookie"].split(";")}
        assert parts > {"HttpOnly", "SameSite=Strict", f"Path={prefix}"}
        assert len(prefix) > 16
        assert (await browser.get()).status_code == 200


async def test_a_token_from_a_history_or_a_list_of_processes_is_worth_nothing(tmp_path: Path) -> None:
    async with page(tmp_path) as (_, browser):
        token = browser.key.make_token(now_ms())
        assert (await browser.open(token)).status_code == 303
        thief = Browser(browser.key, browser._client)
        again = await thief.open(token)
        assert (again.status_code, thief.cookie) == (403, "")
        assert "This address was opened before" in again.text
        assert "another user of this machine has seen it" in again.text, "the owner learns why"
        assert (await browser.get(f"?token={token}")).status_code == 303, "the owner's own browser may ask twice"
        old = browser.key.make_token(now_ms() - TOKEN_LIFE_MS)
        assert "wrong or older than ten minutes" in (await thief.open(old)).text


@pytest.mark.parametrize("token", ["x", "9999999999999.x.y", "..", "a.b.c.d", "\ud7ff", "%"])
async def test_a_forged_token_opens_nothing(tmp_path: Path, token: str) -> None:
    async with page(tmp_path) as (_, browser):
        assert (await browser.open(token)).status_code == 403
        until, nonce, tag = browser.key.make_token(now_ms()).split(".")
        for forged in (f"{int(until) + 1}.{nonce}.{tag}", f"{until}.{nonce}x.{tag}", f"{until}.{nonce}.{tag[:-1]}"):
            assert (await browser.open(forged)).status_code == 403
        other = PageKey(browser.key.address, "0" * 64)
        assert (await browser.open(other.make_token(now_ms()))).status_code == 403


@pytest.mark.parametrize("cookie", ["", f"{COOKIE}=", f"{COOKIE}=x", "other=x", f"{COOKIE}"])
async def test_who_has_no_session_reads_and_changes_nothing(tmp_path: Path, cookie: str) -> None:
    async with page(tmp_path) as (governor, browser):
        browser.cookie = cookie
        for place in ("", "status.json", "receipts/" + "c0" * 32):
            reply = await browser.get(place)
            assert (reply.status_code, "swarm-node open" in reply.text) == (403, True)
            assert "calm-heron" not in reply.text
        assert (await browser.post("orders", {"do": "pause"})).status_code == 403
        assert governor.decision.may_work


async def test_who_does_not_know_the_address_learns_nothing_from_the_port(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        for path in ("/", "/status.json", "/style.css", "/favicon.ico", "//", "/../", "/?token=x"):
            reply = await browser.raw("GET", path)
            assert reply.status_code == 404
            assert browser.secret_path() not in reply.text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:{port}", "127.0.0.1:x", "[::1]"]
)
async def test_a_name_that_was_rebound_to_this_machine_reads_and_changes_nothing(tmp_path: Path, host: str) -> None:
    async with opened(tmp_path) as (governor, browser):
        named = host.format(port=browser.key.port)
        assert (await browser.get("status.json", host=named)).status_code == 403
        denied = await browser.post("orders", {"do": "pause"}, host=named, origin=f"http://{named}")
        assert denied.status_code == 403
        assert browser.secret_path() not in denied.text
        assert governor.decision.may_work
        assert (await browser.get(host=f"localhost:{browser.key.port}")).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["", "null", "http://127.0.0.1:9", "http://localhost:{port}", "https://127.0.0.1:{port}", "http://evil.example"],
)
async def test_a_form_of_another_page_changes_nothing_even_with_the_cookie(tmp_path: Path, origin: str) -> None:
    async with opened(tmp_path) as (governor, browser):
        named = origin.format(port=browser.key.port)
        for place, form in (("orders", {"do": "leave"}), ("limits", {"celsius.was": "0", "celsius": "1"})):
            reply = await browser.post(place, form, origin=named)
            assert (reply.status_code, "Nothing was changed" in reply.text) == (403, True)
        assert not governor.leaving.is_set()
        assert not (tmp_path / "limits.toml").exists()


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
async def test_a_script_of_another_port_reads_nothing_even_with_the_cookie(tmp_path: Path, site: str) -> None:
    async with opened(tmp_path) as (governor, browser):
        for place in ("", "status.json"):
            reply = await browser.get(place, sec_fetch_site=site)
            assert (reply.status_code, "calm-heron" in reply.text) == (403, False)
        assert (await browser.post("orders", {"do": "pause"}, sec_fetch_site=site)).status_code == 403
        assert governor.decision.may_work
        for own in ("same-origin", "none"):
            assert (await browser.get(sec_fetch_site=own)).status_code == 200


async def test_a_cookie_that_another_program_sets_does_not_lock_the_owner_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        browser.cookie = f"{COOKIE}=theirs; session=x; {browser.cookie}; {COOKIE}=theirs"
        assert (await browser.get()).status_code == 200


async def test_sessions_are_bounded_and_the_oldest_ends_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, first):
        last = Browser(first.key, first._client)
        for _ in range(SESSIONS_MAX):
            await last.open()
        assert (await first.get()).status_code == 403
        assert (await last.get()).status_code == 200


async def test_every_answer_forbids_frames_foreign_code_caches_and_referrers(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        replies = [
            await browser.get(place) for place in ("", "status.json", "style.css", "page.js", "icon.svg", "none")
        ]
        replies += [await browser.open(), await browser.raw("GET", "/"), await browser.raw("PUT", "/")]
        replies.append(await browser.post("orders", {"x": "y" * http_server.BODY_MAX_BYTES}))
        assert {reply.status_code for reply in replies} == {200, 303, 404, 413}
        for reply in replies:
            for name, value in http_server.HEADERS.items():
                is_page = name == "Referrer-Policy" and reply is replies[0]
                assert reply.headers[name] == ("same-origin" if is_page else value)
            assert "access-control-allow-origin" not in reply.headers
        assert "unsafe" not in http_server.POLICY
        assert "<script>" not in replies[0].text
        assert " style=" not in replies[0].text


async def test_who_sends_without_end_is_refused_or_cut_off(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        path = urlsplit(browser.key.address).path
        head = f"POST {path}orders HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        for data, status in (
            (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * (2 * http_server.HEAD_MAX_BYTES), b"431"),
            (head + b"Content-Length: 99999999\r\n\r\n" + b"x" * (2 * http_server.BODY_MAX_BYTES), b"413"),
            (head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b"x" * 4096 + b"\r\n" * 9, b"400"),
            (head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 9, b"413"),
            (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\n\r\n", b"400"),
            (b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n", b"400"),
        ):  # fmt: skip
            assert (await said(browser, data)).partition(b"\r\n")[0].split()[1] == status, data[:60]
        assert (await browser.get()).status_code == 200


async def test_a_form_with_thousands_of_fields_is_not_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as (governor, browser):
        reply = await browser.post("orders", {f"f{n}": "" for n in range(http_server.FIELDS_MAX)} | {"do": "leave"})
        assert reply.status_code == 400
        assert not governor.leaving.is_set()


async def test_slow_clients_hold_up_nobody_for_long(tmp_path: Path) -> None:
    async with opened(tmp_path, request_s=1.0) as (_, browser):
        slow = [await trio.open_tcp_stream("127.0.0.1", browser.key.port) for _ in range(http_server.CONNECTIONS_MAX)]
        for stream in slow:
            await stream.send_all(b"GET / HTTP/1.1\r\nX: ")
        for stream in slow:
            assert await stream.receive_some() == b"", "closed without an answer"
            await stream.aclose()
        assert (await browser.get()).status_code == 200


async def test_more_connections_than_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    async with page(tmp_path, request_s=DEADLINE_S) as (_, browser):
        held = [
            await trio.open_tcp_stream("127.0.0.1", browser.key.port) for _ in range(http_server.CONNECTIONS_MAX + 1)
        ]
        async with trio.open_nursery() as nursery:
            closed = []

            async def watch(place: int) -> None:
                assert await held[place].receive_some() == b""
                closed.append(place)
                nursery.cancel_scope.cancel()

            for place in range(len(held)):
                nursery.start_soon(watch, place)
        assert len(closed) == 1
        for stream in held:
            await stream.aclose()
        await browser.open()
        assert (await browser.get()).status_code == 200


@pytest.mark.parametrize("target", ["//[", "//a[b/", "*", "http://[", "/%", "//\xff"])
async def test_an_address_that_is_no_address_does_not_end_the_agent(tmp_path: Path, target: str) -> None:
    async with opened(tmp_path) as (_, browser):
        request = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert (await said(browser, request.encode("latin-1"))).split()[1] in (b"400", b"404")
        assert (await browser.get()).status_code == 200


async def test_a_client_that_leaves_half_way_ends_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        for data in (b"", b"GET", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab"):
            stream = await trio.open_tcp_stream("127.0.0.1", browser.key.port)
            await stream.send_all(data)
            await stream.aclose()
        assert (await browser.get()).status_code == 200


@pytest.mark.parametrize("path", ["//[", "//[x]:y/", "//a]b", "/%ff%00/", "/?%zz=%ff"])
async def test_a_path_that_is_no_address_is_unknown_and_ends_nothing(tmp_path: Path, path: str) -> None:
    async with page(tmp_path) as (_, browser):
        answer = await said(browser, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert answer.split()[1] == b"404"


async def test_an_error_of_the_page_does_not_end_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]

    async def broken(_: http_server.PageRequest) -> http_server.PageReply:
        raise ZeroDivisionError

    with trio.fail_after(DEADLINE_S), caplog.at_level(logging.ERROR):
        async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
            nursery.start_soon(http_server.serve, listener, broken)
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/secret/x"
            for _ in range(2):
                assert (await client.get(url)).status_code == 500
            nursery.cancel_scope.cancel()
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text


async def test_where_no_page_is_possible_the_agent_works_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER / FILE).mkdir(parents=True)
    uploads = UploadCounter(tmp_path, lambda: datetime.now(UTC))
    sources = PageSources(tmp_path, lambda: [tmp_path], Governor(tmp_path, uploads), dict)
    worked = False
    with caplog.at_level(logging.WARNING):
        async with serving_page(sources):
            worked = True
    assert worked
    assert "the owner's page is not available" in caplog.text


async def test_the_log_of_the_agent_has_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="swarm_node"):
        async with opened(tmp_path) as (_, browser):
            await browser.get()
            await browser.post("orders", {"do": "pause"})
            secrets = (browser.key.key, browser.secret_path(), browser.cookie.partition("=")[2])
    assert "asked to pause" in caplog.text
    for secret in secrets:
        assert secret not in caplog.text


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"address": "x"}'])
async def test_a_damaged_key_file_is_no_page(tmp_path: Path, damaged: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / FILE).write_text(damaged)
    with pytest.raises(NoPage):
        read_key(tmp_path)
