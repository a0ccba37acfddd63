"""The auditor: a process that requests drawn claims, replays them version by version, and reports the verdicts.

- One or more auditors run beside the coordinator, each with access to the round's folder. A restart or a second auditor
  never judges a claim twice, since the coordinator gives a case to one auditor at a time.
- A version is rebuilt from its chunks once, and loaded when a case names it: the last S + 2 stay on the disk, with
  those that the current batch may be compared with; the last `AUDITOR_VERSIONS_MAX` stay in memory.
- An auditor that works on cases reports that regularly and keeps them, however slow it is: every module that computed
  something counts as progress. Without progress for `audit.timeout_s` it ends itself, and another gets its cases.
- It requests as many cases as it can finish in that time, so that other auditors get their share.
- Groups of the operator's own nodes calibrate their class as they are replayed. The error of bf16 on this policy is
  measured by the auditor, before it judges the first claim in bf16 (`coordinator.audit.rounding`).
- If a version was deleted, or a case cannot be replayed, this is not the node's fault: the claim is pardoned.
- It has a low processor priority: late settlement is better than late sampling or learning.
- When standard input ends, the coordinator has ended, and the auditor ends if the coordinator started it.
"""

import gc
import json
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx

from coordinator.audit.case import Case, RoundArchive, earlier, opened
from coordinator.audit.check import ExactReplay, look_closer, replay_by_class, report_on
from coordinator.audit.rounding import Probes, Rounding, drawings, honest_groups
from coordinator.base.answers import named, refusal
from coordinator.config import Config
from coordinator.model.watchdog import Watchdog
from coordinator.publishing.signed_metadata import RoleKeys
from coordinator.rules import calibration
from coordinator.rules.calibration import POSITIONS_MIN, Calibration
from coordinator.rules.replay import Prefill, Scored
from coordinator.rules.verdict import VALIDATOR, AuditOutcome, AuditReport
from protocol import limits
from protocol.errors import AuditFailed, SwarmError, Unreachable
from protocol.start import quick_imports
from protocol.work.auditing import AuditCase, CaseFile, Cases, Found, HoldCases, Judged, TakeCases, Verdicts
from protocol.work.lease import Lease, float_class, is_exact
from protocol.work.rollout import unpack_tokens

if TYPE_CHECKING:
    from coordinator.audit.exact_scorer import ExactScorer
    from coordinator.audit.reference_node import ReferenceNode
    from coordinator.audit.scorer import VersionScorer

log = logging.getLogger(__name__)

THIS_POLICY = "the round's own"
"""The name of the probes' policy in the tolerances."""

CASES_AT_FIRST = 8
"""The number of cases requested until the time of a case is known."""

ANSWER_MAX_BYTES = 32 * limits.MIB
"""Cases come from the operator's own coordinator, which sends half of this."""

HOLDS = 3
"""The number of progress reports in a timeout, of which two may get lost."""

PREPARE_MAX_S = 3600.0
"""The time limit for rebuilding a version from its chunks, or loading it: neither reports progress."""

NICENESS = 5
"""A third of the usual processor share: with less, all owners would stay newcomers, who are audited the most."""

Load = Callable[[Path, Callable[[], None]], "VersionScorer"]
"""(policy folder, callback for progress) → the model."""

LoadExact = Callable[[Path, Callable[[], None]], "ExactScorer"]

Scorer = TypeVar("Scorer")

FINDINGS: dict[AuditOutcome, Found] = {
    AuditOutcome.PASS: "pass",
    AuditOutcome.SOFT: "soft",
    AuditOutcome.HARD: "hard",
    AuditOutcome.HELD: "held",
}


def run(config: Config, name: str, url: str, token: Path) -> None:
    """Audit one round to its end, as a client of the coordinator at `url`."""
    os.nice(NICENESS)
    folder = config.round.directory / "auditors" / name  # on the disk of the chunks: weights may not fit on another one
    folder.mkdir(parents=True, exist_ok=True)
    with (
        closing(RoundArchive(config)) as archive,
        closing(Auditor(config, archive, folder, name, url, token.read_text().strip())) as auditor,
    ):
        auditor.run()
    shutil.rmtree(folder)


