"""A client that was written from docs/protocol.md alone, against a coordinator as people start it.

- `js/client.js` needs Node and no package. It says what it learned as lines of JSON, and ends with 1 where it refuses.
- Who lies to it answers in the coordinator's place, and changes what passes through.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from protocol.policy import chunks
from protocol.wire import canonical
from tests import npm
from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import Coordinator, Operator, Settings, operator_of
from tests.swarm_node.web import Handler, web

pytestmark = pytest.mark.processes

CLIENT = Path(__file__).with_name("js") / "client.js"
DAY_MS = 86_400_000
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "staleness": {"max_updates": 100},
    "leases": {"newcomer_leases": 4},
    "publish": {"chunk_size_bytes": 4096, "patches": False},
    "audit": {"first_groups": 4, "tolerance": "torch/fp32/cpu"},
}

Said = list[dict[str, Any]]
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="session", autouse=True)
def _node() -> None:
    """Choose the widest scope, so that nothing is made for tests that are then skipped."""
    npm.require_node()


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm) -> Coordinator:
    return Coordinator(swarm, SETTINGS).start(auditor=True)


@pytest.fixture(scope="module")
def operator(swarm: Swarm, coordinator: Coordinator, policy: Path) -> Operator:
    """Start the operator of a round with one version."""
    made = operator_of(swarm, coordinator, policy)
    made.publish()
    return made


@pytest.fixture
def join_string(coordinator: Coordinator, operator: Operator) -> str:
    return coordinator.join_string


def client(command: str, join_string: str, folder: Path, *options: str, code: int = 0) -> Said:
    """Return what a command of the client says."""
    words = ["node", str(CLIENT), command, join_string, str(folder), *options]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (code, ""), ran.stdout
    return [json.loads(line) for line in ran.stdout.splitlines()]


def refusal(command: str, join_string: str, folder: Path, *options: str) -> str:
    """The code with which a command refuses to go on."""
    *_, last = client(command, join_string, folder, *options, code=1)
    return str(last["refused"])


@contextmanager
def impostor(coordinator: Coordinator, path: str, change: Change) -> Iterator[str]:
    """A join string whose address changes what it passes on from below a path."""

    def manner(request: Handler) -> None:
        answer = coordinator.http.get(request.path)
        changed = change(answer.content) if answer.is_success and path in request.path else answer.content
        request.answer(answer.status_code, changed)

    _, _, round_id = coordinator.join_string.partition("#")
    with web(manner) as server:
        yield f"{server.url}#{round_id}"


def flipped(at: int) -> Change:
    """One bit of one byte changed."""
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]


def another_version(data: bytes) -> bytes:
    document = json.loads(data)
    document["signed"]["version"] += 1
    return json.dumps(document).encode()


def another_signature(data: bytes) -> bytes:
    """The signature of another document of the same form."""
    document = json.loads(data)
    (signature,) = document["signatures"]
    signature["sig"] = signature["sig"][:-2] + f"{int(signature['sig'][-2:], 16) ^ 1:02x}"
    return json.dumps(document).encode()


@dataclass(frozen=True)
class Work:
    """A client that has read the ledger, and then taken three leases."""

    folder: Path
    before: dict[str, Any]
    said: Said


@pytest.fixture(scope="module")
def work(coordinator: Coordinator, operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("worker")
    (before,) = client("ledger", coordinator.join_string, folder)
    return Work(folder, before, client("work", coordinator.join_string, folder))


def another_proof(data: bytes) -> bytes:
    receipt = canonical.decode(data)
    receipt["entries"][0]["proof"][0] = bytes(32)
    return canonical.encode(receipt)


def test_it_makes_the_files_and_its_answers_get_the_documents_verdicts(work: Work, policy: Path) -> None:
    version, introduced, honest, wrong, returned, *leases = work.said
    files = {path.name: path for path in policy.iterdir()}
    assert version["files"] == {name: chunks.digest(path.read_bytes()) for name, path in files.items()}
    for name, path in files.items():
        assert (work.folder / f"version-{version['version']}" / name).read_bytes() == path.read_bytes()
    assert 0 < introduced["canary_nats"] < 1e-5
    assert introduced["beat"] == introduced["registered"]
    assert introduced["beat"]["newest_version"] == version["version"]

    assert [verdict["outcome"] for verdict in honest["verdicts"]] == ["accepted", "already_accepted"]
    (verdict,) = wrong["verdicts"]
    assert (verdict["outcome"], verdict["code"]) == ("rejected", "tokens_invalid")
    assert verdict["evidence"]["step"] == "tokens"
    assert verdict["evidence"]["positions"] == [{"sample": 0, "position": 0}]
    assert {lease["lease"]: lease["state"] for lease in leases} == {
        honest["lease"]: "pending",
        wrong["wrong"]: "rejected",
        returned["returned"]: "skipped",
    }


def test_requests_that_are_not_what_the_document_asks_get_its_codes(join_string: str, tmp_path: Path) -> None:
    said = {one["name"]: (one.get("code"), one.get("status")) for one in client("forge", join_string, tmp_path)}
    assert said == {
        "broken": ("bad_signature", 401),
        "replayed": ("nonce_replayed", 409),
        "late": ("request_expired", 401),
        "elsewhere": ("wrong_audience", 401),
        "trailing": ("malformed_message", 400),
        "unknown": ("malformed_message", 400),
        "wide": ("not_canonical", 400),
        "stranger": ("unknown_node", 403),
        "whole": ("not_canonical", 400),
    }


@pytest.mark.parametrize(
    ("path", "change", "code"),
    [
        ("/metadata/1.root.json", flipped(-2), "untrusted_root"),
        ("/metadata/timestamp.json", another_signature, "untrusted_metadata"),
        ("/metadata/timestamp.json", another_version, "untrusted_metadata"),
        (".snapshot.json", flipped(-2), "untrusted_metadata"),
        (".targets.json", another_signature, "untrusted_metadata"),
        (".manifest", flipped(-1), "untrusted_metadata"),
        ("/chunks/", flipped(0), "chunk_mismatch"),
        ("/chunks/", lambda data: data[:-1], "chunk_mismatch"),
        ("/chunks/", lambda data: data + b"\0", "message_too_large"),
    ],
)
def test_a_version_that_was_tampered_with_is_refused(
    join_string: str, coordinator: Coordinator, tmp_path: Path, path: str, change: Change, code: str
) -> None:
    with impostor(coordinator, path, change) as elsewhere:
        assert refusal("version", elsewhere, tmp_path) == code


@pytest.mark.parametrize(
    ("path", "change", "code"),
    [
        ("/ledger/checkpoint", flipped(80), "checkpoint_invalid"),
        ("/ledger/checkpoint", flipped(-4), "checkpoint_invalid"),
        ("/ledger/tile/0/", flipped(0), "proof_invalid"),
        ("/ledger/tile/0/", flipped(-1), "proof_invalid"),
        ("/ledger/tile/entries/", flipped(-1), "proof_invalid"),
        ("/ledger/tile/entries/", lambda data: data[:-1], "proof_invalid"),
    ],
)
def test_a_log_that_was_tampered_with_is_refused(
    join_string: str, coordinator: Coordinator, tmp_path: Path, path: str, change: Change, code: str
) -> None:
    with impostor(coordinator, path, change) as elsewhere:
        assert refusal("ledger", elsewhere, tmp_path) == code


def test_metadata_past_its_date_is_refused(join_string: str, tmp_path: Path) -> None:
    (version,) = client("version", join_string, tmp_path)
    assert version["roots"] == 1
    later = version["now_ms"] + 365 * DAY_MS
    assert refusal("version", join_string, tmp_path, "--now", str(later)) == "metadata_expired"


def test_an_older_timestamp_than_the_one_seen_is_refused(
    join_string: str, coordinator: Coordinator, operator: Operator, tmp_path: Path
) -> None:
    old = coordinator.http.get("/v1/metadata/timestamp.json").content
    newest = operator.publish()
    assert client("version", join_string, tmp_path)[0]["version"] == newest
    with impostor(coordinator, "/metadata/timestamp.json", lambda _: old) as elsewhere:
        assert refusal("version", elsewhere, tmp_path) == "rolled_back"
        assert client("version", elsewhere, tmp_path / "newcomer")[0]["version"] == newest - 1


def test_what_it_has_sampled_passes_the_audit_and_the_log_has_it(
    work: Work, coordinator: Coordinator, join_string: str
) -> None:
    """Run after the others, since the auditor has to load what it judges with."""
    _, introduced, honest, *_ = work.said

    def found() -> str:
        *_, oldest = client("why", join_string, work.folder)
        assert oldest["claim"] == honest["honest"]
        return "" if oldest["finding"] == "waiting" else str(oldest["finding"])

    assert until("the audit of what it has sampled", found) == "pass"

    def logged() -> Said:
        (now,) = client("ledger", join_string, work.folder)
        entries = [entry for entry in now["entries"] if entry.get("claim_id") == honest["honest"]]
        return entries if len(entries) > 1 else []

    pending, verdict = until("the verdict in the log", logged)
    assert (pending["kind"], verdict["kind"], verdict["outcome"]) == ("pending", "verdict", "pass")
    assert pending["node_id"] == introduced["node"]
    assert pending["amount_micros"] == honest["verdicts"][0]["credit_micros"] > 0
    (receipt,) = client("receipt", join_string, work.folder, honest["honest"])
    assert receipt["entries"] == [pending]
    with impostor(coordinator, "/receipts/", another_proof) as elsewhere:
        assert refusal("receipt", elsewhere, work.folder, honest["honest"]) == "proof_invalid"

    (after,) = client("ledger", join_string, work.folder)
    assert after["continues"] >= work.before["size"] + 2
    assert after["entries"][: work.before["size"]] == work.before["entries"]


def test_it_answers_queries_at_their_own_temperatures(
    swarm: Swarm, coordinator: Coordinator, join_string: str, work: Work
) -> None:
    """Audited as its other work: the first lease of each run is a query's."""
    made = swarm.start(
        "api-keys", script("swarm-coordinator"), "api-keys", "create", str(coordinator.config_file), "someone",
        "--budget", "1000000", "--json",
    )  # fmt: skip
    assert made.process.wait(timeout=PATIENCE_S) == 0, made.log
    key = json.loads(made.output)["key"]

    def is_waiting() -> bool:
        with coordinator.copy_of_store() as connection:
            return bool(connection.execute(sa.text("SELECT count(*) FROM queries WHERE state = 'open'")).scalar())

    def asked(temperature: float) -> dict[str, Any]:
        body = {"model": "swarm", "prompt": [10, 11, 12], "n": 4, "temperature": temperature, "return_token_ids": True}
        with ThreadPoolExecutor(1) as callers:
            headers = {"Authorization": f"Bearer {key}"}
            answer = callers.submit(
                httpx.post, f"{coordinator.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S
            )
            until("the query", is_waiting)
            said = client("work", join_string, work.folder)
            found = answer.result(timeout=PATIENCE_S)
        assert found.status_code == 200, found.text
        return {"choices": found.json()["choices"], "lease": said[2]["lease"]}

    greedy, hot = asked(0), asked(2)
    assert [len({str(choice["token_ids"]) for choice in one["choices"]}) > 1 for one in (greedy, hot)] == [False, True]

    def findings() -> list[str]:
        told = {one["lease"]: one["finding"] for one in client("why", join_string, work.folder)}
        return [told[one["lease"]] for one in (greedy, hot)]

    until("the audits", lambda: findings() == ["pass", "pass"])
