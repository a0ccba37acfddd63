"""Two agents with one node's key are both told so; an agent that restarts is not."""

import pytest

from coordinator.service.agent_sessions import CONFLICT_S, NODES_KEPT, SESSIONS_KEPT, AgentSessions
from protocol.errors import KeyInUse
from protocol.ids import NodeId

ONE = NodeId("1" * 64)
BEAT_S = 10.0


def told(sessions: AgentSessions, said: str, now_s: float = 0, beat_s: float = BEAT_S) -> str:
    """Return the sessions that are refused, in the order of their heartbeats, one each `beat_s`."""
    refused = ""
    for number, session in enumerate(said):
        try:
            sessions.require_only(ONE, session, now_s + number * beat_s)
        except KeyInUse:
            refused += session
    return refused


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("aaaa", ""),
        ("aabbbccc", ""),  # two restarts
        ("abab", "ab"),
        ("aababb", "abb"),
        ("abcabc", "abc"),
        ("aba" + "a" * 5, "a" * 6),
        ("aba" + "a" * 6, "a" * 6),  # the other has stopped
    ],
)
def test_only_a_session_that_returns_after_another_one_shows_a_second_agent(said: str, refused: str) -> None:
    assert CONFLICT_S == 6 * BEAT_S
    assert told(AgentSessions(), said) == refused


def test_many_copies_of_one_image_whose_heartbeats_come_in_turn_are_found() -> None:
    copies = "abcdefghijkl"
    assert told(AgentSessions(), 3 * copies, beat_s=BEAT_S / len(copies)) == (3 * copies)[SESSIONS_KEPT:]


def test_an_agent_that_crashes_at_each_start_is_alone() -> None:
    assert told(AgentSessions(), "abcdefghijkl") == ""


def test_nodes_that_come_and_go_fill_no_memory() -> None:
    sessions = AgentSessions()
    for number in range(NODES_KEPT + 10):
        sessions.require_only(NodeId(str(number)), "a", 0)
    assert len(sessions._of) == NODES_KEPT
