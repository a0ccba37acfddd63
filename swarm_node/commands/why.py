"""`swarm-node why`: the outcome of this node's leases, by the coordinator's evidence and by a replay on this machine.

- The printed text comes from the coordinator; for a single lease it is compared with the public log (`ledger_check`),
  which the coordinator has signed.
- The replay depends little on the coordinator: the node has signed the rollout, this home recorded the lease when it
  arrived (`records`), and the weights are the verified ones in this home. If the coordinator reports another lease or
  another node's claim, nothing is replayed, and that is the coordinator's fault. The tolerances come from the
  coordinator, and so does the lease if there is no record of it.
- Evidence of a rejection comes from this home: the coordinator keeps only a code and a message, and nothing about bytes
  that name no lease of this node.
- The replay runs the auditor's own program, `swarm-coordinator audit replay`, on a local folder. It is a separate
  process with a memory limit: it uses the versions' configurations and tokenizers.
- It compares with the same versions as the audit, if this home has them; if one is missing that could confirm the
  finding, there is neither a verdict nor a pass.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import trio

from ledger.book import ClaimState
from protocol.errors import ConfigInvalid, LedgerForked, ProofInvalid, RolledBack, SwarmError, named
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.policy.manifest import open_manifest
from protocol.text.money import parse_unit
from protocol.text.plain import counted, one_line
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work import evidence
from protocol.work.auditing import CaseFile, Explanation, Explanations, Why
from protocol.work.lease import Lease, LeaseState
from swarm_node.base import clock
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import POLICIES, SEEN_LOG, TRUST_FILE, JoinString, round_folder
from swarm_node.engine import memory
from swarm_node.ledger import ledger_check
from swarm_node.ledger.ledger_check import Logged, ReportedAudit, ReportedPosition
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import TRIES, LogWatch, Overtaken
from swarm_node.ledger.receipts import RECEIPTS
from swarm_node.machine import use
from swarm_node.owner.status_lines import ago
from swarm_node.versions.updater import saved
from swarm_node.work.records import REJECTIONS, LeaseLog, Rejection, Rejections

NOT_ASKED = Logged("not_asked")
"""State of a lease that was not looked up in the log."""

NO_FIGURES: Mapping[str, str] = MappingProxyType({})

NOTHING = Explanations(tolerance="", tolerances=b"", explanations=())
"""Answer if the coordinator knows no such lease, or does not respond."""

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
"""Explanations of the states of a lease or its claim."""

LEGEND = "Meaning of the states:"
ONE = "Details of one lease: `swarm-node why LEASE` (the first 6 characters are enough)."

REPLAY_MAX_S = 3 * 3600.0
"""A CPU takes an hour for a large policy; a malicious tokenizer never ends."""

NO_VERDICT, SOFTER = 1, (0, 3, 5)
"""Exit codes of the replay; the softer ones are pass, soft fail and held."""


async def ask(join: JoinString, key: NodeKey, about: str) -> Explanations:
    """Request the coordinator's explanation of a lease or claim, or of the last ones."""
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        return answering(about, await coordinator.why(Why.from_value({"about": about})))
    finally:
        await coordinator.close()


def answering(about: str, answer: Explanations) -> Explanations:
    """Return the answer; raise an error if it is about another lease or claim than `about`."""
    if about and [about in (explanation.lease_id, explanation.claim_id) for explanation in answer.explanations] != [
        True
    ]:
        raise ProofInvalid(f"The coordinator answered about another lease than {about}.")
    return answer


async def look_up(join: JoinString, home: Path, key: NodeKey, explanation: Explanation) -> Logged:
    """Find the log entry that agrees with the explanation; raise an error if the log contradicts it."""
    folder = round_folder(home, join)
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        reader = LogReader(coordinator.origin)
        watch = LogWatch(reader, join.round_id, folder / SEEN_LOG)
        look = partial(
            ledger_check.find_entry, reader, watch, join.round_id, key.node_id, explanation, folder / RECEIPTS
        )
        for _ in range(TRIES - 1):
            with suppress(ProofInvalid, Overtaken):  # a checkpoint may be replaced while its tiles are fetched
                return await look()
        return await look()
    finally:
        await coordinator.close()


