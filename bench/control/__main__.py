"""The control plane: processor time of a signed request, memory, life past saturation, and a store that stays right.

- Real coordinator processes, on SQLite or, with `--store postgresql`, so many `--processes` on one database, with every
  node registered; requests come over loopback, from this process, whose own time is not counted. Each goes to whichever
  process is free, so that what a node does next mostly meets another one.
- The rivals are two handlers of the same server library that get the very same bodies and answer with as many bytes
  (`bench.control.bare`): one that only reads, what HTTP costs anyhow, and one that decodes and checks signatures, too,
  the floor for whoever believes nobody. All take turns, kind by kind.
- Past saturation more connections ask at once than the coordinator lets wait, and none of them honours Retry-After;
  beside them the learner fetches batch after batch.
- In the end every node answers its lease twice at once, the learner trains on all there is, and what everybody was told
  is compared with the store (`bench.control.books`).
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from bench.control.fleet import Fleet, Prepared
from bench.control.load import Reply, drive
from bench.control.round import BATCH, Round, Server, counted
from bench.harness import Bench, quick_from_environment
from tests.ledger import postgres
from tests.processes.programs import free_address

CONNECTIONS = 64
FLOOD_CONNECTIONS = 400
RIVALS = ("bare", "checked")
SIGNED_AT_ONCE = 1_000
"""Requests: what was signed too long ago is refused."""

FLOODING = 2_500
"""Nodes whose heartbeats, twice, are the flood."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options; QUICK=1 makes the fleet small."""
    parser = argparse.ArgumentParser(prog="bench control", description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="that serve nodes; more than one needs PostgreSQL")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--nodes", type=int, default=500 if quick_from_environment() else 10_000)
    options = parser.parse_args(words)
    if options.processes > 1 and options.store != "postgresql":
        parser.error("a round on SQLite is served by one process; add --store postgresql")
    if options.store == "postgresql" and (reason := postgres.missing()):
        parser.error(reason)
    return options


def compare(bench: Bench, kind: str, round_: Round, rivals: Server, say: Callable[[Fleet], Prepared]) -> list[Reply]:
    """Send the bodies of all nodes to the coordinator and to both rivals, in turn."""
    replies, ours, took_s = list[Reply](), list[float](), 0.0
    theirs: dict[str, list[float]] = {rival: [] for rival in RIVALS}
    for part in round_.fleet.parts(SIGNED_AT_ONCE):
        prepared = say(part)
        started = time.perf_counter()
        with counted(round_.cpu_s, ours):
            heard = asyncio.run(drive(round_.addresses, prepared, connections=CONNECTIONS))
        took_s += time.perf_counter() - started
        wrong = [reply for reply in heard if reply.status != 200]
        assert not wrong, (kind, len(wrong), wrong[0])
        size = int(median(len(reply.body) for reply in heard))
        for rival, spent_s in theirs.items():
            same = [(f"/{rival}{path}?reply={size}", body) for path, body in prepared]
            with counted(rivals.cpu_s, spent_s):
                answers = asyncio.run(drive([rivals.address], same, connections=CONNECTIONS))
            assert all(answer.status == 200 for answer in answers), answers[0]
        replies += heard
    bench.measure(f"{kind}, answered", len(replies) / took_s, unit="/s")
    for case, spent_s in {kind: ours, **{f"{kind}, {rival}": spent_s for rival, spent_s in theirs.items()}}.items():
        each_us = sum(spent_s) / len(replies) * 1e6
        bench.measure(case, each_us, unit="µs of processor")
        print(f"{case}: {each_us:.0f} µs", flush=True)
    return replies


