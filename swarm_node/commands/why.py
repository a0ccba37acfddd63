"""Why: what became of this node's leases, by the coordinator's evidence, and by a replay on this machine.

- What is printed is the coordinator's word; of one lease it is compared with the public log (`ledger_check`), which it
  has signed for all.
- The replay is hardly its word: the rollout is what the node has signed, the lease is the one that this home has noted
  when it came (`leased`), and the weights are the verified ones in this home. Where the coordinator tells of another
  lease or of another's claim, nothing is replayed, and that is its fault. Tolerances are its word, and so is the lease
  where there is no note of it.
- Evidence of intake is what this home has kept of it: the coordinator keeps a code and words, and of bytes that name no
  lease of this node's nothing.
- The replay is the auditor's own program, `swarm-coordinator audit replay`, on a folder that is made here. It is a
  process of its own, under a limit of memory: it uses the versions' configurations and tokenizers.
- It compares with the versions that the audit compared with, as far as this home has them; where one is missing that
  could bear the finding out, there is no verdict, and no pass.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ledger.book import ClaimState
from protocol.errors import ConfigInvalid, ProofInvalid
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.policy.manifest import open_manifest
from protocol.text.plain import one_line
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work import evidence
from protocol.work.auditing import CaseFile, Explanation, Explanations, Why
from protocol.work.fragment import Fragment
from protocol.work.lease import Lease, LeaseState
from protocol.work.rollout import RolloutClaim
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import JoinString, round_folder
from swarm_node.engine import memory
from swarm_node.ledger import audit_report, ledger_check
from swarm_node.ledger.audit_report import ReportedAudit, ReportedPosition
from swarm_node.ledger.ledger_check import Logged
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import TRIES, LogWatch, Overtaken
from swarm_node.ledger.receipts import RECEIPTS
from swarm_node.machine import use
from swarm_node.member import POLICIES, SEEN_LOG, TRUST_FILE
from swarm_node.versions.updater import saved
from swarm_node.work.lease_log import Leased
from swarm_node.work.rejections import FOLDER, Refusal, Refusals

NOT_ASKED = Logged("not_asked")
"""Of a lease that was not asked about by its name."""

NOTHING = Explanations(tolerance="", tolerances=b"", explanations=())
"""Where the coordinator knows of no such lease, or does not answer."""

BLAMELESS = (
    "This is the coordinator's fault, so nothing is replayed. Publish this message, and mention it if you appeal."
)

MEANING: dict[str, str] = {
    ClaimState.POSTED: "accepted, and its credit is final",
    ClaimState.PENDING: "accepted; its credit becomes final when the learner has used it and no audit is pending",
    ClaimState.VOIDED: "accepted, but its credit was revoked",
    LeaseState.OFFERED: "open: this node has not confirmed it yet",
    LeaseState.HELD: "open: it waits on this node",
    LeaseState.GENERATING: "open: it is being sampled",
    LeaseState.ACCEPTED: "accepted without credit",
    LeaseState.REJECTED: "rejected by the format checks",
    LeaseState.EXPIRED: "expired before a result arrived",
    LeaseState.SKIPPED: "returned by this node without a result",
    LeaseState.CANCELLED: "cancelled by the coordinator because it is no longer needed; no fault",
}
"""Of a lease's state, or of its claim's."""

LEGEND = "Meaning of the states:"
ONE = "Details of one lease: `swarm-node why JOIN_STRING LEASE` (the first 6 characters are enough)."

REPLAY_MAX_S = 3 * 3600.0
"""A processor takes an hour for a large policy; a tokenizer without end takes for ever."""

NO_VERDICT, SOFTER = 1, (0, 3, 5)
"""Exit codes of the replay; the softer ones are pass, soft fail and held."""


async def ask(join: JoinString, key: NodeKey, about: str) -> Explanations:
    """The coordinator's word on a lease or claim, or on the last ones."""
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        return answering(about, await coordinator.why(Why.from_value({"about": about})))
    finally:
        await coordinator.close()


def answering(about: str, found: Explanations) -> Explanations:
    """What was answered, if it is of the one lease or claim that was asked about, where one was."""
    if about and [about in (one.lease_id, one.claim_id) for one in found.explanations] != [True]:
        raise ProofInvalid(f"The coordinator answered about another lease than {about}.")
    return found