def answer_to(join: JoinString, key: NodeKey, about: str, warn: Callable[[str], None] | None) -> Explanations:
    """Return the coordinator's answer about a lease or the last ones; if it fails, `warn` and return `NOTHING`.

    Without `warn`, a failure is an error.
    """
    try:
        return trio.run(ask, join, key, about)
    except SwarmError as error:
        if warn is None:
            raise
        warn(named(error))
        return NOTHING


def compare(
    join: JoinString, home: Path, key: NodeKey, explanation: Explanation, warn: Callable[[str], None]
) -> tuple[Logged, SwarmError | None]:
    """Return what the public log says of a lease, and the error if it contradicts the coordinator's report."""
    try:
        return trio.run(look_up, join, home, key, explanation), None
    except (ProofInvalid, LedgerForked, RolledBack) as error:
        return Logged("contradicted"), error
    except SwarmError as error:
        warn(f"not compared: {named(error)}")
        return Logged("not_compared"), None


def lines(explanation: Explanation, holds: Callable[[int], bool] = lambda _: True) -> Iterator[str]:
    """Return the lines for a terminal; control characters from the coordinator are removed.

    `holds` says whether this home has a version: without the lease's version nothing can be replayed here.
    """
    return map(one_line, _lines(explanation, holds))


def round_of_lease(joins: Sequence[JoinString], home: Path, typed: str) -> tuple[JoinString, str]:
    """Return the round of a lease that a user typed, and its full id; the last round if none has recorded it."""
    for join in joins[:-1]:
        leased = LeaseLog(round_folder(home, join))
        with suppress(ConfigInvalid):
            lease = leased.typed(typed)
            if leased.digest_of(lease) is not None:
                return join, lease
    return joins[-1], LeaseLog(round_folder(home, joins[-1])).typed(typed)


def report_rounds(
    joins: Sequence[JoinString], home: Path, key: NodeKey, tell: Callable[[str], None], *, as_json: bool
) -> int:
    """Report the last leases of several rounds, each under its address; return 1 if a round does not answer."""
    import trio

    code, figures = 0, {} if as_json else recent_figures(home, clock.now_ms())
    for join in joins:
        kept, answer = refused(join, home, ""), NOTHING
        if not as_json:
            tell(f"{join.url}:")
        try:
            answer = trio.run(ask, join, key, "")
        except SwarmError as error:
            print(f"{join.url}: {named(error)}", file=sys.stderr)
            code = 1
        for line in report(answer, kept, NOT_ASKED, about="", as_json=as_json, figures=figures):
            tell(line)
    return code


def refused(join: JoinString, home: Path, about: str) -> list[Rejection]:
    """Return the kept rejections of a lease or claim, or the last ones, newest first."""
    kept = Rejections(round_folder(home, join) / REJECTIONS)
    return [rejection for rejection in kept if about in ("", rejection.lease_id, rejection.evidence.claim_id)]


def report(
    answer: Explanations,
    rejections: list[Rejection],
    place: Logged = NOT_ASKED,
    *,
    about: str = "",
    as_json: bool,
    holds: Callable[[int], bool] = lambda _: True,
    figures: Mapping[str, str] = NO_FIGURES,
) -> Iterator[str]:
    """Yield lines of text, or one JSON line per lease: the coordinator's explanation, and the evidence in this home.

    `place` is the log entry of the lease that was asked about. Without `about`, a lease without problems gets one line
    of text. `figures` are the time, tokens and credit of leases that the running agent knows.
    """
    left = {rejection.lease_id: rejection for rejection in rejections}
    for explanation in answer.explanations:
        rejection = left.pop(explanation.lease_id, None)
        if as_json:
            summary = explanation.model_dump(exclude={"lease", "rollout", "fragments", "report"})
            its_report = ledger_check.read_report(explanation.report)
            unreadable: dict[str, Any] = {"unreadable": True}
            seen = its_report.model_dump(exclude_unset=True) if its_report else unreadable
            if seen:
                seen["command"] = repeated(explanation)  # the auditor's own command needs the operator's files
            log_place = {"state": place.state, "entry": place.entry, "of": place.size}
            yield json.dumps(summary | {"report": seen, "logged": log_place, "refused": _json(rejection)})
            continue
        first, *more = lines(explanation, holds)
        known = figures.get(explanation.lease_id)
        yield f"{first}; {known}" if known else first
        yield from more if about or rejection or _has_more(explanation) else ()
        yield from _logged(place)
        yield from rejection_lines(rejection) if rejection else ()
    for lease_id, rejection in left.items():
        if as_json:
            yield json.dumps({"lease_id": lease_id, "refused": _json(rejection)})
            continue
        yield f"lease {one_line(lease_id)}: rejected"
        yield from rejection_lines(rejection)
    if not as_json:
        yield from _legend(answer)
        yield from (ONE,) if answer.explanations and not about else ()


