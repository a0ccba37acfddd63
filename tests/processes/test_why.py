"""A real hard finding, as its node's owner meets it: `why`, a replay, an appeal, and a coordinator that lies about it.

- One home forges one answer, then works honestly with the real agent and the same key.
- An impostor passes all on to the coordinator, and tells this home another story than the log, or another lease.
"""

import json
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ledger import tiles
from ledger.entry import AppealEntry, Entry, RulingEntry, VerdictEntry, parse
from protocol.policy.chunks import digest
from protocol.work.auditing import Explanation, Explanations, Why
from protocol.work.lease import Lease
from protocol.work.rollout import pack_tokens
from swarm_node.coordinator_api.join_string import parse as parse_join
from swarm_node.coordinator_api.join_string import round_folder
from swarm_node.keys import identity
from swarm_node.work.records import LeaseLog
from tests.processes.impostor import Impostor
from tests.processes.light_node import LightNode
from tests.processes.programs import PATIENCE_S, Swarm, said, until
from tests.processes.rounds import Coordinator, Settings, join, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2, "max_new_tokens": 8},
    "leases": {"groups_per_request": 1},
    "audit": {"first_groups": 64, "tolerance": "torch/fp32/cpu"},
}


def logged(swarm: Swarm, coordinator: Coordinator, name: str) -> list[Entry]:
    """The entries that `ledger verify` has proved."""
    files = swarm.folder / name
    proved = said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string, "--save", str(files))
    size = int(re.search(r"Verified: (\d+) entries", proved)[1])  # type: ignore[index]  # else the test fails here
    assert size <= tiles.TILE_HASHES
    bundle = tiles.tile_of(tiles.Tile.BUNDLE, 0, size)
    return list(map(parse, tiles.unbundle((files / "ledger/tile" / bundle.name).read_bytes(), size)))


@dataclass(frozen=True)
class Caught:
    """A home with an honest group and a forged one, both judged."""

    coordinator: Coordinator
    folder: Path
    honest: str
    """A lease."""
    lease: Lease
    """The lease of the forged answer."""
    answer: Explanations
    """The coordinator's explanation of it."""
    entry: int
    """The entry of the log with the verdict on it."""

    @property
    def told(self) -> Explanation:
        return self.answer.explanations[0]

    def words(self, command: str, lease: str = "", *, of: str = "") -> tuple[str, ...]:
        """A command about a lease, the forged one where none is named, to whoever claims to be the coordinator."""
        return (command, of or self.coordinator.join_string, lease or self.lease.lease_id, "--home", str(self.folder))


@pytest.fixture(scope="module")
def caught(swarm: Swarm, policy: Path) -> Caught:
    coordinator = Coordinator(swarm, SETTINGS).start(auditor=True)
    operator_of(swarm, coordinator, policy).publish()
    home = swarm.folder / "node"
    me, folder = identity.load_or_create(home / identity.FILE), round_folder(home, parse_join(coordinator.join_string))
    folder.mkdir(parents=True)
    with closing(LightNode(coordinator.join_string, seed=me.seed)) as node:
        node.register()
        (lease,) = node.lease(1)
        LeaseLog(folder).record([lease])  # as the agent does with each
        node.submit(node.answer(lease))

        def judged() -> Explanations | None:
            answer = node.call("/v1/verdicts", Why(about=lease.lease_id), Explanations)
            return answer if answer.explanations[0].finding == "hard" else None

        answer = until("the forged answer to be found out", judged, within_s=3 * PATIENCE_S)
        assert answer
        agent = join(swarm, "node", coordinator.join_string)
        until("an honest group", lambda: coordinator.status()["audit"]["verdicts"].get("pass"), within_s=3 * PATIENCE_S)
        agent.interrupt()

        def passed() -> str:
            explanations = node.call("/v1/verdicts", Why(), Explanations).explanations
            return next((explanation.lease_id for explanation in explanations if explanation.finding == "pass"), "")

        honest = until("one of the last groups to be found right", passed)

    def published() -> int | None:
        return verdict_in(logged(swarm, coordinator, "before"), answer.explanations[0])

    entry = until("the verdict to be published", published)
    assert entry
    return Caught(coordinator, home, honest, lease, answer, entry)


def test_the_lease_that_the_agent_noted_is_the_one_that_the_coordinator_tells_of(swarm: Swarm, caught: Caught) -> None:
    output = said(swarm, "swarm-node", *caught.words("why", caught.honest), "--replay")
    assert "pass: claim" in output
    assert "no note" not in output


