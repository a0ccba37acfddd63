"""Why: what became of this node's leases, by the coordinator's evidence, and by a replay on this machine.

- What is printed is the coordinator's word; the replay is not: lease and rollout are the node's own signed bytes, the
  weights are the verified ones in this home, and only the tolerances are the coordinator's.
- The replay is the auditor's own program, `swarm-coordinator audit replay`, on a folder that is made here.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.auditing import CaseFile, Explanation, Explanations, Why
from protocol.errors import ConfigInvalid
from protocol.lease import Lease
from protocol.manifest import open_manifest
from protocol.plain import one_line
from protocol.signing import NodeKey
from swarm_node.api_client import Coordinator
from swarm_node.join_string import JoinString, round_folder
from swarm_node.member import POLICIES, TRUST_FILE
from swarm_node.updater import saved


async def ask(join: JoinString, key: NodeKey, about: str) -> Explanations:
    """The coordinator's word on a lease or claim, or on the last ones."""
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        return await coordinator.why(Why.from_value({"about": about}))
    finally:
        await coordinator.close()


def lines(explanation: Explanation) -> Iterator[str]:
    """What a person reads; no word of the coordinator's steers the terminal."""
    return map(one_line, _told(explanation))


def _told(explanation: Explanation) -> Iterator[str]:
    code = f" [{explanation.code}]" if explanation.code else ""
    audit = f", audit: {explanation.finding}" if explanation.finding else ""
    yield f"lease {explanation.lease_id}: {explanation.state}{code}{audit}"
    if explanation.claim_id:
        yield f"  claim {explanation.claim_id}"
    if explanation.said:
        yield f"  {explanation.said}"
    report = evidence(explanation)
    for finding in report.get("findings", ()):
        yield f"  {finding['rule']}, {finding['outcome']}:"
        yield f"    expected {finding['expected']}; observed {finding['observed']}"
        for at in finding["positions"]:
            yield (
                f"    sample {at['sample']}, position {at['position']}: token {at['claimed']} claimed, "
                f"{at['dictated']} dictated by {at['margin']:.3g} nats"
            )
    if "validator" in report:
        yield f"  validator {report['validator']}, tolerances {report['tolerance']} version {report['calibration']}"
    if "error" in report:
        yield f"  no verdict: {report['error']}"
    yield from _appeal(explanation)


def _appeal(explanation: Explanation) -> Iterator[str]:
    """What can be done about what was taken."""
    match explanation.appeal:
        case "possible":
            yield f"  next: `swarm-node why JOIN_STRING {explanation.lease_id} --replay` repeats the audit here;"
            yield f"  if it passes: `swarm-node appeal JOIN_STRING {explanation.lease_id} --reason …`"
        case "open":
            yield "  appeal: it waits for the operator's ruling"
        case "granted" | "denied":
            yield f"  appeal {explanation.appeal}: {explanation.ruling}"


def evidence(explanation: Explanation) -> dict[str, Any]:
    """The auditor's report; empty if there is none."""
    found: dict[str, Any] = json.loads(explanation.report or b"{}")
    return found


def write_case(join: JoinString, home: Path, found: Explanations, folder: Path) -> None:
    """The folder of a case, for `swarm-coordinator audit replay`."""
    (explanation,) = found.explanations
    if not (explanation.rollout or explanation.fragments):
        raise ConfigInvalid("Nothing was accepted for this lease: there is no claim to replay.")
    version = Lease.from_bytes(explanation.lease).version
    held = sorted((round_folder(home, join) / POLICIES).glob(f"{version:012d}-*"))
    documents = saved(round_folder(home, join) / TRUST_FILE)
    if not held or documents is None or documents.manifest is None:
        raise ConfigInvalid(f"{home} does not hold version {version}; the last two are kept.", hint="Replay sooner.")
    # Every version of a round has one sampler.
    newest = open_manifest(documents.manifest, round_id=join.round_id, version=documents.policy_version)
    file = CaseFile(
        round_id=join.round_id,
        lease=explanation.lease,
        rollout=explanation.rollout,
        fragments=explanation.fragments,
        sampler=newest.sampler,
    )
    folder.mkdir(parents=True)
    (folder / "case").write_bytes(file.to_bytes())
    (folder / "tolerances.json").write_bytes(found.tolerances)
    shutil.copytree(held[0], folder / "policies" / str(version))


def replay(join: JoinString, home: Path, found: Explanations) -> int:
    """Run the auditor's check here; its exit code."""
    with tempfile.TemporaryDirectory(prefix="echo-swarm-case-") as place:
        folder = Path(place) / "case"
        write_case(join, home, found, folder)
        program = Path(sys.executable).with_name("swarm-coordinator")
        command = [str(program), "audit", "replay", str(folder), "--tolerance", found.tolerance]
        return subprocess.run(command, check=False).returncode