async def look_up(join: JoinString, home: Path, key: NodeKey, told: Explanation) -> Logged:
    """Where the log has what was told; raises where it says another thing."""
    folder = round_folder(home, join)
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        reader = LogReader(coordinator.origin)
        watch = LogWatch(reader, join.round_id, folder / SEEN_LOG)
        look = partial(ledger_check.find_entry, reader, watch, join.round_id, key.node_id, told, folder / RECEIPTS)
        for _ in range(TRIES - 1):
            with suppress(ProofInvalid, Overtaken):  # a checkpoint may be replaced while its tiles are fetched
                return await look()
        return await look()
    finally:
        await coordinator.close()


def lines(explanation: Explanation) -> Iterator[str]:
    """What a person reads; no word of the coordinator's steers the terminal."""
    return map(one_line, _told(explanation))


def refused(join: JoinString, home: Path, about: str) -> list[Refusal]:
    """What this home has kept of a lease or claim, or of the last ones, the newest first."""
    kept = Refusals(round_folder(home, join) / FOLDER)
    return [one for one in kept if about in ("", one.lease_id, one.evidence.claim_id)]


def report(
    found: Explanations, refusals: list[Refusal], place: Logged = NOT_ASKED, *, about: str = "", as_json: bool
) -> Iterator[str]:
    """Lines for a person, or JSON, one for each lease: the coordinator's word, and beside it the evidence kept here.

    `place` is that in the log, of the one lease that was asked about. Where none was, people get a line of each that
    nothing is wrong with.
    """
    left = {one.lease_id: one for one in refusals}
    for explanation in found.explanations:
        refusal = left.pop(explanation.lease_id, None)
        if as_json:
            told = explanation.model_dump(exclude={"lease", "rollout", "fragments", "report"})
            its_report = audit_report.read(explanation.report)
            unreadable: dict[str, Any] = {"unreadable": True}
            seen = its_report.model_dump(exclude_unset=True) if its_report else unreadable
            if seen:
                seen["command"] = repeated(explanation)  # the auditor's own needs the operator's files
            there = {"state": place.state, "entry": place.entry, "of": place.size}
            yield json.dumps(told | {"report": seen, "logged": there, "refused": _json(refusal)})
            continue
        yield from lines(explanation) if about or refusal or _has_more(explanation) else (_verdict(explanation),)
        yield from _logged(place)
        yield from refusal_lines(refusal) if refusal else ()
    for lease_id, refusal in left.items():
        if as_json:
            yield json.dumps({"lease_id": lease_id, "refused": _json(refusal)})
            continue
        yield f"lease {one_line(lease_id)}: rejected"
        yield from refusal_lines(refusal)
    if not as_json:
        yield from _legend(found)
        yield from (ONE,) if found.explanations and not about else ()


def _has_more(explanation: Explanation) -> bool:
    """Whether something is wrong with a lease, or has been said about it."""
    wrong = explanation.finding in ("soft", "hard", "held") or explanation.state in (
        LeaseState.REJECTED,
        ClaimState.VOIDED,
    )
    return wrong or bool(explanation.appeal) or audit_report.read(explanation.report) is None


def _legend(found: Explanations) -> Iterator[str]:
    """What the states mean that occur."""
    occur = {one.state for one in found.explanations}
    if occur & MEANING.keys():
        yield LEGEND
    yield from (f"  {state:10} {meaning}" for state, meaning in MEANING.items() if state in occur)


def _json(refusal: Refusal | None) -> dict[str, Any] | None:
    return refusal.evidence.model_dump() | {"command": _again(refusal)} if refusal else None


def _again(refusal: Refusal) -> str:
    return evidence.command(refusal.evidence.code, refusal.lease_id)


def refusal_lines(refusal: Refusal) -> Iterator[str]:
    """The evidence of a rejection, as a person reads it."""
    found = refusal.evidence
    yield from map(
        one_line,
        (
            f"  rejected by {found.step} [{found.code}]: {found.field}",
            f"    expected {found.expected}; observed {found.observed}",
            *(f"    sample {at.sample}, position {at.position}" for at in found.positions),
            f"  claim {found.claim_id}",
            f"  validator {found.validator}, tolerance {found.tolerance}",
            f"  repeat the check: `{_again(refusal)}`",
        ),
    )


