"""`GET /v1/usage` and `/v1/operator/keys`: who sees which usage, and of which days."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.base.clock import now_ms
from coordinator.transactions import api_keys
from protocol.policy.chunks import digest
from tests.coordinator.api.test_completions import ask, make_key, working
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as made:
        await made.publish()
        yield made


async def test_a_key_shows_its_own_usage_to_its_holder_and_all_keys_only_to_the_operator(served: Served) -> None:
    key, database = await make_key(served), served.round.database
    other = await database.run(api_keys.make, "somebody else", 1, now_ms=now_ms())
    headers = {"Authorization": f"Bearer {key}"}
    async with working(served):
        await ask(served, key, n=2)
        found = await (await served.client.get("/v1/usage", headers=headers)).json()
    assert (found["name"], found["answered_queries"], found["open_queries"]) == ("caller", 1, 0)
    assert found["tokens"] > 0
    assert 0 < found["spent_micros"] == 10**6 - found["left_micros"]
    assert found["unit"] == served.round.config.round.money.to_json()
    (today,) = found["days"]
    assert {name: found[name] for name in ("answered_queries", "tokens", "spent_micros")}.items() <= today.items()
    assert today["prompt_tokens"] > 0
    listed = await (await served.client.get("/v1/operator/keys", headers=served.operator)).text()
    assert [row["name"] for row in json.loads(listed)["keys"]] == ["caller", "somebody else"]
    assert {row: found[row] for row in ("spent_micros", "tokens")}.items() <= json.loads(listed)["keys"][0].items()
    for secret in (key, other, digest(key.encode())):
        assert secret not in listed + json.dumps(found)
    assert "somebody else" not in json.dumps(found)
    assert (await served.client.get("/v1/operator/keys", headers=headers)).status == 401
    response = await served.client.get("/v1/usage")
    assert (response.status, (await response.json())["error"]["code"]) == (401, "key_refused")


async def test_days_of_usage_are_a_number_from_1_to_366(served: Served) -> None:
    headers = {"Authorization": f"Bearer {await make_key(served)}"}
    for days, status in (("1", 200), ("366", 200), ("0", 400), ("367", 400), ("x", 400), ("", 400), ("9" * 5000, 400)):
        response = await served.client.get("/v1/usage", params={"days": days}, headers=headers)
        assert response.status == status, days
        if status == 400:
            error = (await response.json())["error"]
            assert (error["code"], error["param"]) == ("field_refused", "days")
    assert (await served.client.get("/v1/operator/keys?days=0", headers=served.operator)).status == 400