def _has_more(explanation: Explanation) -> bool:
    """Return True if a lease has a problem or an appeal."""
    wrong = explanation.finding in ("soft", "hard", "held") or explanation.state in (
        LeaseState.REJECTED,
        ClaimState.VOIDED,
    )
    return wrong or bool(explanation.appeal) or ledger_check.read_report(explanation.report) is None


def _legend(answer: Explanations) -> Iterator[str]:
    """Yield the meaning of each state that occurs."""
    occur = {explanation.state for explanation in answer.explanations}
    if occur & MEANING.keys():
        yield LEGEND
    yield from (f"  {state:10} {meaning}" for state, meaning in MEANING.items() if state in occur)


def _json(rejection: Rejection | None) -> dict[str, Any] | None:
    return rejection.evidence.model_dump() | {"command": _again(rejection)} if rejection else None


def _again(rejection: Rejection) -> str:
    return evidence.command(rejection.evidence.code, rejection.lease_id)


def rejection_lines(rejection: Rejection) -> Iterator[str]:
    """Yield the evidence of a rejection as lines of text."""
    found = rejection.evidence
    yield from map(
        one_line,
        (
            f"  rejected by {found.step} [{found.code}]: {found.field}",
            f"    expected {found.expected}; observed {found.observed}",
            *(f"    sample {at.sample}, position {at.position}" for at in found.positions),
            f"  claim {found.claim_id}",
            f"  validator {found.validator}, tolerance {found.tolerance}",
            f"  repeat the check: `{_again(rejection)}`",
        ),
    )


def _logged(place: Logged) -> Iterator[str]:
    """Yield a line about the entry in the log."""
    if place.state == "logged":
        yield f"  Verified: ledger entry {place.entry} matches (signed root of {place.size} entries)"
    elif place.state == "not_yet":
        yield f"  Not in the ledger yet ({place.size} entries). Run this again in 1 min"


def _lines(explanation: Explanation, holds: Callable[[int], bool]) -> Iterator[str]:
    yield _verdict(explanation)
    if explanation.claim_id:
        yield f"  claim {explanation.claim_id}"
    if explanation.said:
        yield f"  {explanation.said}"
    its_report = ledger_check.read_report(explanation.report)
    yield from _reported(its_report) if its_report else ("  the audit report cannot be read",)
    version = None
    if explanation.lease:
        with suppress(SwarmError):  # the comparison with the log tells more about a coordinator that sends nonsense
            version = Lease.from_bytes(explanation.lease).version
    if explanation.claim_id and (version is None or holds(version)):
        yield f"  repeat the check: `{repeated(explanation)}`"
    elif explanation.claim_id:
        yield f"  the check cannot be repeated here: this home no longer has version {version}, only the last two"
    yield from _appeal(explanation)


def _verdict(explanation: Explanation) -> str:
    code = f" [{explanation.code}]" if explanation.code else ""
    audit = f", audit: {explanation.finding}" if explanation.finding else ""
    return one_line(f"lease {explanation.lease_id}: {explanation.state}{code}{audit}")


