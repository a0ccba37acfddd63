"""The demo: a complete round on this machine, as separate processes, with a summary.

- It starts the same commands that people type: `swarm-coordinator launch` and `swarm-node join`.
- Everything it reports is read from the coordinator's public API.
- When it finishes, fails or is stopped by Ctrl-C, it stops every process that it started.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from coordinator.base.children import script
from coordinator.base.files import unwritable_named
from protocol.errors import SwarmError
from protocol.text.money import Unit, parse_unit
from protocol.text.plain import counted

GRACE_S = 4.0
"""Time between SIGINT and SIGKILL."""

PRICES = (1_000_000, 800_000, 1_200_000)
"""Prices of the nodes in turn, in millionths of a unit per million tokens."""

FOUND = {"pass": "passed", "pardon": "pardoned: not audited in time"}


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line."""

    config_file: Path
    seed: int
    nodes: tuple[tuple[str, ...], ...]
    """The additional options of `swarm-node join` for each node."""
    settings: tuple[str, ...]
    json_file: Path | None
    stay: bool
    directory: Path | None


class Demo:
    """The processes of one demo."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._processes: list[Process] = []
        self.url = ""

    async def start_coordinator(self) -> str:
        """Launch the round, and return the join string."""
        listen, seeder = (f"127.0.0.1:{port}" for port in _free_ports(2))
        self.url = f"http://{listen}"
        chosen = [f"round.seed={self._options.seed}", *self._options.settings]
        chosen += [f"round.listen={listen}", f"round.seeder={seeder}", f"round.directory={self._folder / 'round'}"]
        command = [script("swarm-coordinator"), "launch", str(self._options.config_file)]
        process = await self._start(
            "coordinator", [*command, *(part for setting in chosen for part in ("--set", setting))]
        )
        assert process.stdout
        while line := (await process.stdout.readline()).decode():
            if "swarm-node join " in line:
                return line.rpartition(" ")[2].strip()
        raise SwarmError("The coordinator did not start.", hint=_last_words(self._log("coordinator")))

    async def start_node(self, number: int, join_string: str, options: Sequence[str] = ()) -> None:
        """Start a node on this machine, with one thread."""
        home = self._folder / f"node-{number + 1}"
        command = [script("swarm-node"), "join", join_string, "--home", str(home), "--name", f"demo-{number + 1}"]
        price = PRICES[number % len(PRICES)]
        await self._start(f"node-{number + 1}", [*command, "--price", str(price), "--threads", "1", *options])

    def check_alive(self) -> None:
        """Raise an error if the coordinator or every node has ended before the round."""
        coordinator, *nodes = self._processes
        if coordinator.returncode is not None:
            raise SwarmError(
                "The coordinator ended before the round finished.", hint=_last_words(self._log("coordinator"))
            )
        if nodes and all(process.returncode not in (None, 0) for process in nodes):
            raise SwarmError("Every node ended before the round finished.", hint=_last_words(self._log("node-1")))

    async def nodes_ended(self) -> None:
        """Wait until all nodes have ended by themselves."""
        await asyncio.gather(*(process.wait() for process in self._processes[1:]))

    async def stop(self) -> None:
        """Stop all running processes: SIGINT first, SIGKILL after `GRACE_S`."""
        running = [process for process in reversed(self._processes) if process.returncode is None]
        for process in running:
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in running)), GRACE_S)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(self, name: str, command: Sequence[str]) -> Process:
        log = self._log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            output = PIPE if name == "coordinator" else errors
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=errors, start_new_session=True
            )
        self._processes.append(process)
        return process

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"


async def run(options: DemoOptions) -> int:
    """Run the demo, and return the exit code."""
    console = Console()
    folder = (options.directory or Path(tempfile.mkdtemp(prefix="echo-swarm-demo-"))).absolute()
    with unwritable_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(options, folder)
    started = time.monotonic()
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, interrupted.set)
    main = asyncio.create_task(_play(demo, options, console, started))
    stop = asyncio.create_task(interrupted.wait())
    finished = False
    try:
        await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            console.print("Stopped.")
            return 130
        await main
        finished = True
        if options.stay:
            console.print(f"The leaderboard stays up at {demo.url} until Ctrl-C.")
            await stop
        console.print(_next_step(), highlight=False, soft_wrap=True)
        return 0
    finally:
        main.cancel()
        stop.cancel()
        await demo.stop()
        if finished and options.directory is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif not finished:
            console.print(f"Logs are in {folder / 'logs'}.")


async def _play(demo: Demo, options: DemoOptions, console: Console, started: float) -> None:
    join_string = await demo.start_coordinator()
    console.print(f"Coordinator at {demo.url}; starting {counted(len(options.nodes), 'node')}.")
    for number, own in enumerate(options.nodes):
        await demo.start_node(number, join_string, own)
    async with httpx.AsyncClient(base_url=demo.url, timeout=30) as client:
        await _watch(demo, client, console)
        await asyncio.wait_for(demo.nodes_ended(), timeout=60)
        status = (await client.get("/v1/status")).json()
        nodes = (await client.get("/v1/leaderboard")).json()["nodes"]
    summary = summarise(options.seed, status, nodes, time.monotonic() - started)
    _print(console, summary, nodes, parse_unit(status.get("unit")))
    if options.json_file:
        options.json_file.write_text(json.dumps(summary, indent=2) + "\n")


async def _watch(demo: Demo, client: httpx.AsyncClient, console: Console) -> None:
    """Show the round's progress until it is finished: as bars, or as lines without a terminal."""
    if not console.is_terminal:
        await _print_progress(demo, client, console)
        return
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        phases: dict[str, Any] = {}
        async for status in _statuses(demo, client):
            phase = status["phase"]
            if phase not in phases:
                for done in phases.values():
                    bar.update(done, completed=1.0)
                phases[phase] = bar.add_task(phase, total=1.0, detail="")
            bar.update(phases[phase], completed=status["fraction"], detail=status["detail"])
            if status["finished"] and not status["audit"]["unsettled"]:
                return


