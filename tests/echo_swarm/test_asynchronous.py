"""The client of the swarm: addresses, and waits for a round that does not answer."""

import pytest

from echo_swarm import AsyncSwarm
from protocol.errors import ConfigInvalid, Unreachable
from tests.processes.programs import free_address


def test_an_address_without_its_scheme_is_refused_at_once() -> None:
    with pytest.raises(ConfigInvalid, match=r"Write http://127\.0\.0\.1:8700"):
        AsyncSwarm("127.0.0.1:8700", "es-key")


@pytest.mark.asyncio
async def test_a_wait_for_a_round_that_does_not_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncSwarm(f"http://{free_address()}", "es-key", patience_s=2.5) as swarm:
        with pytest.raises(Unreachable):
            await swarm.sample(["1+1=", "2+2="])
    (said,) = caplog.messages
    assert "does not answer" in said
    assert "Asking again for up to" in said
