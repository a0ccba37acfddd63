"""Latency of turns at a node: from a submission to the request for the next turn's first token.

- One node, which asks for one group at a time. Its clock is `timed_node`'s.
- A turn's latency begins when the node sends the submission, and ends when it has passed the next turn of the group
  to its engine. The wait from the end of the turn's sampling to the submission is measured beside it.
- It is compared with the round trip of a request for leases that brought some, of the same node.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.environments.delayed_line import ADDRESSES, DelayedLine
from bench.environments.round import settings
from bench.rounds.served import BenchRound

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Latencies:
    """Times in a node's record, in seconds."""

    turns: list[float]
    """Seconds from a submission to the next turn of the same group in the engine."""
    waits: list[float]
    """Seconds from the end of a turn's sampling to its submission."""
    submissions: list[float]
    """Round trips of the submissions whose answers had next turns."""
    leases: list[float]
    """Round trips of the requests that brought leases."""
    share_at_once: float
    """The share of next turns that came with the verdict of the turn before."""


def latencies(events: Sequence[Event]) -> Latencies:
    """Read a node's record."""
    sampled = [event for event in events if event["kind"] == "sample"]
    submitted = [event for event in events if event["kind"] == "submit"]
    began = {lease: event["began"] for event in submitted for lease in event["answered"]}
    ended = {event["lease"]: event["ended"] for event in events if event["kind"] == "group"}
    waits = [event["began"] - ended[lease] for event in submitted for lease in event["answered"] if lease in ended]
    groups: dict[int, list[Event]] = {}
    for event in sampled:
        groups.setdefault(event["seed"], []).append(event)
    turns = [
        then["ended"] - began[before["lease"]]
        for group in groups.values()
        for before, then in pairwise(group)
        if before["lease"] in began
    ]
    with_turns = [event["ended"] - event["began"] for event in submitted if event["leases"]]
    leased = [event["ended"] - event["began"] for event in events if event["kind"] == "lease" and event["leases"]]
    at_once = sum(event["leases"] for event in submitted)
    return Latencies(turns, waits, with_turns, leased, at_once / max(1, sum(event["is_next"] for event in sampled)))


def measured(policy: Path, folder: Path, *, turns: int, line: DelayedLine | None = None) -> Latencies:
    """Play until there are so many next turns, on loopback or over a delayed line."""
    record = folder / "events.jsonl"
    if line is None:
        round_ = BenchRound(folder, policy, settings())
    else:
        host = ADDRESSES["coordinator"]
        round_ = BenchRound(folder, policy, settings(), host=host, command=line.command, call=line.call)
    with round_:
        program = [sys.executable, "-P", "-m", "bench.rounds.timed_node", str(record)]
        round_.add_node("node", "--groups", "1", "--no-share", program=program)
        round_.wait_for(
            f"{turns} next turns", lambda: sum(event.get("is_next", False) for event in read(record)) >= turns
        )
        return latencies(read(record))


def read(record: Path) -> list[Event]:
    """Return the events that are written so far."""
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]