async def _print_progress(demo: Demo, client: httpx.AsyncClient, console: Console) -> None:
    """Print a line for every tenth of each phase."""
    printed: tuple[str, int] | None = None
    async for status in _statuses(demo, client):
        reached = status["phase"], int(status["fraction"] * 10)
        if reached != printed:
            console.print(f"{status['phase']}: {status['detail'] or 'started'}", highlight=False)
            printed = reached
        if status["finished"] and not status["audit"]["unsettled"]:
            return


async def _statuses(demo: Demo, client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    while True:
        demo.check_alive()
        with suppress(httpx.HTTPError):
            yield (await client.get("/v1/status")).json()
        await asyncio.sleep(0.5)


def summarise(seed: int, status: dict[str, Any], nodes: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the demo's result as in its JSON file; rollouts are counted in samples."""
    samples = status["samples_per_group"]
    rejected = {code: count * samples for code, count in status["rejected"].items()}
    accepted = status["rollouts"]["samples"]
    if stale := status["rollouts"].get("stale", 0):
        rejected["stale_in_buffer"] = stale * samples
        accepted -= stale * samples
    return {
        "seed": seed,
        "outcome": status["detail"],
        "accuracy_before": status["accuracy_before"],
        "accuracy_after": status["accuracy_after"],
        "versions": status["version"],
        "bytes_from_peers": sum(node["from_peers"] for node in nodes),
        "bytes_from_origin": sum(node["from_seeder"] + node["from_http"] for node in nodes),
        "rollouts": {"generated": accepted + sum(rejected.values()), "accepted": accepted},
        "rejected": rejected,
        "broadcast": status["broadcast"],
        "learner_idle_share": round(status["learner_idle_share"], 4),
        "max_staleness": status["max_staleness"],
        "age": status["age"],
        "in_vain_share": round(status["in_vain_share"], 4),
        "audit": {"share": round(status["audit"]["share"], 4), "verdicts": status["audit"]["verdicts"]},
        "credit_micros_per_update": round(sum(node["posted_micros"] for node in nodes) / max(1, status["update"])),
        "fleet": {node["name"]: node["reason"] for node in status["fleet"]},
        "credits_by_node": {node["name"]: node["posted_micros"] for node in nodes},
        "seconds": round(seconds, 1),
    }


def _print(console: Console, summary: dict[str, Any], nodes: list[dict[str, Any]], unit: Unit) -> None:
    table = Table(title="Summary", show_header=False, min_width=60)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None and after is not None:
        table.add_row("held-out accuracy", f"{before:.1%} → {after:.1%}")
    else:
        table.add_row("outcome", summary["outcome"])
    table.add_row("policy versions", str(summary["versions"]))
    table.add_row("chunk bytes from peers", f"{summary['bytes_from_peers'] / 1e6:.1f} MB")
    table.add_row("chunk bytes from the origin", f"{summary['bytes_from_origin'] / 1e6:.1f} MB")
    if last := summary["broadcast"]:
        spread = f"median node after {last['median_s']:.2f} s, last node after {last['max_s']:.2f} s"
        table.add_row(f"first token of version {last['version']}", spread)
    table.add_row("rollouts generated", str(summary["rollouts"]["generated"]))
    table.add_row("rollouts accepted", str(summary["rollouts"]["accepted"]))
    rejected = ", ".join(f"{count} {code}" for code, count in summary["rejected"].items())
    table.add_row("rollouts rejected", rejected or "none")
    table.add_row("max staleness of training data", f"{summary['max_staleness']} updates")
    age = summary["age"]
    table.add_row("staleness of training data", f"mean {age['mean']:.1f}, p99 {age['p99']} updates")
    table.add_row("wasted work", f"{summary['in_vain_share']:.1%}")
    verdicts = summary["audit"]["verdicts"]
    counts = ", ".join(f"{count} {FOUND.get(finding, finding)}" for finding, count in verdicts.items()) or "none"
    table.add_row("groups audited", f"{summary['audit']['share']:.1%}: {counts}")
    shared = f"learner, auditor and {counted(len(nodes), 'node')} share {os.cpu_count()} processor cores"
    table.add_row("learner idle", f"{summary['learner_idle_share']:.1%}: {shared}")
    table.add_row("credit per update", unit.amount(summary["credit_micros_per_update"]))
    table.add_row("duration", f"{summary['seconds']} s")
    console.print(table)
    columns = ("node", "tokens", "price / Mtok", "credit", "from peers", "uploaded")
    earnings = Table(*columns, title=f"Earnings, in {unit.name}")
    for node in nodes:
        earnings.add_row(
            node["name"],
            str(node["validated_tokens"]),
            unit.figure(node["price_micros_per_mtok"]),
            unit.figure(node["posted_micros"]),
            f"{node['from_peers'] / 1e6:.1f} MB",
            f"{node['uploaded_bytes'] / 1e6:.1f} MB",
        )
    console.print(earnings)


def _next_step() -> str:
    """Return the command to type next; with its path if it is not on PATH, as in a checkout."""
    name = "swarm-coordinator"
    program = name if shutil.which(name) else os.path.relpath(script(name))
    return f"Next:  {program} init round.toml  (a round of your own; docs/operate.md has the steps)"


def _free_ports(count: int) -> list[int]:
    """Return `count` different free ports."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _last_words(log: Path) -> str:
    """Return the last lines of a log, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "Its log ends: " + " | ".join(lines[-3:]) if lines else "Its log is empty."
