"""Access to the owner's page: who may read it, and who may change anything.

    (1) `Host` is a loopback name: else another site has pointed its own name at 127.0.0.1 (DNS rebinding).
    (2) The path begins with the page's secret prefix; every other path is unknown.
    (3) A token in the address is exchanged once for a session's cookie, by a redirect. It is made of a key that only
        the owner can read (`control/page.json`, 0600), and expires after minutes: so one that is left in a shell's
        log, in a browser's history or in the list of processes is worth nothing.
    (4) Everything else but static files needs the cookie: HttpOnly, SameSite=Strict, and bound to the prefix.
        Browsers share the cookies of 127.0.0.1 among all ports; no other server is ever asked for this path.
    (5) `Sec-Fetch-Site`, if sent, names this page or the address bar: not another port of this machine.
    (6) A change is a POST whose `Origin` is this page.

- Secrets are compared in constant time. Sessions end with the agent.
- Not defended: programs of the same user, which can read the key. A program of another user that sees the address in
  the list of processes may use the token before the browser does, which then says so.
"""

import hmac
import json
import os
import secrets
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from swarm_node.base.disk import disk_named
from swarm_node.base.http_server import PageReply, PageRequest
from swarm_node.coordinator_api.last_round import wants_page
from swarm_node.owner.control_socket import FOLDER

FILE = "page.json"
"""File in the control folder of a home."""

COOKIE = "swarm_page"

TOKEN_LIFE_MS = 10 * 60_000
"""Time to open the address, also through an SSH connection that must be made first."""

SESSIONS_MAX = 16
"""Browsers at the same time; one more replaces the oldest."""

HOSTS = ("127.0.0.1", "localhost")

FROM_HERE = ("same-origin", "none")
"""Values of `Sec-Fetch-Site`: this page itself, and an address that a person typed or opened."""

NEXT_STEP = "Run `swarm-node open` for a new address."


class NoPage(SwarmError):
    """The agent serves no page for its owner."""

    code, http_status, fault = "no_page", 404, "node"


@dataclass(frozen=True)
class PageKey:
    """The page's address, and the key of which the tokens are made."""

    address: str
    """The address with the secret prefix, without a token."""
    key: str

    @property
    def port(self) -> int:
        return int(self.address.split("/")[2].rpartition(":")[2])

    def make_token(self, now_ms: int) -> str:
        """Return a token that opens the page once."""
        said = f"{now_ms + TOKEN_LIFE_MS}.{secrets.token_urlsafe(12)}"
        return f"{said}.{self._tag(said)}"

    def expires_ms(self, token: str, now_ms: int) -> int | None:
        """Return when a token expires; None if it is not valid now."""
        said, _, tag = token.rpartition(".")
        if not hmac.compare_digest(tag.encode(), self._tag(said).encode()):
            return None
        expires_ms = int(said.partition(".")[0])
        return expires_ms if now_ms < expires_ms <= now_ms + TOKEN_LIFE_MS else None

    def _tag(self, said: str) -> str:
        return hmac.digest(self.key.encode(), said.encode(errors="surrogatepass"), "sha256").hex()


def write_key(home: Path, port: int) -> PageKey:
    """Make the key of a page at this port, and write it where only the owner can read it."""
    made = PageKey(f"http://127.0.0.1:{port}/{secrets.token_urlsafe(12)}/", secrets.token_hex(32))
    path = home / FOLDER / FILE
    with disk_named(path.parent):
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump({"address": made.address, "key": made.key}, file)
    return made


def read_key(home: Path) -> PageKey:
    """Read the key of the running agent's page."""
    path = home / FOLDER / FILE
    try:
        said = json.loads(path.read_bytes())
        return PageKey(str(said["address"]), str(said["key"]))
    except PermissionError:
        raise ConfigInvalid(
            f"The agent in {home} belongs to another user.", hint="Run this command as the user who started the agent."
        ) from None
    except (OSError, ValueError, LookupError, TypeError):
        if not wants_page(home):
            raise NoPage(
                f"The agent in {home} serves no page.",
                hint="It was turned off by `join --no-page`. Restart the agent with `swarm-node join --page`.",
            ) from None
        raise NoPage(
            f"The agent in {home} serves no page.",
            hint="Its log has the reason; an agent of an earlier version has no page until it is restarted.",
        ) from None


def remove_key(home: Path) -> None:
    """Remove the key when the page ends."""
    with suppress(OSError):
        (home / FOLDER / FILE).unlink(missing_ok=True)


@dataclass
class PageSession:
    """A browser that the owner has opened the page with."""

    cookie: str
    notice: str = ""
    """Result of the last change, shown once."""


class AccessDenied(Exception):
    """Refusal of a request that may not see or change the page."""

    def __init__(self, status: int, message: str, hint: str = NEXT_STEP) -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint


class Gatekeeper:
    """Sessions of the page, and the checks of each request."""

    def __init__(self, key: PageKey) -> None:
        self._key = key
        self.prefix = "/" + key.address.split("/", 3)[3]
        self._used: dict[str, int] = {}
        """Tokens that were exchanged, with the time at which they expire."""
        self._sessions: OrderedDict[str, PageSession] = OrderedDict()

    def place(self, request: PageRequest) -> str:
        """Check host and prefix; return the path behind the prefix."""
        name, _, port = request.headers.get("host", "").partition(":")
        if name not in HOSTS or (port and not port.isdecimal()):  # (1)
            raise AccessDenied(403, "This page is only for this machine: its address begins with http://127.0.0.1.")
        if not request.path.startswith(self.prefix):  # (2)
            raise AccessDenied(404, "There is no such page here.")
        return request.path.removeprefix(self.prefix)

    def exchange(self, token: str, now_ms: int) -> PageReply:
        """Exchange a token for a session."""
        expires_ms = self._key.expires_ms(token, now_ms)  # (3)
        if expires_ms is None:
            raise AccessDenied(403, "This address is wrong or older than ten minutes.")
        self._used = {used: until_ms for used, until_ms in self._used.items() if until_ms > now_ms}
        if token in self._used:
            raise AccessDenied(
                403,
                "This address was opened before; each works once.",
                f"{NEXT_STEP} If it was not you, another user of this machine has seen it: restart the agent, and open "
                "the address that `swarm-node open --no-browser` prints.",
            )
        self._used[token] = expires_ms
        session = PageSession(secrets.token_urlsafe(32))
        self._sessions[session.cookie] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        cookie = f"{COOKIE}={session.cookie}; Path={self.prefix}; HttpOnly; SameSite=Strict"
        return PageReply(status=303, headers={"Location": self.prefix, "Set-Cookie": cookie})

    def session(self, request: PageRequest) -> PageSession:
        """Return the session of a request."""
        sent = [part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")]
        cookies = [value for name, _, value in sent if name == COOKIE]
        found = None
        for session in self._sessions.values():  # (4)
            for cookie in cookies:  # another program of this machine may have set one of the same name
                if hmac.compare_digest(cookie.encode(), session.cookie.encode()):
                    found = session
        if found is None:
            raise AccessDenied(403, "This browser has not opened the page.")
        if request.headers.get("sec-fetch-site", "none") not in FROM_HERE:  # (5)
            raise AccessDenied(403, "Another page has sent you here.", "Follow the link if you want to open the page.")
        return found

    def check_change(self, request: PageRequest) -> None:
        """Refuse a change that another page has asked for."""
        if request.headers.get("origin") != f"http://{request.headers.get('host')}":  # (6)
            raise AccessDenied(403, "Another page has asked for this change. Nothing was changed.")