class Policies:
    """The policy versions on an auditor's disk and in its memory."""

    def __init__(
        self, archive: RoundArchive, folder: Path, keep: int, load: Load, watchdog: Watchdog, load_exact: LoadExact
    ) -> None:
        self._archive = archive
        self._folder = folder
        self._keep = keep
        self._load = load
        self._watchdog = watchdog
        self._load_exact = load_exact
        self._loaded: OrderedDict[int, VersionScorer] = OrderedDict()
        self._exact: OrderedDict[int, ExactScorer] = OrderedDict()

    def folder(self, version: int) -> Path | None:
        """Return a version's folder, rebuilt from its chunks if needed; None if they were deleted."""
        place = self._folder / str(version)
        if place.exists():
            return place
        self._watchdog.moved(PREPARE_MAX_S)
        written = self._archive.write_policy(version, place)
        self._watchdog.moved()
        return None if written is None else place

    def score(self, version: int, claims: Sequence[Prefill]) -> list[list[Scored]]:
        return self._loaded_version(version, self._loaded, self._load).score(claims)

    def score_exactly(self, version: int, claims: Sequence[Prefill]) -> list[list[Scored]]:
        return self._loaded_version(version, self._exact, self._load_exact).score(claims)

    def _loaded_version(
        self, version: int, loaded: "OrderedDict[int, Scorer]", load: "Callable[[Path, Callable[[], None]], Scorer]"
    ) -> "Scorer":
        """Return a version that is loaded; free those that were used least recently before another one is loaded."""
        if version not in loaded:
            while len(loaded) >= limits.AUDITOR_VERSIONS_MAX:
                loaded.popitem(last=False)
            gc.collect()  # a model forms a reference cycle with its layers' forward functions
            self._watchdog.moved(PREPARE_MAX_S)
            loaded[version] = load(self._folder / str(version), self._watchdog.moved)
            self._watchdog.moved()
        loaded.move_to_end(version)
        return loaded[version]

    def forget(self, version: int, spared: Sequence[int]) -> None:
        """Delete all versions except the last few and those in `spared`, before a batch of `version`."""
        for place in self._folder.iterdir():
            if place.name.isdigit() and int(place.name) <= version - self._keep and int(place.name) not in spared:
                shutil.rmtree(place)
                self._loaded.pop(int(place.name), None)
                self._exact.pop(int(place.name), None)


