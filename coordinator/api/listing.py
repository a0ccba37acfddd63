"""Route of the round's listing: what it says of itself to strangers and directories, signed by its ledger's key.

- It is made anew at most every `FRESH_S`, for all who ask: from the public status, and from the ledger under its newest
  checkpoint.
- The name of a model that is a folder is only the folder's own name: paths of this machine stay private.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.http import ROUND
from coordinator.api.public import STATUS, aged
from coordinator.api.snapshot import PageSnapshot
from coordinator.base.clock import now_ms
from coordinator.reports import listing as figures
from coordinator.reports.listing import PaymentHistory, ProvedFigures
from coordinator.service.round import Round
from coordinator.tasks.kinds import task_label
from coordinator.transactions import witnesses
from ledger.listing import LIFETIME_MS, ListedModel, ListedPrices, Listing
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.text.plain import visible
from protocol.wire.signing import canonical_json, to_sign

routes = web.RouteTableDef()

LISTING = web.AppKey("listing", PageSnapshot[bytes])

FRESH_S = 10.0


@routes.get("/v1/listing")
async def listing(request: web.Request) -> web.Response:
    """Return what the round says of itself, signed, with payouts that its ledger proves."""
    body = (await request.app[LISTING].get()).figures
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


def share(app: web.Application) -> None:
    """Set up the listing: it is made once for all who ask."""
    round_, history = app[ROUND], PaymentHistory()

    async def make() -> bytes:
        status = json.loads(await aged(app[STATUS]))
        proved, prices, cosigned = await round_.database.read(_read, round_, history)
        model = await asyncio.to_thread(_model, round_)
        return await asyncio.to_thread(_signed, round_, status, model, proved, prices, cosigned)

    app[LISTING] = PageSnapshot(make, fresh_s=FRESH_S)
    app.on_cleanup.append(lambda _app: app[LISTING].close())


def _read(
    connection: sa.Connection, round_: Round, history: PaymentHistory
) -> tuple[ProvedFigures, ListedPrices, tuple[bytes, ...]]:
    maximum = round_.config.market.max_price_micros_per_mtok
    prices = figures.asked_prices(connection, alive_since_ms=now_ms() - round_.silent_after_ms, maximum=maximum)
    cosigned = witnesses.cosigned(connection, round_.config.ledger.keys).notes
    return history.read(connection), prices, cosigned


def _model(round_: Round) -> ListedModel:
    """Return what is known of the model: by the newest version, if there is one."""
    path, version = round_.config.model.path, round_.news.version
    manifest = round_.publisher.manifest(version) if version else None
    size, architecture = 0, ""
    if manifest is not None:
        size = sum(file.size_bytes for file in manifest.files if file.path.endswith(".safetensors"))
        described = json.loads(round_.publisher.read_file(version, "config.json"))
        architecture = described.get("model_type", "") if isinstance(described, dict) else ""
    name = path if path.startswith("hf://") else Path(path).name
    return ListedModel(name=_fact(name), architecture=_fact(str(architecture)), weights_bytes=size)


def _fact(text: str) -> str:
    return visible(text, limits.ROUND_FACT_MAX_CHARS)


def _signed(
    round_: Round,
    status: dict[str, Any],
    model: ListedModel,
    proved: ProvedFigures,
    prices: ListedPrices,
    cosigned: tuple[bytes, ...],
) -> bytes:
    config, moment_ms = round_.config, now_ms()
    try:
        said = Listing(
            url=config.round.join_string(round_.round_id).partition("#")[0].rstrip("/"),
            description=config.round.describe(round_.round_id),
            task=_fact(task_label(config)),
            model=model,
            prices=prices,
            budget_micros=max(0, status["budget_micros"]),
            update=status["update"],
            max_updates=status["max_updates"],
            nodes=status["nodes_alive"],
            waiting_permille=min(1000, round(1000 * status["learner_idle_share_lately"])),
            finished=status["finished"],
            made_ms=moment_ms,
            expires_ms=moment_ms + LIFETIME_MS,
            checkpoint=proved.checkpoint.decode(),
            cosigned=tuple(note.decode() for note in cosigned),
            totals=proved.totals,
            payments=proved.payments,
        )
    except ValueError as error:
        raise ConfigInvalid(
            f"This round cannot be listed: {error!s:.200}", hint="Set round.public_url to the URL that nodes use."
        ) from None
    signed = said.model_dump(mode="json")
    signature = round_.metadata.sign_for_ledger(to_sign("listing", canonical_json(signed)))
    roots = [root.decode() for root in round_.roots]
    return json.dumps({"signed": signed, "signature": signature.hex(), "roots": roots}, ensure_ascii=False).encode()
