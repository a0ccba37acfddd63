"""All checks in order: the machine, the round, the engines; each result is reported at once.

- A check that raises an error is a failed finding, and the other checks continue.
- Nothing is registered, and no file is left: the trust state is in a temporary folder.
"""

import logging
import os
import secrets
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from protocol import limits
from protocol.errors import AgentTooOld, NotFound, SwarmError, named
from protocol.ids import ChunkId
from protocol.policy.description import RoundDescription
from protocol.text.money import Unit
from protocol.text.plain import one_line
from protocol.wire import generation
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import JoinString, round_folder
from swarm_node.coordinator_api.origins import open_origins
from swarm_node.doctor import cards, engines, forecast, line
from swarm_node.doctor.line import RoundAnswer
from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.engine.capacity import MachineReadings, measure_or_explain
from swarm_node.engine.choose import AUTO, EngineOptions, this_machine
from swarm_node.engine.precision import describe_model
from swarm_node.keys import identity
from swarm_node.machine import gpu, use
from swarm_node.owner.control_socket import FOLDER, PORT, SOCKET
from swarm_node.versions.updater import Updater, round_unit

log = logging.getLogger(__name__)


def home(folder: Path) -> CheckResult:
    """Check that the node's folder is writable."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor."):
            pass
    except OSError as error:
        said = f"Cannot write to the node's folder: {os.strerror(error.errno or 0)}."
        return fail("home", said, str(place), "Choose a folder that you own with --home, or fix its permissions.")
    return ok("home", "The node's folder is writable.", str(folder))


def key(folder: Path) -> CheckResult:
    """Check that the key is valid, and that no other user can read it."""
    path = folder / identity.FILE
    if not path.exists():
        return skip("key", "No node key yet; the first `join` creates one.")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        said = "Other users of this machine can read the node's key and act in its name."
        return fail(
            "key",
            said,
            f"mode {mode:04o}",
            f"chmod 600 {path}; if other people use this machine, run `swarm-node keys rotate`.",
        )
    try:
        me = identity.load_or_create(path).key.node_id
    except SwarmError as error:
        return fail("key", error.message, str(path), error.hint)
    if path.stat().st_uid != os.getuid():
        said = "The key belongs to another user of this machine."
        return warn("key", said, f"uid {path.stat().st_uid}", "Always run the node as the same user.")
    return ok("key", "The key is valid, and only its owner can read it.", f"mode {mode:04o}, node {me}")


def agent(folder: Path) -> CheckResult:
    """Report whether an agent is already running: the figures then include its load."""
    if any((folder / FOLDER / name).exists() for name in (SOCKET, PORT)):
        said = "An agent is running in this home (or was killed). The speed and memory below exclude what it uses."
        return ok("agent", said, "see `swarm-node status`")
    return ok("agent", "No agent is running in this home.")


Show = Callable[[CheckResult], None]


@dataclass(frozen=True)
class Patient:
    """Subject of the checks."""

    home: Path
    join: JoinString | None
    listen: str
    options: EngineOptions
    with_engines: bool = True
    others: tuple[JoinString, ...] = ()
    """Further rounds that are only asked for an answer and for what can be earned there."""


async def examine(patient: Patient, show: Show) -> list[CheckResult]:
    """Run every check; call `show` with each result at once."""
    findings: list[CheckResult] = []

    def note(*results: CheckResult, url: str = "") -> None:
        for result in results:
            findings.append(replace(result, url=url))
            show(findings[-1])

    in_round = partial(note, url=patient.join.url if patient.join else "")

    note(await _try("home", lambda: home(patient.home)), await _try("key", lambda: key(patient.home)))
    note(agent(patient.home))
    note(await _try("cpu", lambda: engines.processor(patient.options, this_machine())))
    seen = await trio.to_thread.run_sync(gpu.find_cards)
    note(cards.card(seen), cards.driver(seen, this_machine().torch_cuda or gpu.CUDA_MAJOR))
    if {card.vendor for card in seen.cards} & {"amd", "intel"}:
        note(cards.access(seen))
    if use.is_wsl():
        note(cards.wsl())
    async with _open_line(patient, note) as answer:
        weights = weights_bytes(answer) if answer else None
        version = sum(entry.size_bytes for entry in answer.manifest.files) if answer and answer.manifest else None
        note(await _try_async("vram", partial(_memory, seen, answer, patient.options)))
        total, free = use.memory_bytes()
        note(cards.ram(total, free, weights, on_card=bool(seen.cards)))
        note(await _try("disk", lambda: cards.space(patient.home, version)))
        note(await _try("disk speed", lambda: cards.speed(patient.home)))
        if answer and patient.join:
            in_round(await _try_async("earnings", partial(earnings, answer, patient.join, patient.home)))
        if answer is None:
            in_round(*unreached(patient.join))
        else:
            for check, look in (("down", line.down), ("up", line.up)):
                in_round(await _try_async(check, partial(look, answer)))
            in_round(await _try_async("reach", partial(line.reach, answer, patient.listen, patient.home)))
    for other in patient.others:
        async with _open_line(replace(patient, join=other), note) as answer:
            if answer:
                note(await _try_async("earnings", partial(earnings, answer, other, patient.home)), url=other.url)
    if patient.with_engines:
        note(*await engines.engines(patient.options, this_machine))
    return findings


def unreached(join: JoinString | None) -> list[CheckResult]:
    """Return the checks that need an answer of the round, with the reason why there is none."""
    checks = ("down", "up", "reach")
    if join is not None:
        return [skip(check, f"Not checked: the round at {join.url} did not respond.") for check in checks]
    step = "swarm-node doctor JOIN_STRING"
    return [skip(check, "Not checked: no round was joined or named.", step) for check in checks]


@asynccontextmanager
async def _open_line(patient: Patient, note: Callable[..., None]) -> AsyncIterator[RoundAnswer | None]:
    """Open the round's coordinator, and report whether it answers; None without a join string or an answer."""
    if patient.join is None:
        yield None
        return
    note = partial(note, url=patient.join.url)
    coordinator = Coordinator(patient.join.url, patient.join.round_id, _key(patient.home))
    try:
        answer = None
        try:
            answer = await ask(coordinator, patient.join)
            note(
                ok("round", f"{patient.join.url} responds, and its root key matches the join string.", _newest(answer))
            )
        except NotFound as error:
            note(
                fail(
                    "round",
                    f"A server responds at {patient.join.url}, but it is not a coordinator.",
                    named(error),
                    "Copy the join string again.",
                )
            )
        except AgentTooOld as error:
            note(fail("round", error.message, error.code, error.hint))
        except SwarmError as error:
            step = error.hint or "Check the address, and that this machine is online."
            said = f"{patient.join.url} does not respond, or its signatures cannot be verified."
            note(fail("round", said, f"{one_line(error.message)} [{error.code}]", step))
        note(line.clock(coordinator.clock_offset_s))  # always: a wrong clock may be the cause
        yield answer
    finally:
        await coordinator.close()


