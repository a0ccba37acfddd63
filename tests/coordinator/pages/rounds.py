"""A small round with something of everything that pages show, behind the coordinator's own server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from coordinator.base.clock import now_ms
from coordinator.store.tables import batches as formed
from coordinator.store.tables import blames, broadcasts, fleet, nodes, receipts, rejections, uploads, versions
from coordinator.transactions import batches, orders, suite_runs
from coordinator.transactions.suite_runs import SuiteMetric, SuiteRun
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey
from protocol.work.learning import UpdateReport
from tests.coordinator.served import Served, serve

HOSTILE = {
    "markup": "<script>window.pwned = 1</script><img src=x onerror=window.pwned=1>",
    "quotes": "\"' onmouseover=window.pwned=1 x='",
    "turned": "\u202eevil\u2066 gnp.exe",
    "long": "A" * 10_000,
    "stacked": "Z" + "\u0335\u0336\u0300" * 200,
    "emoji": "🦊🦀 ночь 夜",
    "empty": "",
    "blank": "\u200b\u2800\u3164 \t",
    "formula": "=HYPERLINK(0)",
    "team": "rig@<b>heron</b>\u202e",
}
"""Names that strangers may call themselves; the store holds what registration would refuse, too."""


@asynccontextmanager
async def furnished(folder: Path) -> AsyncIterator[Served]:
    """Two nodes that earn, those with hostile names, one update, one version on its way, and some trouble."""
    async with serve(folder) as served:
        await served.publish()
        keys = [await served.join(number) for number in (1, 2)]
        await earn(served, *keys)
        await served.round.database.run(_trouble, [key.node_id for key in keys])
        await served.round.publish_checkpoint()
        yield served


async def earn(served: Served, *keys: NodeKey) -> None:
    """Each node's answer is accepted and trained on."""
    for key in keys:
        for lease in await served.lease(key):
            await served.submit(key, served.answer(key, lease))

    def train(connection: sa.Connection) -> None:
        number = connection.execute(sa.select(sa.func.max(formed.c.batch))).scalar() or 0
        audits, terms = served.round.audits, replace(served.round.terms, groups_per_update=len(keys), staleness=4)
        batch = batches.get(connection, number + 1, terms=terms, audits=audits, now_ms=now_ms())
        assert batch is not None
        metrics = {"reward/mean": 0.5 + 0.1 * number, "<b>kl/k3": 0.01}
        report = UpdateReport(number=number + 1, mismatched=(), metrics=metrics, idle_s=1.0, busy_s=3.0)
        batches.report(connection, report, audits=audits, now_ms=now_ms())

    await served.round.database.run(train)


def hostile_id(number: int) -> NodeId:
    return NodeKey((1000 + number).to_bytes(32)).node_id


def _trouble(connection: sa.Connection, earners: list[NodeId]) -> None:
    moment_ms = now_ms()
    orders.record(connection, "pause", earners[1], HOSTILE["markup"], given_by="somebody@somewhere", now_ms=moment_ms)
    metrics = (SuiteMetric("sums", "exact_match", 0.5, 0.1, 8), SuiteMetric(HOSTILE["markup"], HOSTILE["turned"], 1e6))
    suite_runs.record(connection, SuiteRun("lm-eval", "0.4.13", "swarm@1", "1", metrics), 1, now_ms=moment_ms)
    for number, name in enumerate(HOSTILE.values()):
        one = hostile_id(number)
        connection.execute(
            sa.insert(nodes).values(
                node_id=one, owner=earners[0], name=name,
                price_micros_per_mtok=0, addresses=[], shares=False, registered_ms=moment_ms, last_seen_ms=moment_ms,
            )
        )  # fmt: skip
        said = {"last_lease_id": "", "last_message": name[:500], "last_ms": moment_ms}
        connection.execute(sa.insert(rejections).values(node_id=one, code="bad_signature", count=3, **said))
    connection.execute(
        sa.insert(blames).values(
            accuser=earners[0], accused=earners[1], chunk="c" * 64, got="d" * 64, recorded_ms=moment_ms
        )
    )
    published_ms = connection.execute(sa.select(versions.c.published_ms)).scalar_one()
    for place, one in enumerate(earners):
        here = {"version": 1, "node_id": one}
        stages = {f"{stage}_ms": published_ms + 500 * (place + 1) for stage in ("heard", "fetched", "first_token")}
        connection.execute(sa.delete(broadcasts).where(broadcasts.c.node_id == one))
        connection.execute(sa.insert(broadcasts).values(**here, **stages))
        connection.execute(
            sa.insert(receipts).values(
                version=1, receiver=one, seconds=1.0, from_origins=0, received_ms=moment_ms, envelope=b""
            )
        )
        part = {"works": not place, "since_ms": moment_ms, "reason": "it is cheap", "groups_per_s": 1.5}
        connection.execute(sa.insert(fleet).values(node_id=one, cost_micros_per_s=10.0, **part))
    for sender, receiver in (("seeder", earners[0]), (earners[0], earners[1]), (earners[1], earners[0])):
        connection.execute(
            sa.insert(uploads).values(
                version=1, receiver=receiver, sender=sender, size_bytes=1000, busy_s=1.0, hindered=False
            )
        )