def test_a_hard_finding_is_told_proved_and_repeated(swarm: Swarm, caught: Caught) -> None:
    output = said(swarm, "swarm-node", *caught.words("why"))
    assert f"lease {caught.lease.lease_id}: voided [replay_mismatch], audit: hard" in output
    assert re.search(r"sample \d, position \d: token \d+ claimed with", output)
    assert f"Verified: ledger entry {caught.entry} matches" in output
    explanation = json.loads(said(swarm, "swarm-node", *caught.words("why"), "--json").splitlines()[0])
    assert (explanation["logged"]["entry"], explanation["report"]["outcome"]) == (caught.entry, "hard fail")
    again = said(swarm, "swarm-node", *caught.words("why"), "--replay", code=4)
    assert "hard fail: claim" in again
    assert "no note" not in again


def test_a_coordinator_that_tells_the_node_another_story_than_the_log_is_named(swarm: Swarm, caught: Caught) -> None:
    impostor = Impostor(caught.coordinator.address)
    swarm.at_end(impostor.close)
    join_string = caught.coordinator.join_string.replace(caught.coordinator.url, impostor.url)
    story = caught.told.report.replace(b'"hard fail"', b'"soft fail"')
    assert story != caught.told.report
    impostor.lies = {"/v1/verdicts": changed(caught.answer, report=story)}
    lie = said(swarm, "swarm-node", *caught.words("why", of=join_string), code=1)
    assert (
        f"Entry {caught.entry} of the log (verified) has the verdict hard with evidence {digest(caught.told.report)}"
        in lie
    )
    assert "[proof_invalid]" in lie
    replayed = said(swarm, "swarm-node", *caught.words("why", of=join_string), "--replay", code=1)
    assert "hard fail: claim" in replayed
    assert "[proof_invalid]" in replayed


def test_what_cannot_be_compared_hinders_no_replay(swarm: Swarm, caught: Caught) -> None:
    impostor = Impostor(caught.coordinator.address)
    swarm.at_end(impostor.close)
    join_string = caught.coordinator.join_string.replace(caught.coordinator.url, impostor.url)
    impostor.lies = {f"/v1/receipts/{caught.told.claim_id}": b"no receipt"}
    output = said(swarm, "swarm-node", *caught.words("why", of=join_string), "--replay", code=4)
    assert "not compared: " in output
    assert "hard fail: claim" in output


@pytest.mark.parametrize("field", ["prompt", "seed", "version"])
def test_a_coordinator_that_tells_of_another_lease_than_it_gave_is_named(
    swarm: Swarm, caught: Caught, field: str
) -> None:
    impostor = Impostor(caught.coordinator.address)
    swarm.at_end(impostor.close)
    join_string = caught.coordinator.join_string.replace(caught.coordinator.url, impostor.url)
    other = {"prompt": pack_tokens([19, 20, 31]), "seed": caught.lease.seed ^ 1, "version": 2}[field]
    impostor.lies = {
        "/v1/verdicts": changed(caught.answer, lease=caught.lease.model_copy(update={field: other}).to_bytes())
    }
    lie = said(swarm, "swarm-node", *caught.words("why", of=join_string), "--replay", code=1)
    assert "The coordinator reports another lease" in lie
    assert "hard fail: claim" not in lie


def test_an_appeal_and_its_ruling_are_entries_that_everybody_can_prove(swarm: Swarm, caught: Caught) -> None:
    """The owner was never paid anything: the appeal is an entry with its ruling."""
    recorded = said(swarm, "swarm-node", *caught.words("appeal"), "--reason", "Look again.")
    assert f"recorded: appeal 1 about claim {caught.told.claim_id}" in recorded

    assert "appeal: waiting" in said(swarm, "swarm-node", *caught.words("why"))
    file = str(caught.coordinator.config_file)
    said(swarm, "swarm-coordinator", "appeals", "rule", file, "1", "deny", "--code", "fault_stands", "--reason", "No.")

    def about_it() -> list[type[Entry]]:
        entries = logged(swarm, caught.coordinator, "after")
        about = [entry for entry in entries if isinstance(entry, AppealEntry | RulingEntry)]
        return [type(entry) for entry in about if entry.claim_id == caught.told.claim_id]

    until("the ruling to be published", lambda: about_it() == [AppealEntry, RulingEntry])


def verdict_in(entries: list[Entry], explanation: Explanation) -> int | None:
    """Return the index of the verdict on a claim in the log."""
    for index, entry in enumerate(entries):
        if isinstance(entry, VerdictEntry) and entry.claim_id == explanation.claim_id:
            assert (entry.outcome, entry.evidence_digest) == ("hard", digest(explanation.report))
            return index
    return None


def changed(reply: Explanations, **change: object) -> bytes:
    """The answer with a lie in it."""
    (explanation,) = reply.explanations
    return reply.model_copy(update={"explanations": (explanation.model_copy(update=change),)}).to_bytes()
