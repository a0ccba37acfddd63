"""The owner's page of an agent that does not work: a real governor, control socket and page, and given figures.

Run as a program with a home, it serves until standard input ends, for a browser in another process.
"""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarm_node.allowance.governor import Governor, UploadCounter
from swarm_node.base.clock import now_ms
from swarm_node.base.http_server import REQUEST_S
from swarm_node.machine import gpu
from swarm_node.owner.control_server import listening
from swarm_node.owner.page.access import PageKey, read_key
from swarm_node.owner.page.server import PageSources, serving_page
from tests.swarm_node.owner.test_status_lines import rates, told

CLAIM = "c1" * 32
HOSTILE = "<script>window.pwned = 1</script> <img src=x> \u202etxet"
GB = 10**9


def card(number: int, **changes: Any) -> dict[str, Any]:
    """A card as a snapshot has it."""
    readings = {"celsius": 61.0 + number, "watts": 300.4, "used_bytes": 8 * GB, "memory_bytes": 24 * GB}
    work = {"state": "sampling", "reason": "", "tokens_per_s": 1234.5, "groups": 4, "pid": 42}
    return {"vendor": "nvidia", "name": "RTX 4090", "number": number, **readings, **work} | changes


def answers(now: int) -> list[dict[str, Any]]:
    """Twenty answers of the coordinator, one of them a rejection."""
    accepted = {"outcome": "accepted", "code": "", "message": "", "tokens": 12_345, "credit_micros": 4_100}
    late = {"outcome": "rejected", "code": "stale_version", "message": HOSTILE, "tokens": 0, "credit_micros": 0}
    rows = [
        {"at_ms": now - 7000 * place, "lease_id": f"{place:02x}" * 16, "claim_id": f"c{place:x}"[:2] * 32, **accepted}
        for place in range(16)
    ]
    rows[2] = rows[2] | late | {"claim_id": ""}
    return rows


def snapshot(governor: Governor) -> dict[str, Any]:
    """Return a snapshot of a working node, with the governor's own reasons and limits."""
    now = now_ms()
    cards = [card(0), card(1, celsius=None), card(2, name=HOSTILE)]
    for shown in cards:
        decision = governor.card_decisions.get(shown["number"])
        if decision is not None and decision.reasons:
            shown |= {"state": "resting", "reason": decision.reason_line, "groups": 0}
    return told(
        now_ms=now,
        started_ms=now - 3_700_000,
        earnings_ms=now - 5000,
        last_verdict=answers(now)[0],
        rates=rates(last_ms=now - 2 * 86_400_000, next_ms=now + 5 * 86_400_000),
        today_micros=7_300_000,
        answers=answers(now),
        resting=governor.decision.reason_line,
        cards=cards,
        limits=governor.limits.model_dump(exclude_defaults=True),
    )


@asynccontextmanager
async def page_of(
    home: Path, *, given: dict[str, Any] | None = None, request_s: float = REQUEST_S
) -> AsyncIterator[tuple[Governor, PageKey]]:
    """Serve the page of a node with three cards."""
    uploads = UploadCounter(home, lambda: datetime.now(UTC))
    governor = Governor(home, uploads, given=given, cards=(0, 1, 2), look_at_cards=gpu.GpuProbe)
    status = partial(snapshot, governor)
    sources = PageSources(home, lambda: [home / "round"], governor, status)
    async with listening(home, governor, status), serving_page(sources, request_s=request_s):
        yield governor, read_key(home)


async def main(home: Path) -> None:
    logging.basicConfig(level=logging.INFO)
    async with page_of(home) as (_, key), trio.open_nursery() as nursery:
        print(f"{key.address}?token={key.make_token(now_ms())}", flush=True)
        for number in range(30):
            logging.getLogger("world").info("line %d: %s", number, HOSTILE)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