async def ask(coordinator: Coordinator, join: JoinString) -> RoundAnswer:
    """Fetch the newest version of a round, with every signature checked; refuse another generation of the protocol."""
    generation.require_spoken((await coordinator.status()).get("generation"))
    with tempfile.TemporaryDirectory(prefix="echo-swarm-doctor-") as folder:
        async with open_origins(coordinator) as origins:
            await origins.learn()
            updater = Updater(origins, join.round_id, Path(folder) / "trust")
            manifest = await updater.refresh()
            return RoundAnswer(coordinator, manifest, await _description(updater))


async def _description(updater: Updater) -> RoundDescription | None:
    """Return the round's description; a round without a readable one can be joined all the same."""
    try:
        return await updater.description()
    except SwarmError as error:
        log.warning("the description of the round cannot be used: %s", named(error))
        return None


async def earnings(answer: RoundAnswer, join: JoinString, home: Path) -> CheckResult:
    """Estimate the earnings at the default price, or at the highest that the round pays if that is lower."""
    status, rows = await answer.coordinator.status(), await answer.coordinator.leaderboard()
    unit = await round_unit(answer.coordinator.origin, join.round_id)
    return judge_earnings(status, rows, unit, forecast.find_speed(round_folder(home, join)))


def judge_earnings(
    status: dict[str, Any], rows: list[dict[str, Any]], unit: Unit, speed: forecast.MeasuredSpeed | None
) -> CheckResult:
    """Judge what this machine may earn by the coordinator's figures, which are not signed; nothing after the end."""
    try:
        if status["finished"]:
            reached = f"update {int(status['update'])} of {int(status['max_updates'])}"
            step = "Join another round: `swarm-node rounds` lists those of a directory."
            return fail("earnings", "The round is finished: it gives no more work.", reached, step)
        usual = limits.PRICE_DEFAULT_MICROS_PER_MTOK
        price = min(usual, int(status.get("max_price_micros_per_mtok", usual)))
        told = dict(line.split(": ", 1) for line in forecast.lines(status, rows, price=price, unit=unit, speed=speed))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return skip("earnings", "This version of swarm-node cannot read the coordinator's figures.")
    said = one_line(f"{told['Earnings'][0].upper()}{told['Earnings'][1:]}.")
    evidence = one_line("; ".join(f"{name.lower()}: {text}" for name, text in told.items() if name != "Earnings"))
    if told["Earnings"].startswith("unknown"):
        return skip("earnings", f"{said} {evidence}", "join once; then `swarm-node bench JOIN_STRING` measures it")
    return ok("earnings", said, evidence)