def _reported(report: ReportedAudit) -> Iterator[str]:
    """Yield the evidence of an audit as lines of text."""
    for finding in report.findings:
        yield f"  {finding.rule}, {finding.outcome}:"
        yield f"    expected {finding.expected}; observed {finding.observed}"
        yield from map(_position, finding.positions)
    if report.validator:
        yield f"  validator {report.validator}, tolerances {report.tolerance} version {report.calibration}"
    if report.note:
        yield f"  {one_line(report.note)}"
    if report.error:
        yield f"  no verdict: {report.error}"


def _position(at: ReportedPosition) -> str:
    """Return a line about one token: the claimed values and those of the audit."""
    place = f"    sample {at.sample}, position {at.position}: token {at.claimed}"
    claimed, replayed = f"claimed with {at.claimed_logprob:.4f}", f"{at.logprob:.4f}"
    if at.claimed == at.dictated:
        return f"{place} {claimed}, the expected token; the replay gives {replayed}"
    return f"{place} {claimed}; expected {at.dictated} by {at.margin:.3g} nats; the claimed token has {replayed}"


def repeated(explanation: Explanation) -> str:
    """Return the command that repeats the check on the node's own machine."""
    return f"swarm-node why {explanation.lease_id} --replay"


def _appeal(explanation: Explanation) -> Iterator[str]:
    """Yield the state of the appeal, or the command to appeal."""
    match explanation.appeal:
        case "possible":
            yield f"  if that check passes, appeal: `swarm-node appeal {explanation.lease_id} --reason …`"
        case "open":
            yield "  appeal: waiting for the operator's ruling"
        case "granted" | "denied":
            yield f"  appeal {explanation.appeal}: {explanation.ruling}"


