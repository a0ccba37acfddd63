"""The assembly of the coordinator: HTTP server, timers and child processes, started and stopped together."""

import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from coordinator.api import (
    appeals,
    auditor,
    caller,
    completions,
    install,
    learner,
    ledger,
    listing,
    nodes,
    openapi,
    operator,
    pages,
    public,
    stats,
    trainers,
    training,
    watch,
)
from coordinator.api.guard import BODIES, BOUNDS, Bodies, Bounds, Callers, Runner, held_until_answered, listen
from coordinator.api.http import (
    ERROR_PAGE,
    KEY_READS,
    KEY_READS_AT_ONCE,
    OWN_HOSTS,
    ROUND,
    errors,
    own_hosts,
)
from coordinator.api.strangers import STRANGERS_READS, StrangersQueue
from coordinator.api.watch import WATCH, Watch
from coordinator.base.children import Life, keep_running, script
from coordinator.base.clock import now_ms
from coordinator.config import Config
from coordinator.publishing.best import Best
from coordinator.reports import programs
from coordinator.rules.prompt_refs import problem_of
from coordinator.service import local_nodes, opening, tls, witness_calls
from coordinator.service.group_scorer import GroupScorer
from coordinator.service.notices import LOOK_S as LOOK_AT_ALARMS_S
from coordinator.service.notices import SEND_S, OperatorNotices
from coordinator.service.round import Round
from coordinator.tasks.kinds import process_spec
from coordinator.transactions import (
    audits,
    broadcasts,
    evaluations,
    fleet,
    leases,
    links,
    lottery,
    queries,
    registry,
)
from ledger.book import BookBroken
from protocol.limits import DAY_MS
from protocol.policy.phrase import phrase
from protocol.tasks import Judging
from protocol.text.plain import counted
from protocol.work.messages import Peer

if TYPE_CHECKING:
    from coordinator.reports.screen import Show

log = logging.getLogger(__name__)

STEER_S = 2.0
"""Time between two runs of the fleet controller; its rules decide how often the fleet changes."""

LOOK_S = 0.25
"""Time between two reads of the news in a process beside the leader; nodes take longer to fetch a version."""

SWITCH_S = 0.0005
"""Time for which a thread, such as one that reads a large leaderboard, may block the event loop: each reply waits for
it a few times, and with the default of 5 ms, 200 replies a second would queue up."""

GARBAGE_AFTER = 20_000
"""Number of live new objects that starts a search for cycles: requests in progress hold several thousand."""

BACK_MS = 15_000
"""Time for nodes to reconnect after a restart: a waiting node retries every 10 seconds."""

FORGET_EVERY_S = 3600.0
"""The interval at which old queries of the endpoint are looked for."""

CHECKPOINT_EVERY_S = 2.0
"""Time until a new ledger entry is under a checkpoint; without new entries, nothing is signed."""


def build(round_: Round, bounds: Bounds) -> web.Application:
    """Build the web application of one round."""
    app = web.Application(middlewares=[errors, held_until_answered])
    app[ROUND] = round_
    app[ERROR_PAGE] = pages.missing
    if (hosts := own_hosts(round_.config)) is not None:
        app[OWN_HOSTS] = hosts
    app[BOUNDS] = bounds
    app[BODIES] = Bodies(bounds.bodies_bytes)
    app[STRANGERS_READS], app[KEY_READS] = StrangersQueue(), asyncio.Semaphore(KEY_READS_AT_ONCE)
    caller.serve(app, bounds.proxies)
    app[WATCH] = Watch(round_, bounds)
    install.wheel_of(round_.config)  # refused here, not at the first download
    app.cleanup_ctx.append(app[WATCH].run)
    public.measure(app)
    modules = (
        nodes,
        ledger,
        listing,
        training,
        public,
        pages,
        install,
        watch,
        stats,
        appeals,
        completions,
        *([learner, auditor, operator, trainers] if round_.leads else []),
    )
    tables = [module.routes for module in modules]
    for table in tables:
        app.add_routes(table)
    openapi.serve(app, tables)
    ledger.serve(app)
    public.share(app)
    listing.share(app)
    nodes.share(app)
    return app


def make_runner(round_: Round, bounds: Bounds | None = None) -> Runner:
    """Build the server. Bodies are not decompressed: no client compresses, and a small body could become large."""
    bounds = bounds or Bounds()
    bounds = replace(bounds, proxies=bounds.proxies + round_.config.round.proxies)
    app = build(round_, bounds)
    runner = Runner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.5,
        auto_decompress=False,
        keepalive_timeout=bounds.idle_s,
        lingering_time=0,  # `coordinator.api.http` reads the rest of a rejected body, within bounds
    )
    app.cleanup_ctx.append(Callers(runner, round_.config.round.connections_per_address, bounds).run)
    return runner


