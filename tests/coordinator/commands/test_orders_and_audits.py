"""Commands about nodes and audits, typed against a round that listens."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa
from aiohttp.test_utils import BaseTestServer
from typer.testing import CliRunner, Result

from coordinator.api.guard import listen
from coordinator.cli import app
from coordinator.config import fixed
from coordinator.store import tables
from protocol.errors import ConfigInvalid, NotFound
from protocol.policy import chunks
from protocol.wire.signing import NodeKey, open_envelope
from tests.coordinator.served import Served, serve
from tests.processes.programs import free_address

pytestmark = pytest.mark.asyncio


@dataclass
class Listening:
    """A round at its own address, with a node that has earned something, and the round's file."""

    served: Served
    node: NodeKey
    claim_id: str
    lease_id: str
    credit_micros: int
    file: Path

    async def say(self, *words: str, given: str = "") -> Result:
        """A command, beside the server."""
        command = [words[0], words[1], str(self.file), *words[2:]]
        return await asyncio.to_thread(CliRunner().invoke, app, command, input=given)


@pytest_asyncio.fixture
async def round_(tmp_path: Path) -> AsyncIterator[Listening]:
    address = free_address()
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\nlisten = "{address}"\n')
    async with serve(tmp_path, f"round.listen={address}") as served:
        server = served.client.server
        assert isinstance(server, BaseTestServer)
        assert server.runner
        await listen(server.runner, address)  # type: ignore[arg-type]  # `Server` makes a Runner
        await served.publish()
        node = await served.join(1)
        (lease,) = await served.lease(node)
        envelope = served.answer(node, lease)
        (verdict,) = await served.submit(node, envelope)
        claim_id = chunks.digest(open_envelope("rollout", envelope).payload)
        yield Listening(served, node, claim_id, lease.lease_id, verdict.credit_micros, file)


async def test_a_ban_says_what_it_would_void_and_asks(round_: Listening) -> None:
    await round_.served.lease(round_.node)
    unit = round_.served.round.config.round.money
    refused = await round_.say("nodes", "ban", "n1", "--reason", "why not", given="n\n")
    assert refused.exit_code == 1
    assert f"This bans owner {round_.node.node_id} with 1 node:" in refused.stderr
    assert f"1 claim worth {unit.short_figure(round_.credit_micros)} would be void" in refused.stderr
    assert "1 lease would end, and 1 group would leave" in refused.stderr
    assert "0 claims worth" in refused.stderr
    unasked = await round_.say("nodes", "ban", "n1", "--reason", "why not")
    assert isinstance(unasked.exception, ConfigInvalid)
    assert "Add --yes" in unasked.exception.hint
    row = json.loads((await round_.say("nodes", "show", "n1", "--json")).stdout)
    assert (row["banned_ms"], row["pending_micros"], row["orders"]) == (None, round_.credit_micros, [])

    done = await round_.say("nodes", "ban", "n1", "--reason", "made them up", given="y\n")
    assert done.stdout.endswith(f"ban: owner {round_.node.node_id}\n")
    row = json.loads((await round_.say("nodes", "show", "n1", "--json")).stdout)
    assert row["voided_micros"] == round_.credit_micros

    again = await round_.say("nodes", "ban", "n1", "--reason", "twice")
    assert "is banned already" in again.stderr
    assert again.stdout == f"owner {round_.node.node_id} is banned already: nothing changed\n"


async def test_an_order_that_changes_nothing_says_why(round_: Listening) -> None:
    for order, why in (("resume", "is not paused"), ("unban", "is not banned")):
        done = await round_.say("nodes", order, "n1", "--reason", "to be sure")
        assert done.stdout.endswith(f"{round_.node.node_id} {why}: nothing changed\n")


async def test_scripts_ban_without_a_question(round_: Listening) -> None:
    done = await round_.say("nodes", "ban", "n1", "--reason", "made them up", "--yes")
    assert (done.stdout, done.stderr) == (f"ban: owner {round_.node.node_id}\n", "")


async def test_one_audit_is_shown_by_its_claim_or_lease(round_: Listening) -> None:
    for text in (round_.claim_id, round_.claim_id[:8], round_.lease_id):
        row = json.loads((await round_.say("audit", "show", text, "--json")).stdout)
        assert (row["claim_id"], row["node_id"], row["why"]) == (round_.claim_id, round_.node.node_id, "")
    shown = await round_.say("audit", "show", round_.claim_id[:8])
    assert f"claim {round_.claim_id} of n1, version 1" in shown.stdout
    assert "drawn: not drawn (epoch 1 is " in shown.stdout
    assert "verdict: no verdict yet" in shown.stdout
    unit = round_.served.round.config.round.money
    assert f"credit: pending, {unit.exact(round_.credit_micros)} for " in shown.stdout
    assert shown.stdout.endswith(f"swarm-coordinator audit replay {round_.file} {round_.claim_id}\n")


async def test_the_newest_audits_are_listed_for_all_nodes_and_for_one(round_: Listening) -> None:
    async def listed(*words: str) -> list[str]:
        shown = await round_.say("audit", "list", *words)
        assert shown.exit_code == 0, shown.output
        return shown.stdout.splitlines()

    assert await listed() == ["0 audits"], "a claim that was not drawn has no audit"
    judged = sa.update(tables.audits).values(why="drawn", finding="hard", judged_ms=1)
    await round_.served.round.database.run(lambda connection: connection.execute(judged))
    line, count = await listed("--node", "n1")
    assert line.startswith(f"{round_.claim_id[:12]} 20")
    assert "n1 " in line
    assert "version 1     hard fail, by lottery, " in line
    assert count == "1 audit"
    other = await round_.served.join(2)
    assert await listed("--node", other.node_id) == ["0 audits"]
    (row,) = json.loads((await listed("--json"))[0])
    assert (row["claim_id"], row["finding"], row["amount_micros"]) == (round_.claim_id, "hard", round_.credit_micros)


@pytest.mark.parametrize("text", ["abcdef", "f" * 64, "n1"])
async def test_a_claim_that_does_not_exist_is_named(round_: Listening, text: str) -> None:
    found = await round_.say("audit", "show", text)
    assert isinstance(found.exception, NotFound), found.output


async def test_provenance_finds_a_node_by_its_name(round_: Listening) -> None:
    for text in ("n1", round_.node.node_id, round_.node.node_id[-8:]):
        found = await round_.say("audit", "provenance", text)
        assert (found.exit_code, found.stdout) == (0, ""), "no update has used its groups yet"
    assert isinstance((await round_.say("audit", "provenance", "n2")).exception, NotFound)


async def test_api_takes_the_rounds_file_or_its_folder(round_: Listening) -> None:
    assert fixed.is_round(round_.file.parent / "round")
    for place in (str(round_.file), str(round_.file.parent / "round")):
        done = await asyncio.to_thread(CliRunner().invoke, app, ["api", place])
        assert isinstance(done.exception, ConfigInvalid)
        assert done.exception.message.startswith("A round on SQLite"), "the round was found"