def _logged(place: Logged) -> Iterator[str]:
    """Whether the log says the same."""
    if place.state == "logged":
        yield f"  Verified: ledger entry {place.entry} matches (signed root of {place.size} entries)"
    elif place.state == "not_yet":
        yield f"  Not in the ledger yet ({place.size} entries). Run this again in 1 min"


def _told(explanation: Explanation) -> Iterator[str]:
    yield _verdict(explanation)
    if explanation.claim_id:
        yield f"  claim {explanation.claim_id}"
    if explanation.said:
        yield f"  {explanation.said}"
    its_report = audit_report.read(explanation.report)
    yield from _reported(its_report) if its_report else ("  the audit report cannot be read",)
    if explanation.claim_id:
        yield f"  repeat the check: `{repeated(explanation)}`"
    yield from _appeal(explanation)


def _verdict(explanation: Explanation) -> str:
    code = f" [{explanation.code}]" if explanation.code else ""
    audit = f", audit: {explanation.finding}" if explanation.finding else ""
    return one_line(f"lease {explanation.lease_id}: {explanation.state}{code}{audit}")


def _reported(report: ReportedAudit) -> Iterator[str]:
    """The evidence of an audit."""
    for finding in report.findings:
        yield f"  {finding.rule}, {finding.outcome}:"
        yield f"    expected {finding.expected}; observed {finding.observed}"
        yield from map(_position, finding.positions)
    if report.validator:
        yield f"  validator {report.validator}, tolerances {report.tolerance} version {report.calibration}"
    if report.error:
        yield f"  no verdict: {report.error}"


def _position(at: ReportedPosition) -> str:
    """One token: what was claimed of it, and what the replay says."""
    place = f"    sample {at.sample}, position {at.position}: token {at.claimed}"
    claimed, here = f"claimed with {at.claimed_logprob:.4f}", f"{at.logprob:.4f}"
    if at.claimed == at.dictated:
        return f"{place} {claimed}, the expected token; the replay gives {here}"
    return f"{place} {claimed}; expected {at.dictated} by {at.margin:.3g} nats; the claimed token has {here}"


def repeated(explanation: Explanation) -> str:
    """What repeats the check on the node's own machine, whatever was found."""
    return f"swarm-node why JOIN_STRING {explanation.lease_id} --replay"


def _appeal(explanation: Explanation) -> Iterator[str]:
    """What can be done about what was taken."""
    match explanation.appeal:
        case "possible":
            yield f"  if that check passes, appeal: `swarm-node appeal JOIN_STRING {explanation.lease_id} --reason …`"
        case "open":
            yield "  appeal: waiting for the operator's ruling"
        case "granted" | "denied":
            yield f"  appeal {explanation.appeal}: {explanation.ruling}"


def write_case(join: JoinString, home: Path, found: Explanations, folder: Path) -> list[int]:
    """The folder of a case, for `swarm-coordinator audit replay`: of what was accepted, or of what was refused.

    Returned are the versions that the claim would have to be compared with, too, and that are not here.
    """
    (explanation,) = found.explanations
    refusals = refused(join, home, explanation.lease_id)
    rollout = refusals[0].rollout if refusals and not explanation.claim_id else explanation.rollout
    if not (rollout or explanation.fragments):
        raise ConfigInvalid("There is no stored claim for this lease, so nothing can be replayed.")
    version = Lease.from_bytes(explanation.lease).version
    held = _held(join, home, version)
    documents = saved(round_folder(home, join) / TRUST_FILE)
    if held is None or documents is None or documents.manifest is None:
        raise ConfigInvalid(
            f"{home} does not have version {version}.", hint="Replay earlier: only the last two versions are kept."
        )
    # Every version of a round has one sampler.
    newest = open_manifest(documents.manifest, round_id=join.round_id, version=documents.policy_version)
    file = CaseFile(
        round_id=join.round_id,
        lease=explanation.lease,
        rollout=rollout,
        fragments=explanation.fragments,
        sampler=newest.sampler,
    )
    folder.mkdir(parents=True)
    (folder / "case").write_bytes(file.to_bytes())
    (folder / "tolerances.json").write_bytes(found.tolerances)
    shutil.copytree(held, folder / "policies" / str(version))
    missing = []
    for other in _neighbours(explanation, version):
        if (policy := _held(join, home, other)) is None:
            missing.append(other)
        else:
            shutil.copytree(policy, folder / "policies" / str(other))
    return missing


