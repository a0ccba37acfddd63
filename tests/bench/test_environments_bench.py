"""The bench of environments: what a node's record comes to, the line with delay, and episodes through a process."""

import socket
import threading
import time
from pathlib import Path

import pytest

from bench.environments import kinds
from bench.environments.delayed_line import ADDRESSES, DelayedLine, obstacle
from bench.environments.latency import latencies, read

ROUND_TRIP_S = 0.2


def test_a_turns_latency_is_from_its_submission_to_the_next_turn_of_its_group() -> None:
    times = {"began": 0.0, "ended": 0.5}
    seen = latencies(
        [
            {"kind": "lease", "began": 0.0, "ended": 0.25, "leases": 2},
            {"kind": "lease", "began": 0.0, "ended": 9.0, "leases": 0},
            {"kind": "sample", **times, "lease": "a", "seed": 1, "is_next": False},
            {"kind": "sample", **times, "lease": "x", "seed": 2, "is_next": False},
            {"kind": "submit", "began": 1.0, "ended": 3.0, "answered": ["a", "x"], "leases": 1},
            {"kind": "sample", "began": 3.0, "ended": 4.0, "lease": "b", "seed": 1, "is_next": True},
            {"kind": "sample", "began": 8.0, "ended": 9.0, "lease": "y", "seed": 2, "is_next": True},
            {"kind": "submit", "began": 5.0, "ended": 6.0, "answered": ["b"], "leases": 0},
        ]
    )
    assert seen.turns == [3.0, 8.0]
    assert seen.submissions == [2.0]
    assert seen.leases == [0.25]
    assert seen.share_at_once == 0.5


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    record = tmp_path / "events.jsonl"
    assert read(record) == []
    record.write_text('{"kind": "lease"}\n{"kind": "le')
    assert read(record) == [{"kind": "lease"}]


@pytest.mark.skipif(bool(obstacle()), reason=f"no line can be made here: {obstacle()}")
def test_packets_take_half_of_the_round_trip_each_way() -> None:
    with DelayedLine(ROUND_TRIP_S) as line:
        listening = line.call("coordinator", lambda: socket.create_server((ADDRESSES["coordinator"], 0)))
        port = listening.getsockname()[1]

        def echo() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.sendall(taken.recv(100))

        threading.Thread(target=echo, daemon=True).start()
        began = time.monotonic()
        with listening, line.call("node", lambda: socket.create_connection((ADDRESSES["coordinator"], port))) as caller:
            connected = time.monotonic()
            caller.sendall(b"turn")
            assert caller.recv(100) == b"turn"
            assert connected - began >= ROUND_TRIP_S
            assert time.monotonic() - connected >= ROUND_TRIP_S


def test_episodes_of_a_group_are_played_until_all_are_over(tmp_path: Path) -> None:
    own = next(kinds.kinds(tmp_path))
    problem, *_ = kinds.problems(own)
    episodes = kinds.Episodes("key", problem, own.says)
    questions = []
    while asked := episodes.asked():
        questions.append([None if turns is None else len(turns) for turns in asked.turns])
        if len(questions) == 1:
            episodes.end(0)
        if len(questions) == kinds.TURNS_MAX:
            assert all(asked.over)
            for number in range(kinds.SAMPLES):
                episodes.end(number)
    others = kinds.SAMPLES - 1
    assert questions == [[1] * kinds.SAMPLES, *([None, *[turn] * others] for turn in (2, 3, 4))]
    assert episodes.played == kinds.SAMPLES + 3 * others
    assert kinds.turns_per_s(own, "alone", 0.01) > 0
