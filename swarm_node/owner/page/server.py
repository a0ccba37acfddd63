"""The owner's page at work: its routes, and the changes that its forms ask for.

    GET  /PREFIX/?token=…         → a cookie, by a redirect (`access`)
    GET  /PREFIX/                 → the page                     GET /PREFIX/status.json   → as `status --json`
    GET  /PREFIX/receipts/CLAIM   → a receipt of this home       GET /PREFIX/style.css, page.js, icon.svg
    POST /PREFIX/orders           do, card, minutes              POST /PREFIX/limits       the changed limits

- An order goes the way of the control socket (`carry_out`), limits go the way of `swarm-node limits`.
- A change is answered by a redirect to the page, which then shows its result once. A refused one shows the page with
  the error and the next step, as the command prints them.
- The page is no reason to stop: if it cannot listen, the agent logs why and works without it.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import trio

from protocol.errors import ConfigInvalid, SwarmError
from protocol.text.plain import counted
from swarm_node.allowance import settings
from swarm_node.allowance.governor import Governor
from swarm_node.base import http_server
from swarm_node.base.clock import now_ms
from swarm_node.base.http_server import PageReply, PageRequest
from swarm_node.base.logs import LastLines, keep_last_lines
from swarm_node.ledger import receipts
from swarm_node.owner.control_server import carry_out
from swarm_node.owner.page.access import AccessDenied, Gatekeeper, PageKey, PageSession, remove_key, write_key
from swarm_node.owner.page.document import PageFigures, document, refusal
from swarm_node.owner.page.limits_form import AT_NEXT_START, changed_fields

log = logging.getLogger(__name__)

FILES = {"style.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}

WAITING_MAX = 32
"""Connections that the system accepts before the agent does."""


@dataclass(frozen=True)
class PageSources:
    """The parts of an agent that its page reads and changes."""

    home: Path
    folders: Callable[[], Sequence[Path]]
    """Folder of each round in the home."""
    governor: Governor
    status: Callable[[], dict[str, Any]]


@asynccontextmanager
async def serving_page(sources: PageSources, *, request_s: float = http_server.REQUEST_S) -> AsyncIterator[None]:
    """Serve the owner's page for the duration of the block."""
    opened = await _open_listener(sources.home)
    if opened is None:
        yield
        return
    listener, key = opened
    log.info("`swarm-node open` shows this node in a browser")
    try:
        with keep_last_lines() as lines:
            async with trio.open_nursery() as nursery:
                page = OwnerPage(sources, Gatekeeper(key), lines)
                nursery.start_soon(partial(http_server.serve, listener, page.answer, request_s=request_s))
                yield
                nursery.cancel_scope.cancel()
    finally:
        remove_key(sources.home)


async def _open_listener(home: Path) -> tuple[trio.SocketListener, PageKey] | None:
    """Listen at a free port, and write its key; None if that is not possible."""
    listener: trio.SocketListener | None = None
    try:
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=WAITING_MAX))[0]
        return listener, write_key(home, listener.socket.getsockname()[1])
    except (OSError, SwarmError) as error:
        log.warning("the owner's page is not available: %s", error)
        if listener is not None:
            await listener.aclose()
        return None