def _key(home: Path) -> NodeKey:
    """Return the node's own key, or a temporary one if there is none yet."""
    path = home / identity.FILE
    try:
        return identity.load_or_create(path).key if path.exists() else NodeKey(secrets.token_bytes(32))
    except (SwarmError, OSError):
        return NodeKey(secrets.token_bytes(32))


def _newest(answer: RoundAnswer) -> str:
    version = f"version {answer.manifest.version}" if answer.manifest else "no version is published yet"
    texts = description_texts(answer)
    return ", ".join([version, *(f"{name}: {texts[name]}" for name in texts if name in BRIEFLY)])


BRIEFLY = ("title", "operator", "licence")
"""Texts that fit one line about a round."""


def description_texts(answer: RoundAnswer) -> dict[str, str]:
    """Return what the operator says about the round, in the order in which people ask for it."""
    said = answer.description
    if said is None:
        return {}
    texts = {
        "title": said.title, "about": said.description, "purpose": said.purpose,
        "licence": said.licence, "operator": said.operator, "contact": said.contact,
    }  # fmt: skip
    return {name: text for name, text in texts.items() if text}


def weights_bytes(answer: RoundAnswer) -> int | None:
    if answer.manifest is None:
        return None
    return sum(entry.size_bytes for entry in answer.manifest.files if entry.path.endswith(".safetensors"))


async def splits_of(answer: RoundAnswer, seen: gpu.GpuProbe) -> tuple[int, ...]:
    """Return the numbers of cards over which vLLM can split the round's model; none without several cards."""
    weights = weights_bytes(answer)
    if weights is None or len(seen.cards) < 2:
        return ()
    return (await trio.to_thread.run_sync(describe_model, weights, await config_bytes(answer))).splits


async def _memory(seen: gpu.GpuProbe, answer: RoundAnswer | None, options: EngineOptions) -> CheckResult:
    weights = weights_bytes(answer) if answer else None
    if weights is None or not seen.cards:
        return cards.memory(seen, weights, vram_share=options.vram_share)
    readings = MachineReadings(this_machine(), seen, None, os.environ)
    here = await trio.to_thread.run_sync(
        measure_or_explain, AUTO, options, readings
    )  # takes 15 s where vLLM is installed
    splits = await splits_of(answer, seen) if answer and here.joins_cards else ()
    used = here.seen if here.seen.cards else seen
    return cards.memory(used, weights, vram_share=options.vram_share, splits=splits, joins_cards=here.joins_cards)


async def config_bytes(answer: RoundAnswer) -> bytes | None:
    """Fetch config.json, a few kilobytes, without parsing it; None if it is not published as one file."""
    entries = answer.manifest.files if answer.manifest else ()
    entry = next((file for file in entries if file.path == "config.json"), None)
    if answer.manifest is None or entry is None or entry.patches or entry.size_bytes > limits.POLICY_CONFIG_MAX_BYTES:
        return None
    sizes = answer.manifest.chunk_sizes()
    return b"".join([await answer.coordinator.origin.chunk(ChunkId(chunk), sizes[chunk]) for chunk in entry.chunks])


async def _try(check: str, look: Callable[[], CheckResult]) -> CheckResult:
    async def in_thread() -> CheckResult:
        return await trio.to_thread.run_sync(look)

    return await _try_async(check, in_thread)


async def _try_async(check: str, look: Callable[[], Awaitable[CheckResult]]) -> CheckResult:
    try:
        return await look()
    except Exception as error:  # a failing check is reported, and the other checks continue
        said = f"This check itself failed: {type(error).__name__}: {error}"
        return fail(check, said, "", "Report this with `swarm-node doctor --bundle FILE`.")