class Auditor:
    """An auditor of a round."""

    def __init__(
        self,
        config: Config,
        archive: RoundArchive,
        folder: Path,
        name: str,
        url: str,
        token: str,
        load: Load | None = None,
    ) -> None:
        self._config = config
        self._archive = archive
        self._watchdog = Watchdog(config.audit.timeout_s)
        self._policies = Policies(
            archive,
            folder,
            config.staleness.max_updates + 2,
            load or loader(config),
            self._watchdog,
            partial(load_exactly, config),
        )
        self._name = name
        self._cases_max = CASES_AT_FIRST
        self._seconds = 0.0
        """The duration of the last batch."""
        self._exact_class: str | None = None
        """The exact class of this machine; None until a claim of some exact class needs it."""
        self._foreign_classes = set[str]()
        """Exact classes about which the log says that they are not this auditor's."""
        self._probes = Probes(archive.metadata.round_id)
        self._rounding = Rounding(archive.metadata.round_id)
        self._http = httpx.Client(base_url=url, timeout=60.0, headers={"Authorization": f"Bearer {token}"})

    def run(self) -> None:
        """Audit until the round has no more cases."""
        failures, judged = 0, list[Judged]()
        while True:
            try:
                if judged:  # not sent yet, if the coordinator was away meanwhile
                    self._send_verdicts(judged)
                    judged = []
                tolerances = self._tolerances()
                taken = self._claim_cases(tolerances)
                if taken.cases:
                    with self._holding():
                        tolerances = self._measure_rounding(taken, tolerances)
                        judged = self._judge(taken, tolerances)
                    self._calibrate(tolerances)
                elif taken.done:
                    return
                failures = 0
            except Unreachable as error:
                log.warning("%s", error)
                time.sleep(limits.retry_pause_s(failures))  # no event tells that the coordinator is back
                failures += 1

    def close(self) -> None:
        self._http.close()

    def _tolerances(self) -> Calibration:
        """Return the tolerances to judge by; if their signature is not valid, raise before any case is requested."""
        tolerances = calibration.load(self._config.round.directory, self._archive.metadata.root())
        for name in (self._config.audit.tolerance, *self._config.audit.classes):
            tolerances.judging(name, self._archive.metadata.round_id)  # raises an error for an unknown class
        return tolerances

    def _measure_rounding(self, taken: Cases, made: Calibration) -> Calibration:
        """Return the tolerances, with those of 16-bit precisions measured if the cases need them and they are due."""
        offers = [Lease.from_bytes(case.lease) for case in taken.cases]
        classes = {float_class(offer.judged_as) or self._config.audit.tolerance for offer in offers}
        for precision in self._rounding.due(taken.version, classes, made):
            try:
                self._sample_honestly(taken.version, precision, offers)
            except SwarmError as error:  # claims in this precision are held until it is measured
                log.warning("rounding not measured precision=%s: %s", precision, error)
            gc.collect()  # the node's model forms a reference cycle, too
            made = self._calibrate(made)
        return made

    def _sample_honestly(self, version: int, precision: str, offers: Sequence[Lease]) -> None:
        """Sample prompts of these leases in 16 bits, as an honest node does, and count the groups as a probe's."""
        sampler, policy = self._archive.sampler(version), self._policies.folder(version)
        if sampler is None or policy is None:
            raise AuditFailed(f"The weights of version {version} were deleted.")
        log.info("measuring rounding version=%d precision=%s positions=%d", version, precision, POSITIONS_MIN)
        node = self._reference_node(policy, precision)
        prompts = [(unpack_tokens(offer.prompt), offer.seed) for offer in offers]
        every = drawings(prompts, max_new_tokens=sampler.max_new_tokens, temperature=sampler.temperature)
        groups = honest_groups(every, node.sample, partial(self._policies.score, version))
        for number, group in enumerate(groups):
            self._probes.add(node.numerics, f"auditor {self._name}", f"{version}-{number}", group)

    def _reference_node(self, policy: Path, precision: str) -> "ReferenceNode":
        with quick_imports():  # of torch, which a round without cases never needs
            from coordinator.audit.reference_node import ReferenceNode

        self._watchdog.moved(PREPARE_MAX_S)
        node = ReferenceNode(policy, precision, device=self._config.audit.device, moved=self._watchdog.moved)
        self._watchdog.moved()
        return node

    def _calibrate(self, made: Calibration) -> Calibration:
        """Sign the tolerances of classes with enough positions from probes; claims held for them are judged next."""
        folder, root = self._config.round.directory, self._archive.metadata.root()
        try:
            for tolerance in self._probes.due(made):
                made = made.with_class(tolerance, made=datetime.now(UTC).date(), model=THIS_POLICY)
                calibration.save(folder, made, RoleKeys(folder / "keys").signers(root, calibration.ROLE))
                log.info("calibrated class=%s positions=%d", tolerance.name, tolerance.positions)
        except SwarmError as error:  # claims are held without it, and the operator can calibrate by hand
            log.warning("not calibrated: %s", error)
        return made

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Report regularly in this block that the auditor works on its cases."""
        done = threading.Event()
        keeper = threading.Thread(target=self._send_holds, args=(done,), name="keeper", daemon=True)
        keeper.start()
        try:
            with self._watchdog.watching():
                yield
        finally:
            done.set()
            keeper.join()

    def _send_holds(self, done: threading.Event) -> None:
        """Report until `done` is set. It runs on its own thread, as a replay works in torch for minutes."""
        message = HoldCases(auditor=self._name).to_bytes()
        while not done.wait(self._config.audit.timeout_s / HOLDS):
            try:
                self._call("/v1/auditor/hold", message)
            except SwarmError as error:  # its cases may be lost; the coordinator gives them out again
                log.warning("%s", error)

    def _judge(self, taken: Cases, tolerances: Calibration) -> list[Judged]:
        """Return a verdict on each case; if one case fails the common replay, each is replayed alone."""
        started = time.monotonic()
        self._policies.forget(taken.version, earlier(taken.version, self._config.audit.neighbours))
        try:
            judged = self._replay(taken.version, taken.cases, tolerances)
        except SwarmError:
            judged = [self._replay_alone(taken.version, case, tolerances) for case in taken.cases]
        self._seconds = seconds = max(time.monotonic() - started, 1e-3)
        fitting = int(len(judged) * self._config.audit.timeout_s / seconds)
        self._cases_max = min(max(fitting, 1), 2 * self._cases_max, limits.AUDITOR_CASES_AT_ONCE)
        log.info(
            "audited version=%d claims=%d seconds=%.2f findings=%s",
            taken.version, len(judged), seconds, ",".join(verdict.finding for verdict in judged),
        )  # fmt: skip
        return judged

    def _replay(self, version: int, taken: Sequence[AuditCase], tolerances: Calibration) -> list[Judged]:
        if self._policies.folder(version) is None:
            raise AuditFailed(f"The weights of version {version} were deleted.")

        offers = [Lease.from_bytes(case.lease) for case in taken]
        exact = self._exact(version, {offer.judged_as for offer in offers})

        def compare(places: Sequence[int], others: Sequence[int]) -> list[AuditReport]:
            kept = [other for other in others if self._policies.folder(other) is not None]
            cases = [self._case_of(version, taken[place], kept) for place in places]
            replays = replay_by_class(cases, self._policies.score, exact)
            judged = [
                report_on(case, replayed, tolerances, self._config.audit.tolerance, exact.numerics if exact else "")
                for case, replayed in zip(cases, replays, strict=True)
            ]
            for place, case, replayed, report in zip(places, cases, replays, judged, strict=True):
                counts = taken[place].is_probe and report.outcome is not AuditOutcome.HARD
                is_usual = case.lease.temperature is None and not is_exact(case.lease.judged_as)
                if counts and is_usual and not isinstance(replayed, SwarmError):
                    self._probes.add(case.lease.judged_as, case.node, case.claim_id, replayed[version])
            return judged

        own = {place for place, offer in enumerate(offers) if exact and offer.judged_as == exact.numerics}
        reports = look_closer(len(taken), earlier(version, self._config.audit.neighbours), compare, own)
        return [self._judged(case, report) for case, report in zip(taken, reports, strict=True)]

    def _exact(self, version: int, classes: Collection[str]) -> ExactReplay | None:
        """Return the replay to the bit on this machine, if one of the classes is this auditor's.

        A node can name any class: the model is loaded a second time only for a claim of the own one.
        """
        named = set(filter(is_exact, classes))
        if named and self._exact_class is None:
            self._exact_class = self._own_class(version)
        foreign = sorted(named - {self._exact_class} - self._foreign_classes)
        for name in foreign[: limits.CLASSES_MAX - len(self._foreign_classes)]:
            self._foreign_classes.add(name)
            log.info(
                "claims of class %s are judged as %s: the class of this auditor is %s",
                name, float_class(name), self._exact_class or "no exact one",
            )  # fmt: skip
        if self._exact_class not in named:
            return None
        return ExactReplay(self._exact_class or "", self._policies.score_exactly)

    def _own_class(self, version: int) -> str:
        """Return the exact class of this machine for the round's model; empty if it cannot be computed exactly."""
        with quick_imports():
            from coordinator.audit.exact_scorer import own_class

        folder = self._policies.folder(version)
        if folder is None or self._config.audit.device != "cpu":  # nodes compute exactly on the CPU only
            return ""
        self._watchdog.moved(PREPARE_MAX_S)
        try:
            return own_class(folder, threads=threads_of(self._config))
        except SwarmError as error:
            log.warning("no exact replay: %s", error)
            return ""
        finally:
            self._watchdog.moved()

    def _replay_alone(self, version: int, case: AuditCase, tolerances: Calibration) -> Judged:
        try:
            return self._replay(version, [case], tolerances)[0]
        except SwarmError as error:
            report = json.dumps({"outcome": "pardon", "error": str(error)}).encode()
            return Judged(claim_id=case.claim_id, finding="pardon", validator=VALIDATOR, report=report)

    def _case_of(self, version: int, case: AuditCase, neighbours: list[int]) -> Case:
        policy = self._policies.folder(version)
        sampler = self._archive.sampler(version)
        if policy is None or sampler is None:
            raise AuditFailed(f"The weights of version {version} were deleted.")
        file = CaseFile(
            round_id=self._archive.metadata.round_id,
            lease=case.lease,
            rollout=case.rollout,
            fragments=case.fragments,
            sampler=sampler,
        )
        return opened(file, policy, neighbours)

    def _judged(self, case: AuditCase, report: AuditReport) -> Judged:
        command = f"swarm-coordinator audit replay ROUND.toml {case.claim_id} --tolerance {report.tolerance}"
        evidence = json.dumps({**report.to_json(), "command": command}).encode()
        finding = FINDINGS[report.outcome]
        return Judged(
            claim_id=case.claim_id,
            finding=finding,
            validator=report.validator,
            report=evidence,
            waits_for=report.tolerance if finding == "held" else "",
        )

    def _claim_cases(self, tolerances: Calibration) -> Cases:
        message = TakeCases(auditor=self._name, at_most=self._cases_max, classes=self._classes(tolerances))
        return Cases.from_bytes(self._call("/v1/auditor/take", message.to_bytes()), max_bytes=ANSWER_MAX_BYTES)

    def _classes(self, tolerances: Calibration) -> tuple[str, ...]:
        """Return the classes measured on this policy, and the one that this machine repeats to the bit, once known."""
        own = (self._exact_class,) if self._exact_class else ()
        return (*tolerances.measured_on(self._archive.metadata.round_id)[: limits.CLASSES_MAX - len(own)], *own)

    def _send_verdicts(self, judged: list[Judged]) -> None:
        self._call(
            "/v1/auditor/verdicts",
            Verdicts(verdicts=tuple(judged), seconds=self._seconds, threads=threads_of(self._config)).to_bytes(),
        )

    def _call(self, path: str, body: bytes) -> bytes:
        with named():
            response = self._http.post(path, content=body)
        if not response.is_success:
            raise refusal(response.status_code, response.content)
        return response.content


def loader(config: Config) -> Load:
    """Return the loader of versions with the operator's settings."""

    def load(folder: Path, moved: Callable[[], None]) -> "VersionScorer":
        with quick_imports():  # of torch, which a round without cases never needs
            from coordinator.audit.scorer import VersionScorer

        return VersionScorer(
            folder,
            dtype=config.audit.dtype,
            device=config.audit.device,
            threads=threads_of(config),
            moved=moved,
        )

    return load


def load_exactly(config: Config, folder: Path, moved: Callable[[], None]) -> "ExactScorer":
    """Return a version that is replayed to the bit, with the operator's settings."""
    with quick_imports():
        from coordinator.audit.exact_scorer import ExactScorer

    return ExactScorer(folder, device=config.audit.device, threads=threads_of(config), moved=moved)


def threads_of(config: Config) -> int:
    """Return `audit.threads`, or by default half of the usable cores: the others are for the learner and nodes."""
    if config.audit.threads:
        return config.audit.threads
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(1, len(usable) // 2)