class OwnerPage:
    """The routes of the page."""

    def __init__(self, sources: PageSources, gate: Gatekeeper, lines: LastLines) -> None:
        self._sources, self._gate, self._lines = sources, gate, lines
        folder = resources.files("swarm_node").joinpath("owner/page/static")
        self._files = {name: PageReply(folder.joinpath(name).read_bytes(), kind=kind) for name, kind in FILES.items()}

    async def answer(self, request: PageRequest) -> PageReply:
        """Answer a request."""
        prefix = ""
        try:
            place = self._gate.place(request)
            prefix = self._gate.prefix
            if request.method == "POST":
                return await self._change(request, place)
            if request.method not in ("GET", "HEAD"):
                return http_server.plain("This page knows GET and POST only.", 405)
            return await self._show(request, place)
        except AccessDenied as denied:
            shown = refusal(denied.status, denied.message, denied.hint, prefix)
            return PageReply(shown.encode(), denied.status)

    async def _show(self, request: PageRequest, place: str) -> PageReply:
        if place in self._files:
            return self._files[place]
        if place == "" and (token := request.query.get("token")) is not None:
            return self._open(request, token)
        session = self._gate.session(request)
        if place == "":
            if request.headers.get("sec-fetch-mode", "navigate") != "navigate":
                return await self._page()  # the script of the page that is being left would take the result
            notice, session.notice = session.notice, ""
            return await self._page(notice=notice)
        if place == "status.json":
            return PageReply(json.dumps(self._sources.status()).encode(), kind="application/json")
        if place.startswith("receipts/"):
            return await self._receipt(place.removeprefix("receipts/"))
        raise AccessDenied(404, "There is no such page here.", "Open the page itself.")

    def _open(self, request: PageRequest, token: str) -> PageReply:
        try:
            return self._gate.exchange(token, now_ms())
        except AccessDenied as denied:
            try:
                self._gate.session(request)  # a browser that asks twice has its cookie already
            except AccessDenied:
                raise denied from None
            return self._back()

    async def _change(self, request: PageRequest, place: str) -> PageReply:
        session = self._gate.session(request)
        self._gate.check_change(request)
        try:
            if place == "orders":
                return self._order(session, request.form())
            if place == "limits":
                return await self._limits(session, request.form())
        except SwarmError as error:
            return await self._page(error=str(error), status=error.http_status)
        raise AccessDenied(404, "There is no such page here.", "Open the page itself.")

    def _order(self, session: PageSession, form: Mapping[str, str]) -> PageReply:
        do, options = form.get("do", ""), _options(form)
        if do == "snooze":
            if "minutes" not in options:
                raise ConfigInvalid("The minutes are missing.", hint="Say for how long, or use Pause.")
            carry_out(self._sources.governor, "pause", options)
        else:
            carry_out(self._sources.governor, do, {name: options[name] for name in options if name != "minutes"})
        if do == "leave":
            ended = refusal(200, "The agent stops.", "Run `swarm-node join` to continue with the same key.", "")
            return PageReply(ended.encode())
        session.notice = _result(do, options)
        return self._back()

    async def _limits(self, session: PageSession, form: Mapping[str, str]) -> PageReply:
        card = _options(form).get("card")
        changed = changed_fields(form, card=card)
        home = self._sources.home
        if changed:
            limits = await trio.to_thread.run_sync(lambda: settings.changed(home, changed, card=card))
            await trio.to_thread.run_sync(settings.write, home, limits)
            log.info("asked to change limits of %s: %s", "the node" if card is None else f"card {card}", changed)
        session.notice = _saved(changed)
        return self._back()

    def _back(self) -> PageReply:
        return PageReply(status=303, headers={"Location": self._gate.prefix})

    async def _page(self, *, notice: str = "", error: str = "", status: int = 200) -> PageReply:
        state = self._sources.status()
        claims = [answer["claim_id"] for answer in state.get("answers", []) if answer["claim_id"]]
        kept, limits = await trio.to_thread.run_sync(self._read, claims)
        figures = PageFigures(
            state=state,
            limits=limits or self._sources.governor.limits,
            given=self._sources.governor.given,
            kept_receipts=frozenset(kept),
            lines=self._lines.lines,
            notice=notice,
            error=error,
        )
        # With no-referrer, browsers send `Origin: null` with the page's own forms, as they do with those of a foreign
        # sandboxed frame. This policy, too, sends the page's address to nobody but the page.
        shown = document(figures, self._gate.prefix)
        return PageReply(shown.encode(), status, headers={"Referrer-Policy": "same-origin"})

    def _read(self, claims: list[str]) -> tuple[set[str], settings.Limits | None]:
        """Read which receipts are kept, and the saved limits; None if their file is invalid, which the log reports."""
        kept = set[str]()
        for folder in self._sources.folders():
            kept |= receipts.kept_among(folder / receipts.RECEIPTS, claims)
        try:
            return kept, settings.read(self._sources.home)
        except ConfigInvalid:
            return kept, None

    def _kept_receipt(self, claim_id: str) -> bytes | None:
        folders = (folder / receipts.RECEIPTS for folder in self._sources.folders())
        return next(filter(None, (receipts.kept_receipt(folder, claim_id) for folder in folders)), None)

    async def _receipt(self, claim_id: str) -> PageReply:
        kept = None
        if len(claim_id) == receipts.CLAIM_ID_CHARS and claim_id.isalnum() and claim_id.isascii():
            kept = await trio.to_thread.run_sync(self._kept_receipt, claim_id)
        if kept is None:
            raise AccessDenied(
                404, "This home has no receipt of this claim.", "Run `swarm-node ledger receipts` to fetch receipts."
            )
        name = f'attachment; filename="{claim_id}.receipt"'
        return PageReply(kept, kind="application/octet-stream", headers={"Content-Disposition": name})


def _options(form: Mapping[str, str]) -> dict[str, Any]:
    """Return card and minutes as numbers."""
    options: dict[str, Any] = {}
    try:
        if form.get("card"):
            options["card"] = int(form["card"])
        if form.get("minutes"):
            options["minutes"] = float(form["minutes"])
    except ValueError:
        raise ConfigInvalid("A card and minutes are numbers.", hint="Correct the form, and send it again.") from None
    return options


def _result(do: str, options: Mapping[str, Any]) -> str:
    """Return what an order has done, in the words of the command."""
    of_card = f" card {options['card']}" if "card" in options else ""
    if do == "snooze":
        return f"Paused{of_card} for {options['minutes']:g} min. Resume continues earlier."
    return {
        "pause": f"Paused{of_card}. Resume continues.",
        "resume": f"Resumed{of_card}. Work continues as far as the limits allow it.",
        "finish": "Finishing: the agent stops when the current groups are sampled and sent. Resume cancels it.",
    }.get(do, "")


def _saved(changed: Mapping[str, Any]) -> str:
    if not changed:
        return "Nothing was changed."
    later = sorted(changed.keys() & AT_NEXT_START)
    names = ", ".join(sorted(changed))
    said = f"Saved {counted(len(changed), 'limit')}: {names}. The agent applies changes within seconds."
    return f"{said} {', '.join(later)}: from the next start of the agent." if later else said
