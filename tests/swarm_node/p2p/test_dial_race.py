"""Several addresses of one peer: one after the other, a moment apart, and the first that answers is enough."""

import pytest
import trio
from trio.testing import MockClock

from swarm_node.p2p.host import STAGGER_S, race

pytestmark = pytest.mark.trio


class Address:
    """Answers or fails after so many seconds."""

    def __init__(self, log: list[tuple[str, float]], name: str, seconds: float, *, fails: bool = False) -> None:
        self._log, self._name, self._seconds, self._fails = log, name, seconds, fails

    async def __call__(self) -> None:
        self._log.append((self._name, trio.current_time()))
        await trio.sleep(self._seconds)
        if self._fails:
            raise OSError(self._name)
        self._log.append((f"{self._name} answers", trio.current_time()))


async def test_the_second_is_tried_a_moment_later_and_the_first_to_answer_wins(autojump_clock: MockClock) -> None:
    log: list[tuple[str, float]] = []
    began = trio.current_time()
    await race([Address(log, "a", 60), Address(log, "b", 1), Address(log, "c", 60)])
    assert [(name, round(at - began, 6)) for name, at in log] == [
        ("a", 0.0),
        ("b", STAGGER_S),
        ("c", 2 * STAGGER_S),
        ("b answers", STAGGER_S + 1),
    ]


async def test_one_that_answers_soon_is_the_only_one_tried(autojump_clock: MockClock) -> None:
    log: list[tuple[str, float]] = []
    await race([Address(log, "a", STAGGER_S / 2), Address(log, "b", 0)])
    assert [name for name, _ in log] == ["a", "a answers"]


async def test_a_refusal_lets_nobody_wait(autojump_clock: MockClock) -> None:
    log: list[tuple[str, float]] = []
    began = trio.current_time()
    await race([Address(log, "a", 0, fails=True), Address(log, "b", 0)])
    assert trio.current_time() - began < STAGGER_S


async def test_if_all_fail_the_first_failure_is_told(autojump_clock: MockClock) -> None:
    log: list[tuple[str, float]] = []
    with pytest.raises(OSError, match="a"):
        await race([Address(log, "a", 0, fails=True), Address(log, "b", 5, fails=True)])
