"""Two agents with one node's key are both told so; an agent that restarts is not."""

import pytest

from coordinator.service.agent_sessions import CONFLICT_MS, NODES_KEPT, AgentSessions
from protocol.errors import KeyInUse
from protocol.ids import NodeId

ONE = NodeId("1" * 64)
BEAT_MS = 10_000


def told(sessions: AgentSessions, said: str, now_ms: int = 0) -> str:
    """Return the sessions that are refused, in the order of their heartbeats, one each `BEAT_MS`."""
    refused = ""
    for number, session in enumerate(said):
        try:
            sessions.require_only(ONE, session, now_ms + number * BEAT_MS)
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
    assert CONFLICT_MS == 6 * BEAT_MS
    assert told(AgentSessions(), said) == refused


def test_nodes_that_come_and_go_fill_no_memory() -> None:
    sessions = AgentSessions()
    for number in range(NODES_KEPT + 10):
        sessions.require_only(NodeId(str(number)), "a", 0)
    assert len(sessions._of) == NODES_KEPT