async def run(
    config: Config,
    *,
    with_learner: bool,
    with_auditor: bool,
    announce: Callable[[str], None],
    show: "Show | None" = None,
    code_of: Callable[[str], str | None] | None = None,
) -> None:
    """Serve the round until a signal arrives; if `show` is given, draw the status, and the join string's `code_of`."""
    _ease_interpreter()
    round_ = Round(config)
    stop = _stop_on_signals()
    await round_.publication.settle_orders()
    await asyncio.to_thread(round_.offered.forget_all)
    await round_.database.run(programs.launched, now_ms())
    await asyncio.to_thread(opening.mark_launched, round_.folder)
    best = Best(round_.folder, round_.database, round_.publisher.write_folder)
    runner = make_runner(round_)
    await runner.setup()
    try:
        secure = tls.context(config)
        await _make_up_for_absence(round_)
        await round_.publish_checkpoint()  # a standby copy may lack the last one, and nobody is to see an older one
        await listen(runner, config.round.listen)
        if secure:
            await listen(runner, config.round.tls_listen, secure, handshake_s=runner.app[BOUNDS].handshake_s)
        _announce_round(round_, announce, code_of)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(every(1.0, lambda: _sweep(round_, best))),
                group.create_task(every(STEER_S, lambda: _steer(round_))),
                group.create_task(every(config.publish.timestamp_lifetime_s / 4, round_.publication.renew_timestamp)),
                group.create_task(every(CHECKPOINT_EVERY_S, round_.publish_checkpoint)),
                group.create_task(every(FORGET_EVERY_S, lambda: _forget_queries(round_))),
                group.create_task(_seeder(round_)),
            ]
            if secure:
                tasks.append(group.create_task(every(tls.RELOAD_S, lambda: tls.reload(secure, config))))
            if round_.publication.mirror:
                tasks.append(group.create_task(round_.publication.mirror.run()))
            if not isinstance(round_.task, Judging):
                scorer = GroupScorer(
                    round_, process_spec(config), partial(problem_of, round_.task), now_ms, episodes=config.episode
                )
                tasks.append(group.create_task(scorer.run()))
            if with_learner:
                tasks.append(group.create_task(_learner(round_)))
            if with_auditor:
                tasks.append(group.create_task(_auditor(round_)))
            tasks += [group.create_task(_local_node(round_, home)) for home in local_nodes.homes(config)]
            notices = OperatorNotices(config, round_.round_id, round_.database)
            if notices.are_wanted:
                tasks.append(group.create_task(every(LOOK_AT_ALARMS_S, lambda: _look_at_alarms(notices, runner.app))))
                tasks.append(group.create_task(every(SEND_S, notices.send)))
            for witness in witness_calls.callers(round_):
                tasks.append(group.create_task(every(witness_calls.CALL_EVERY_S, witness.call)))
            if show:
                tasks.append(group.create_task(_shown(show, runner.app)))
            await stop.wait()
            log.info("stopping; nodes wait, and the same command continues the round")
            for task in tasks:
                task.cancel()
            await runner.cleanup()  # while the child processes end
    finally:
        with suppress(asyncio.CancelledError):
            await runner.cleanup()
        round_.close()


def _announce_round(
    round_: Round, announce: Callable[[str], None], code_of: Callable[[str], str | None] | None
) -> None:
    """Announce how to see the round and how to join it; `code_of` draws the join string."""
    join_string = round_.config.round.join_string(round_.round_id)
    if code_of and (code := code_of(join_string)):
        announce(code)
    announce(f"Leaderboard: http://{round_.config.round.listen}")
    announce(f"Join with:   swarm-node join {join_string}")
    announce(f"Phrase:      {phrase(round_.round_id)} (nodes that join by the host alone ask for it)")


async def serve(folder: Path, *, address: str, announce: Callable[[str], None]) -> None:
    """Serve nodes of a round that another process leads, until a signal or a change of the leader's settings."""
    _ease_interpreter()
    round_ = Round.beside(folder)
    stop = _stop_on_signals()
    runner = make_runner(round_)
    await runner.setup()
    try:
        await listen(runner, address)
        announce(f"Serving nodes: http://{address}")
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(every(LOOK_S, lambda: _stop_on_changes(round_, stop)))
            await stop.wait()
            looking.cancel()
        round_.news.require_led_alike()
    finally:
        await runner.cleanup()
        round_.close()


async def _stop_on_changes(round_: Round, stop: asyncio.Event) -> None:
    """Read the news; stop if settings or keys changed, since they are read only at the start."""
    await round_.news.refresh()
    if not round_.news.is_led_alike:
        stop.set()