def write_case(join: JoinString, home: Path, answer: Explanations, folder: Path) -> list[int]:
    """Write the folder of a case for `swarm-coordinator audit replay`, for an accepted or a rejected claim.

    Return the versions to compare with that are missing in this home.
    """
    (explanation,) = answer.explanations
    rejections = refused(join, home, explanation.lease_id)
    rollout = rejections[0].rollout if rejections and not explanation.claim_id else explanation.rollout
    if not (rollout or explanation.fragments):
        raise ConfigInvalid("There is no stored claim for this lease, so nothing can be replayed.")
    version = Lease.from_bytes(explanation.lease).version
    held = _held(join, home, version)
    documents = saved(round_folder(home, join) / TRUST_FILE)
    if held is None or documents is None or documents.manifest is None:
        raise ConfigInvalid(
            f"{home} no longer has version {version}, so the check of this lease cannot be repeated here.",
            hint="A home keeps the last two versions. Repeat a check while the lease's version is one of them.",
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
    (folder / "tolerances.json").write_bytes(answer.tolerances)
    shutil.copytree(held, folder / "policies" / str(version))
    missing = []
    for other in _neighbours(explanation, version):
        if (policy := _held(join, home, other)) is None:
            missing.append(other)
        else:
            shutil.copytree(policy, folder / "policies" / str(other))
    return missing


def holds_version(join: JoinString, home: Path, version: int) -> bool:
    """Return True if this home has a version, which a replay needs."""
    return _held(join, home, version) is not None


def recent_figures(home: Path, now_ms: int) -> dict[str, str]:
    """Return time, tokens and credit of the last answered leases; empty without a running agent, which knows them."""
    import trio

    from swarm_node.owner.control_socket import NoAgent
    from swarm_node.owner.control_socket import ask as ask_agent

    try:
        return figures_of(trio.run(ask_agent, home, "status"), now_ms)
    except (NoAgent, SwarmError):
        return {}


def figures_of(state: Mapping[str, Any], now_ms: int) -> dict[str, str]:
    """Return time, tokens and credit of the answers in an agent's snapshot, by lease."""
    unit = parse_unit(state.get("unit"))
    return {
        answer["lease_id"]: f"answered {ago((now_ms - answer['at_ms']) / 1000)} ago, "
        f"{counted(answer['tokens'], 'token')}, {unit.exact(answer['credit_micros'])}"
        for answer in state.get("answers", ())
    }


def _held(join: JoinString, home: Path, version: int) -> Path | None:
    """Return the folder of a version in this home."""
    return next((round_folder(home, join) / POLICIES).glob(f"{version:012d}-*"), None)


def _neighbours(explanation: Explanation, version: int) -> list[int]:
    """Return the versions that the audit compared the claim with; without an audit the previous one."""
    fits = its_report.fits if (its_report := ledger_check.read_report(explanation.report)) else None
    named = [version - 1] if fits is None else [fit.version for fit in fits]
    return sorted({other for other in named if other > 0} - {version})


def require_own(join: JoinString, home: Path, me: NodeId, explanation: Explanation, say: Callable[[str], None]) -> None:
    """Raise an error if the coordinator reports another lease than it gave to this node, or another node's claim."""
    from protocol.work.fragment import Fragment
    from protocol.work.rollout import RolloutClaim

    kept = LeaseLog(round_folder(home, join)).digest_of(explanation.lease_id)
    if kept is None:
        say("this home has no record of the lease; its prompt comes from the coordinator and is not signed by a claim")
    elif kept != chunks.digest((now := Lease.from_bytes(explanation.lease)).to_bytes()):  # as it was recorded
        raise ProofInvalid(
            f"The coordinator reports another lease {explanation.lease_id} than it gave to this node. It now has "
            f"version {now.version}, seed {now.seed}, a prompt of {len(now.prompt) // 4} tokens and the digest "
            f"{chunks.digest(explanation.lease)}; the lease that this node received and recorded has {kept}.",
            hint=BLAMELESS,
        )
    signed = [open_envelope("fragment", envelope) for envelope in explanation.fragments]
    leases = [Fragment.from_bytes(envelope.payload).lease_id for envelope in signed]
    if explanation.rollout:
        signed.append(open_envelope("rollout", explanation.rollout))
        leases.append(RolloutClaim.from_bytes(signed[-1].payload).lease_id)
    if {envelope.signer for envelope in signed} - {me} or set(leases) - {explanation.lease_id}:
        raise ProofInvalid(
            f"The coordinator shows a claim for lease {explanation.lease_id} that this node did not sign.",
            hint=BLAMELESS,
        )
    if signed and chunks.digest(signed[-1].payload) != explanation.claim_id:
        raise ProofInvalid(
            f"The coordinator reports claim {explanation.claim_id[:64]} but shows another one: "
            f"{chunks.digest(signed[-1].payload)}.",
            hint=BLAMELESS,
        )


def replay(join: JoinString, home: Path, me: NodeId, answer: Explanations, say: Callable[[str], None]) -> int:
    """Run the auditor's check; return its exit code, or `NO_VERDICT` if the check could not be complete."""
    require_own(join, home, me, answer.explanations[0], say)
    with tempfile.TemporaryDirectory(prefix="echo-swarm-case-") as place:
        folder = Path(place) / "case"
        missing = write_case(join, home, answer, folder)
        if missing:
            versions = ", ".join(f"version {version}" for version in missing)
            say(f"not compared with {versions}: this home has only the last two versions")
        program = Path(sys.executable).with_name("swarm-coordinator")
        command = [str(program), "audit", "replay", str(folder), "--tolerance", answer.tolerance]
        command += ["--again", repeated(answer.explanations[0])]  # the folder is deleted by then
        size_bytes = sum(file.stat().st_size for file in folder.glob("policies/*/*"))
        allowed = memory.allowed_bytes(size_bytes, use.memory_bytes()[1])
        code = memory.run_within(command, allowed_bytes=allowed, seconds_max=REPLAY_MAX_S)
    its_report = ledger_check.read_report(answer.explanations[0].report)
    nearer = its_report is None or any(finding.rule == "version" for finding in its_report.findings)
    if missing and code in SOFTER and nearer:
        how = "found" if its_report else "may have found"
        say(f"no verdict: the audit {how} the claim closer to another version, which is missing in this home")
        return NO_VERDICT
    return code