def measure_requests(bench: Bench, round_: Round, rivals: Server, rounds: int) -> None:
    resident = list[float]()
    for _ in range(rounds):
        if resident:  # else ever more groups would wait, which no round lets happen
            for _ in range(len(round_.fleet.keys) // BATCH):
                round_.train()
        compare(bench, "heartbeat", round_, rivals, Fleet.heartbeats)
        leases = round_.leased(compare(bench, "lease", round_, rivals, Fleet.lease_requests))
        judged = round_.judged(compare(bench, "submission", round_, rivals, partial(Fleet.submissions, leases=leases)))
        assert {verdict.outcome for verdict in judged} == {"accepted"}
        resident.append(round_.resident_mib())
        bench.measure("resident memory", resident[-1], unit="MiB")
    for kind in ("heartbeat", "lease", "submission"):
        bench.ratio(f"{kind} / the floor", kind, f"{kind}, checked")
        ratio = bench.ratio(f"{kind} / bare handler", kind, f"{kind}, bare")
        bench.goal(f"a {kind} costs at most twice a bare handler", ratio, at_most=2.0)
    # The first round fills the caches of statements and of SQLite; the second has met all that comes again.
    bench.goal("memory is flat: the last round's / the second's", resident[-1] / resident[1], at_most=1.1)


async def flood(round_: Round, prepared: Prepared, batches: int) -> tuple[list[Reply], list[float], float]:
    """Send all requests at once while the learner trains; return replies, seconds per batch, and seconds for all."""
    learner_s: list[float] = []

    def train() -> None:
        for _ in range(batches):
            started = time.perf_counter()
            assert round_.train() == BATCH
            learner_s.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        learning = group.create_task(asyncio.to_thread(train))
        replies = await drive(round_.addresses, prepared, connections=FLOOD_CONNECTIONS * len(round_.servers))
        took_s = time.perf_counter() - started
        await learning
    return replies, learner_s, took_s


def measure_saturation(bench: Bench, round_: Round, batches: int) -> None:
    few = next(round_.fleet.parts(FLOODING))
    calm = few.heartbeats()
    started = time.perf_counter()
    asyncio.run(drive(round_.addresses, calm, connections=CONNECTIONS))
    calm_rate = len(calm) / (time.perf_counter() - started)
    replies, learner_s, took_s = asyncio.run(flood(round_, few.heartbeats() + few.heartbeats(), batches))
    served = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status != 200]
    bench.measure("heartbeats answered, calm", calm_rate, unit="/s")
    bench.measure("heartbeats answered, flooded", len(served) / took_s, unit="/s")
    bench.measure("refused", len(refused) / len(replies), unit="of all")
    for reply in served:
        bench.measure("answer, flooded", reply.seconds, unit="s")
    for seconds in learner_s:
        bench.measure("batch and report of the learner, flooded", seconds, unit="s")
    bench.check("some are refused", bool(refused))
    bench.check(
        "all of them with 503 and Retry-After", all(each.status == 503 and each.retry_after for each in refused)
    )
    bench.check("the learner got every batch", len(learner_s) == batches)
    waits = bench.median("batch and report of the learner, flooded") / bench.median("answer, flooded")
    bench.goal("two requests of the learner, by one answer to a node", waits, at_most=2.0)


def answer_twice(bench: Bench, round_: Round) -> None:
    """Each rollout in two requests at once: one is accepted, the other told that it was."""
    leases, heard = list[Reply](), list[Reply]()
    for part in round_.fleet.parts(SIGNED_AT_ONCE):
        leases += asyncio.run(drive(round_.addresses, part.lease_requests(), connections=CONNECTIONS))
    given = round_.leased(leases)
    for part in round_.fleet.parts(SIGNED_AT_ONCE):
        both = zip(part.submissions(given), part.submissions(given), strict=True)
        side_by_side = [request for pair in both for request in pair]
        heard += asyncio.run(drive(round_.addresses, side_by_side, connections=CONNECTIONS))
    outcomes = Counter(verdict.outcome for verdict in round_.judged(heard))
    size = len(round_.fleet.keys)
    bench.check("of two answers to one lease one is accepted", outcomes == {"accepted": size, "already_accepted": size})


def examine(bench: Bench, round_: Round) -> None:
    """Compare the store with what everybody was told."""
    round_.train_all()
    for name, wrong in round_.examine().items():
        for line in wrong[:10]:
            print(f"wrong: {line}", file=sys.stderr)
        bench.check(name, not wrong)


def main() -> int:
    """Measure, print and judge."""
    chosen, quick = arguments(sys.argv[1:]), quick_from_environment()
    rounds, batches = 4, 5 if quick else 20
    inputs = {"rounds": rounds, "connections": CONNECTIONS, "flood_connections": FLOOD_CONNECTIONS, **vars(chosen)}
    bench = Bench("control", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, address = Path(name), free_address()
        url = stack.enter_context(postgres.cluster(durable=True)) if chosen.store == "postgresql" else ""
        round_ = Round(folder, stack, size=chosen.nodes, processes=chosen.processes, store_url=url)
        command = [sys.executable, "-P", "-m", "bench.control.bare", address.rpartition(":")[2], round_.round_id]
        rivals = Server(command, address, folder / "rivals.log")
        stack.callback(rivals.end)
        compare(bench, "registration", round_, rivals, Fleet.registrations)
        measure_requests(bench, round_, rivals, rounds)
        measure_saturation(bench, round_, batches)
        answer_twice(bench, round_)
        examine(bench, round_)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
