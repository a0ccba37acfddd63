"""`swarm-coordinator gifts`: amounts as people write them, in a round that was launched."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.commands.gifts import _micros
from coordinator.service.opening import mark_launched
from protocol.errors import ConfigInvalid
from tests.coordinator.served import serve

ROUND = ["round.unit=EUR", "round.unit_decimals=2"]


@pytest.mark.parametrize(("text", "micros"), [("25", 25_000_000), ("12.50", 12_500_000), ("0.000001", 1)])
def test_an_amount_is_exact(text: str, micros: int) -> None:
    assert _micros(text) == micros


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1,50", "1e400", "9e999999", "nan", "inf", "0.0000001", "25 EUR", "9" * 5_000]
)
def test_anything_else_is_no_amount(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="is not an amount"):
        _micros(text)


@pytest.mark.asyncio
async def test_a_gift_is_recorded_listed_shown_and_its_giver_erased(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        file = tmp_path / "round.toml"
        file.write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\nunit = "EUR"\nunit_decimals = 2\n')
        done = CliRunner().invoke(app, ["gifts", words[0], str(file), *words[1:]])
        return done.output + (str(done.exception) if done.exception else "")

    async with serve(tmp_path, *ROUND) as served:
        give = ("add", "12.50", "--from", "Anna & <Ben>", "--reference", "booking-1")
        assert "was not launched yet" in run(*give)
        mark_launched(served.round.folder)
        assert "Recorded gift 1: 12.50 EUR from Anna & <Ben>." in run(*give)
        assert "was recorded before as gift 1" in run(*give)
        assert "1 gift, 12.50 EUR" in run("list")
        page = await (await served.client.get("/")).text()
        assert "Anna &amp; &lt;Ben&gt;" in page
        assert "booking-1" not in page
        status = await (await served.client.get("/v1/status")).json()
        assert status["gifts"]["micros"] == 12_500_000
        entries = await (await served.client.get("/entries")).text()
        assert "Gift 1: 12.50" in entries.replace("\u202f", "")
        assert "is erased" in run("forget", "1")
        assert "(erased)" in run("list")
