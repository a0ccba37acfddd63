"""An auditor's versions: made of real patches, compared with those before, deleted when nobody needs them any more."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.torch import load_file, save_file

from coordinator.audit.auditor import Auditor, Policies, load_exactly, loader, threads_of
from coordinator.audit.case import RoundArchive
from coordinator.audit.exact_scorer import own_class
from coordinator.config import Config, load, parse
from coordinator.model.watchdog import Watchdog
from coordinator.rules import calibration
from coordinator.rules.calibration import Calibration, Limit, Tolerance
from coordinator.service.round import Round
from coordinator.transactions import policy_versions
from protocol.errors import ConfigInvalid, DiskFull, NotAuthorised, SwarmError
from protocol.policy.canary import FILE_NAME
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey
from protocol.work.auditing import AuditCase, Cases
from protocol.work.learning import Publication, UploadedFile
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.coordinator.answering import CUT, PROXY, Answer, answering, error
from tests.coordinator.audit.claims import honest, on_round

NODE, SEED, PROMPT = NodeKey(b"\1" * 32), 7, pack_tokens([19, 20, 13, 31])
SAMPLES, NEW_TOKENS, VERSIONS = 3, 12, 10
SILENCE_S = 4.0
LIMIT = Limit(tolerance=1e-3, rate=1e-5, far=1.0)
CLASS = "torch/bf16/cpu"
TIGHT = Calibration(
    version=1,
    made="2026-11-23",
    model="tiny",
    classes=(Tolerance(name=CLASS, margin=LIMIT, error=LIMIT, mean_error=1.0, positions=10**6),),
)
"""One position out of tolerance is more than chance gives in a thousand groups so small, and less than in a million."""


class Played:
    """A round of many versions, each a patch on the one before."""

    def __init__(self, folder: Path, policy: Path, staleness: int, neighbours: int) -> None:
        self.file = file = folder / "round.toml"
        file.write_text("")
        self.settings = settings = {
            "round.directory": folder / "round",
            "sampling.samples_per_group": SAMPLES,
            "sampling.max_new_tokens": NEW_TOKENS,
            "staleness.max_updates": staleness,
            "audit.neighbours": neighbours,
            "audit.timeout_s": SILENCE_S,
            "audit.tolerance": CLASS,
        }
        self.config: Config = load(file, [f"{name}={value}" for name, value in settings.items()])
        round_ = Round(self.config)
        self.round_id = round_.round_id
        weights = load_file(policy / "model.safetensors")
        name = next(iter(weights))
        for version in range(1, VERSIONS + 1):
            uploads = round_.publisher.uploads / str(version)
            uploads.mkdir(parents=True)
            for path in policy.iterdir():
                if path.name == FILE_NAME:
                    continue  # what the first weights gave
                (uploads / path.name).write_bytes(path.read_bytes())
            weights[name].view(-1)[version] += 1.0
            save_file(weights, uploads / "model.safetensors", {"format": "pt"})
            files = tuple(
                UploadedFile(path=path.name, digest=blake3(path.read_bytes()).hexdigest()) for path in uploads.iterdir()
            )
            manifest, named = round_.publisher.publish(Publication(version=version, update=version - 1, files=files))
            assert version == 1 or any(entry.patches for entry in manifest.files)
            round_.database.run_now(policy_versions.record, manifest, named, now_ms=1)
        round_.close()
        self.archive = RoundArchive(self.config)
        self.folder = folder / "auditor"
        self.folder.mkdir()

    def auditor(self, url: str = "http://127.0.0.1:1") -> Auditor:
        return Auditor(self.config, self.archive, self.folder, "a", url, "token")

    def case(
        self, version: int, policy: Path, *, off_by: float = 0.0, named: str = "", exact: bool = False
    ) -> AuditCase:
        """An honest claim to a version, but for one log-probability."""
        lease = Lease(
            lease_id="0" * 32, version=version, seed=SEED, samples=SAMPLES, prompt=PROMPT, price_micros_per_mtok=1,
            expires_ms=1, judged_as=named,
        )  # fmt: skip
        engine, done = TorchEngine(device="cpu", dtype="exact" if exact else "auto"), list[GroupDone]()
        engine.load(policy, version)
        wanted = SampleRequest(
            request_id="a", version=version, prompt=PROMPT, seed=SEED, samples=SAMPLES, max_new_tokens=NEW_TOKENS,
            temperature=self.config.sampling.temperature,
        )  # fmt: skip
        engine.generate([wanted], done.append)
        first, *rest = done[0].samples
        claim = RolloutClaim(
            round_id=self.round_id,
            lease_id=lease.lease_id,
            lease_digest=lease.digest,
            samples=(_moved(first, off_by), *rest),
        )
        payload = claim.to_bytes()
        return AuditCase(claim_id=digest(payload), lease=lease.to_bytes(), rollout=NODE.seal("rollout", payload))

    def close(self) -> None:
        self.archive.close()


def _moved(sample: Sample, off_by: float) -> Sample:
    logprobs = np.frombuffer(sample.logprobs, "<f4").copy()
    logprobs[0] -= off_by
    return sample.model_copy(update={"logprobs": logprobs.tobytes()})


@pytest.fixture
def played(request: pytest.FixtureRequest, policy: Path, tmp_path: Path) -> Iterator[Played]:
    with closing(Played(tmp_path, policy, *request.param)) as made:
        yield made


def kept(played: Played) -> set[int]:
    return {int(path.name) for path in played.folder.iterdir()}


@pytest.mark.parametrize("played", [(0, 3), (2, 3), (4, 4)], ids=["S=0", "S=2", "S=4, v-8"], indirect=True)
def test_what_fails_softly_is_compared_with_every_earlier_version_and_not_pardoned(played: Played) -> None:
    """The auditor itself no longer keeps these old versions."""
    before = [VERSIONS - back for back in (1, 2, 4, 8)[: played.config.audit.neighbours]]
    with closing(played.auditor()) as auditor, closing(played.archive):
        played.archive.write_policy(VERSIONS, played.folder / str(VERSIONS))
        case = played.case(VERSIONS, played.folder / str(VERSIONS), off_by=0.01)
        (found,) = auditor._judge(Cases(version=VERSIONS, cases=(case,), done=False), on_round(TIGHT, played.round_id))
    report: dict[str, Any] = json.loads(found.report)
    assert found.finding == "soft", report
    assert [fit["version"] for fit in report["fits"]] == sorted(before)
    assert kept(played) == {VERSIONS, *before}


@pytest.mark.parametrize("played", [(0, 1)], ids=["S=0"], indirect=True)
@pytest.mark.parametrize("off_by", [0.01, 5.0], ids=["soft", "hard"])
def test_what_fails_by_numbers_of_another_policy_is_held_with_its_class(played: Played, off_by: float) -> None:
    with closing(played.auditor()) as auditor, closing(played.archive):
        played.archive.write_policy(VERSIONS, played.folder / str(VERSIONS))
        case = played.case(VERSIONS, played.folder / str(VERSIONS), off_by=off_by)
        taken = Cases(version=VERSIONS, cases=(case,), done=False)
        judged = [auditor._judge(taken, made) for made in (TIGHT, on_round(TIGHT, "b" * 64))]
    assert [(one.finding, one.waits_for) for (one,) in judged] == [("held", CLASS)] * 2


@pytest.mark.parametrize("played", [(0, 1)], ids=["S=0"], indirect=True)
def test_only_probes_move_tolerances_and_what_they_brought_is_signed(played: Played) -> None:
    """A stranger may bring as much as it likes."""
    named, mine = "torch/bf16/cuda", played.round_id
    with closing(played.auditor()) as auditor, closing(played.archive):
        root = played.archive.metadata.root()
        shipped = calibration.load(played.config.round.directory, root)
        played.archive.write_policy(VERSIONS, played.folder / str(VERSIONS))
        case = played.case(VERSIONS, played.folder / str(VERSIONS), named=named)
        for is_probe in (False, True):
            given = case.model_copy(update={"is_probe": is_probe})
            (found,) = auditor._judge(Cases(version=VERSIONS, cases=(given,), done=False), shipped)
            assert found.finding == "pass"
            assert list(auditor._probes.positions()) == ([named] if is_probe else [])
        auditor._calibrate(shipped)
        assert calibration.load(played.config.round.directory, root) == shipped, "too few positions"
        for seed in range(20):
            auditor._probes.add(named, "probe", str(seed), honest(600, noise=1e-2, seed=seed))
        auditor._calibrate(shipped)
        made = calibration.load(played.config.round.directory, root)
    assert set(made.measured_on(mine)) - set(shipped.measured_on(mine)) == {named}


@pytest.mark.parametrize("played", [(0, 1)], ids=["S=0"], indirect=True)
def test_an_exact_claim_is_judged_to_the_bit_by_an_auditor_of_its_class_and_by_tolerances_elsewhere(
    played: Played,
) -> None:
    with closing(played.auditor()) as auditor, closing(played.archive):
        played.archive.write_policy(VERSIONS, played.folder / str(VERSIONS))
        own = own_class(played.folder / str(VERSIONS))
        folder, found = played.folder / str(VERSIONS), {}
        for off_by in (0.0, 2e-6):
            for named in ("exact/fp32/cpu-000000000000", own):
                case = played.case(VERSIONS, folder, off_by=off_by, named=named, exact=True)
                plain = played.case(VERSIONS, folder)
                taken = Cases(version=VERSIONS, cases=(case, plain), done=False)
                judged, beside = auditor._judge(taken, on_round(TIGHT, played.round_id))
                assert beside.finding == "pass"
                report = json.loads(judged.report)
                found[off_by, named == own] = judged.finding
                assert report["tolerance"] == "torch/fp32/cpu"
                assert ("not to the bit" in report["note"]) is (named != own)
                assert auditor._classes(on_round(TIGHT, played.round_id))[-1:] == (own,), "it says what it repeats"
                assert bool(auditor._policies._exact) is (named == own or off_by > 0), "loaded only for the own class"
        assert not auditor._probes.positions()
    # The off log-probability is far within the tolerances of float32.
    assert found == {(0.0, True): "pass", (0.0, False): "pass", (2e-6, True): "soft", (2e-6, False): "pass"}


@pytest.mark.parametrize("played", [(0, 3)], ids=["S=0"], indirect=True)
def test_a_batch_leaves_the_last_versions_and_those_it_may_be_compared_with(played: Played) -> None:
    policies = Policies(
        played.archive, played.folder, 2, loader(played.config), Watchdog(0), partial(load_exactly, played.config)
    )
    for version in range(2, VERSIONS + 1):
        assert policies.folder(version)
    policies.forget(8, spared=[7, 6, 4])
    assert kept(played) == {10, 9, 8, 7, 6, 4}


@pytest.mark.parametrize("played", [(0, 3)], ids=["S=0"], indirect=True)
def test_the_first_version_is_there_though_no_update_led_to_it(played: Played) -> None:
    policies = Policies(
        played.archive, played.folder, 2, loader(played.config), Watchdog(0), partial(load_exactly, played.config)
    )
    assert policies.folder(1) == played.folder / "1"
    assert policies.folder(VERSIONS + 1) is None


@pytest.mark.parametrize("played", [(0, 3)], ids=["S=0"], indirect=True)
@pytest.mark.parametrize("away", [CUT, PROXY, Answer(429), error(DiskFull("full"))])
def test_who_cannot_answer_now_is_asked_again(played: Played, away: Answer) -> None:
    ended = Answer(200, Cases(version=0, cases=(), done=True).to_bytes())
    with answering(away, ended) as (url, asked), closing(played.auditor(url)) as auditor:
        auditor.run()
    assert [one.path for one in asked] == ["/v1/auditor/take"] * 2


@pytest.mark.parametrize("played", [(0, 3)], ids=["S=0"], indirect=True)
@pytest.mark.parametrize(
    ("answer", "kind"), [(error(NotAuthorised("no")), NotAuthorised), (Answer(404, b"<html>"), ConfigInvalid)]
)
def test_a_refusal_ends_an_auditor(played: Played, answer: Answer, kind: type[SwarmError]) -> None:
    with answering(answer) as (url, asked), closing(played.auditor(url)) as auditor, pytest.raises(kind):
        auditor.run()
    assert len(asked) == 1


def paced(played: Played, pace: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """An auditor in a process of its own that has one case, and what it asked."""
    played.archive.write_policy(VERSIONS, played.folder / str(VERSIONS))
    cases = Cases(version=VERSIONS, cases=(played.case(VERSIONS, played.folder / str(VERSIONS)),), done=False)
    ended = Answer(200, Cases(version=0, cases=(), done=True).to_bytes())
    settings = [f"{name}={value}" for name, value in played.settings.items()]
    with answering(Answer(200, cases.to_bytes()), *[ended] * 1000) as (url, asked):
        command = [sys.executable, "-m", "tests.coordinator.audit.paced_auditor", pace, url, str(played.folder)]
        process = subprocess.run([*command, str(played.file), *settings], capture_output=True, text=True, check=False)
    return process, [one.path for one in asked]


@pytest.mark.parametrize("played", [(0, 0)], ids=["S=0"], indirect=True)
def test_a_case_that_takes_three_times_the_silence_limit_is_judged_since_it_moves(played: Played) -> None:
    """Every module takes a third of the limit, and there are ten."""
    process, asked = paced(played, "slow")
    assert process.returncode == 0, process.stderr
    assert asked.count("/v1/auditor/hold") > 9
    assert asked[-2:] == ["/v1/auditor/verdicts", "/v1/auditor/take"]


@pytest.mark.parametrize("played", [(0, 0)], ids=["S=0"], indirect=True)
def test_a_replay_in_which_nothing_moves_ends_its_auditor_so_that_another_has_the_case(played: Played) -> None:
    """A dead auditor holds no cases; `test_casework` tests what happens to them."""
    process, asked = paced(played, "stands")
    assert process.returncode == 1
    assert "Timeout" in process.stderr
    assert "stand_still" in process.stderr, "it shows where it stood"
    assert "/v1/auditor/verdicts" not in asked


def test_half_of_the_cores_are_left_to_others() -> None:
    assert threads_of(parse({})) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert threads_of(parse({"audit": {"threads": 7}})) == 7


def test_a_precision_that_is_not_proven_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigInvalid, match="not proven to judge as strictly as float32"):
        parse({"audit": {"dtype": "bfloat16"}})