def _ease_interpreter() -> None:
    """Switch threads quickly, and exclude modules and schemas, which are permanent, from garbage collection."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)


def _stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT (Ctrl-C) and SIGTERM set."""
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` every `seconds`, beginning now; log failures and continue, except for a broken book."""
    while True:
        try:
            await work()
        except BookBroken:
            raise
        except Exception:  # one failed sweep must not end the coordinator
            log.exception("a timer failed")
        await asyncio.sleep(seconds)


async def _make_up_for_absence(round_: Round) -> None:
    """Extend nodes' leases and auditors' cases by the downtime, before any request is served; record this start."""
    alive_ms, moment_ms = opening.touched_ms(round_.folder), now_ms()
    times = {"timeout_ms": round_.terms.timeout_ms, "back_ms": BACK_MS, "now_ms": moment_ms}
    if extended := await round_.database.run(leases.extend_after_downtime, alive_ms=alive_ms, **times):
        log.info("Resumed %s after %.0f s of downtime", counted(extended, "lease"), (moment_ms - alive_ms) / 1000)
    await round_.database.run(audits.resume, terms=round_.audits, now_ms=moment_ms)
    await round_.database.run(broadcasts.record_start, moment_ms)


async def _sweep(round_: Round, best: Best) -> None:
    await asyncio.to_thread(opening.touch, round_.folder)
    expired = await round_.database.run(leases.expire, terms=round_.terms, now_ms=now_ms())
    if expired:
        log.info("%d leases expired; their prompts will be leased again", expired)
    await round_.database.run(registry.forget_nonces, now_ms())
    await round_.database.run(lottery.end_last, round_.audits, now_ms())
    if round_.plans.seeder:
        await round_.database.run(links.know_seeder, round_.plans.seeder.peer_id)
    if round_.config.eval.every or await round_.database.read(evaluations.is_running):
        await _look_at_evaluations(round_, best)


async def _forget_queries(round_: Round) -> None:
    """Delete old queries of the endpoint, a few at a time: nodes' requests go between."""
    kept_ms = int(round_.config.store.queries_d * DAY_MS)
    while kept_ms and (old := await round_.database.read(queries.find_old, now_ms() - kept_ms)):
        await round_.database.run(queries.forget, old)
        log.info(
            "deleted %d queries of the endpoint that ended more than %g days ago",
            len(old),
            round_.config.store.queries_d,
        )


async def _look_at_evaluations(round_: Round, best: Best) -> None:
    """End evaluations that cannot be finished, and keep the best version."""
    ended = await round_.database.run(
        evaluations.sweep,
        round_.config.eval,
        alive_since_ms=now_ms() - round_.silent_after_ms,
        now_ms=now_ms(),
    )
    for number in ended:
        log.warning("evaluation=%d ended before all problems were answered", number)
    await best.refresh()


async def _steer(round_: Round) -> None:
    """Adapt the fleet to the measurements, and log the changes."""
    changes = await round_.database.run(
        fleet.steer,
        round_.config,
        silent_after_ms=round_.silent_after_ms,
        up_since_ms=round_.up_since_ms,
        now_ms=now_ms(),
    )
    for change in changes:
        log.info("node=%s %s: %s", change.name, "works" if change.works else "standby", change.reason)


def _recorder(round_: Round, name: str) -> Callable[[Life], Awaitable[None]]:
    """Return a callback that records the state of a child process in the store, for the status."""

    async def record(life: Life) -> None:
        await round_.database.run(programs.record_child, name, asdict(life), now_ms())

    return record


async def _seeder(round_: Round) -> None:
    def on_report(line: str) -> None:
        said = json.loads(line)
        if "peer_id" in said:
            address = round_.config.round.seeder_public or said["addrs"][0]
            round_.plans.seeder = Peer(peer_id=said["peer_id"], address=address, kind="seeder")
        elif "served" in said:
            round_.plans.feeders.report_served(said["served"])
        else:
            round_.plans.seeder_up = said["bytes_per_s"]

    command = [
        script("swarm-node"), "seed",
        "--blobs", str(round_.publisher.blobs),
        "--key", str(round_.folder / "keys" / "seeder.key"),
        "--listen", round_.config.round.seeder,
    ]  # fmt: skip
    log_file = round_.folder / "logs" / "seeder.log"
    await keep_running(
        "seeder", command, log_file=log_file, on_line=on_report, may_end=False, tell=_recorder(round_, "seeder")
    )


async def _learner(round_: Round) -> None:
    command = [script("swarm-coordinator"), "learner", str(round_.folder), "--child"]
    log_file = round_.folder / "logs" / "learner.log"
    await keep_running("learner", command, log_file=log_file, tell=_recorder(round_, "learner"))


async def _local_node(round_: Round, home: Path) -> None:
    join = f"http://{round_.config.round.listen}#{round_.round_id}"
    command = local_nodes.command(round_.config, home, join)
    await keep_running(home.name, command, log_file=round_.folder / "logs" / f"local-{home.name}.log")


async def _shown(show: "Show", app: web.Application) -> None:
    """Draw the data of `/v1/operator/status`."""

    async def read_status() -> Mapping[str, Any]:
        status: dict[str, Any] = json.loads(await public.aged(app[public.OPERATOR_STATUS]))
        return status

    await show(read_status)


async def _look_at_alarms(notices: OperatorNotices, app: web.Application) -> None:
    await notices.observe(json.loads(await public.aged(app[public.OPERATOR_STATUS])))


async def _auditor(round_: Round) -> None:
    command = [script("swarm-coordinator"), "auditor", str(round_.folder), "--child"]
    log_file = round_.folder / "logs" / "auditor.log"
    await keep_running("auditor", command, log_file=log_file, tell=_recorder(round_, "auditor"))