def _held(join: JoinString, home: Path, version: int) -> Path | None:
    """The files of a version in this home."""
    return next((round_folder(home, join) / POLICIES).glob(f"{version:012d}-*"), None)


def _neighbours(explanation: Explanation, version: int) -> list[int]:
    """The versions that the audit compared the claim with; without an audit the one before."""
    fits = its_report.fits if (its_report := audit_report.read(explanation.report)) else None
    named = [version - 1] if fits is None else [fit.version for fit in fits]
    return sorted({other for other in named if other > 0} - {version})


def require_own(join: JoinString, home: Path, me: NodeId, told: Explanation, say: Callable[[str], None]) -> None:
    """Raise where the coordinator tells of another lease than it gave to this node, or of another's claim."""
    kept = Leased(round_folder(home, join)).digest_of(told.lease_id)
    if kept is None:
        say("this home has no record of the lease; its prompt comes from the coordinator and is not signed by a claim")
    elif kept != chunks.digest((now := Lease.from_bytes(told.lease)).to_bytes()):  # as it was noted
        raise ProofInvalid(
            f"The coordinator tells of another lease {told.lease_id} than it gave to this node. By now it has version "
            f"{now.version}, seed {now.seed}, {len(now.prompt) // 4} tokens of prompt and the digest "
            f"{chunks.digest(told.lease)}; what this node was given, and noted then, has {kept}.",
            hint=BLAMELESS,
        )
    signed = [open_envelope("fragment", envelope) for envelope in told.fragments]
    leases = [Fragment.from_bytes(one.payload).lease_id for one in signed]
    if told.rollout:
        signed.append(open_envelope("rollout", told.rollout))
        leases.append(RolloutClaim.from_bytes(signed[-1].payload).lease_id)
    if {one.signer for one in signed} - {me} or set(leases) - {told.lease_id}:
        raise ProofInvalid(
            f"The coordinator shows a claim for lease {told.lease_id} that this node did not sign.", hint=BLAMELESS
        )
    if signed and chunks.digest(signed[-1].payload) != told.claim_id:
        raise ProofInvalid(
            f"The coordinator reports claim {told.claim_id[:64]} but shows another one: "
            f"{chunks.digest(signed[-1].payload)}.",
            hint=BLAMELESS,
        )


def replay(join: JoinString, home: Path, me: NodeId, found: Explanations, say: Callable[[str], None]) -> int:
    """Run the auditor's check here; its exit code, or that of no verdict where it could not be the whole check."""
    require_own(join, home, me, found.explanations[0], say)
    with tempfile.TemporaryDirectory(prefix="echo-swarm-case-") as place:
        folder = Path(place) / "case"
        missing = write_case(join, home, found, folder)
        if missing:
            versions = ", ".join(f"version {version}" for version in missing)
            say(f"not compared with {versions}: this home has only the last two versions")
        program = Path(sys.executable).with_name("swarm-coordinator")
        command = [str(program), "audit", "replay", str(folder), "--tolerance", found.tolerance]
        command += ["--again", repeated(found.explanations[0])]  # the folder is gone by then
        size_bytes = sum(file.stat().st_size for file in folder.glob("policies/*/*"))
        allowed = memory.allowed_bytes(size_bytes, use.memory_bytes()[1])
        code = memory.run_within(command, allowed_bytes=allowed, seconds_max=REPLAY_MAX_S)
    its_report = audit_report.read(found.explanations[0].report)
    nearer = its_report is None or any(finding.rule == "version" for finding in its_report.findings)
    if missing and code in SOFTER and nearer:
        found_by_audit = "found" if its_report else "may have found"
        say(f"no verdict: the audit {found_by_audit} the claim closer to another version, which is missing here")
        return NO_VERDICT
    return code
