"""Tolerances: from honest probes to limits that honest work keeps, and nobody else's signature in between."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Root

from coordinator.rules import calibration
from coordinator.rules.calibration import FLOOR_NATS, SHIPPED, UNNAMED, Calibration, derive, load, read, sign
from coordinator.rules.verdict import AuditOutcome, judge
from protocol.errors import AuditFailed
from tests.coordinator.audit.claims import EXACT, honest


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2])
def test_what_was_probed_passes_and_ten_times_the_noise_does_not(noise: float) -> None:
    tolerance = derive("a/b/c", [honest(600, noise=noise, seed=seed) for seed in range(20)])
    assert tolerance.margin.tolerance >= FLOOR_NATS
    for seed in range(20, 40):
        assert judge(honest(600, noise=noise, seed=seed), tolerance, 1).outcome is AuditOutcome.PASS
    assert judge(honest(600, noise=max(10 * noise, 1e-2), seed=1), tolerance, 1).outcome is AuditOutcome.HARD


def test_few_probes_are_refused() -> None:
    with pytest.raises(AuditFailed, match="too few"):
        derive("a/b/c", [honest(499)] * 10)


def test_the_shipped_file_knows_the_classes_of_the_shipped_engines() -> None:
    shipped = read(SHIPPED)
    torch, llama = {"torch/fp32/cpu", "torch/bf16/cpu"}, {"llama/fp32/cpu", "llama/fp16/cpu", "llama/q8_0/cpu"}
    vllm = {"vllm/fp32/cpu", "vllm/bf16/cpu"}
    assert {entry.name for entry in shipped.classes} == torch | llama | vllm
    for engine in ("torch", "vllm"):
        assert (
            shipped.tolerances_of(f"{engine}/fp32/cpu").margin.far
            < shipped.tolerances_of(f"{engine}/bf16/cpu").margin.far
        )
    for engine in ("llama", "vllm"):
        assert shipped.tolerances_of(f"{engine}/fp32/cpu").margin == shipped.tolerances_of("torch/fp32/cpu").margin
    assert shipped.tolerances_of("llama/fp16/cpu").mean_error < shipped.tolerances_of("llama/q8_0/cpu").mean_error
    with pytest.raises(AuditFailed, match="torch/fp32/cpu"):
        shipped.tolerances_of("vllm/fp8/cuda")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("torch/bf16/cuda", "torch/bf16/cpu"),
        ("vllm/bf16/cuda", "vllm/bf16/cpu"),
        ("abacus/q8_0/hand", "llama/q8_0/cpu"),
        ("abacus/wood/hand", "torch/fp32/cpu"),
        ("torch/fp32/cuda", "torch/fp32/cpu"),
        ("", "torch/fp32/cpu"),
    ],
)
def test_an_unknown_class_is_judged_provisionally_by_its_precision(name: str, like: str) -> None:
    shipped = read(SHIPPED)
    allowed, is_measured = shipped.judging(name, "a" * 64)
    assert not is_measured
    assert allowed.margin == shipped.tolerances_of(like).margin
    assert allowed.name == (name or UNNAMED)


def test_numbers_hold_for_the_round_that_they_were_measured_on_and_float32s_floor_for_every_one() -> None:
    here, there = "a" * 64, "b" * 64
    shipped = read(SHIPPED)
    assert shipped.measured_on(here) == ("torch/fp32/cpu",)
    mine = derive("torch/bf16/cuda", [honest(600, noise=1e-2, seed=seed) for seed in range(20)], here)
    made = shipped.with_class(mine, made=date(2026, 11, 25), model="m")
    assert made.judging("torch/bf16/cuda", here) == (mine, True)
    assert made.judging("torch/bf16/cuda", there) == (mine, False)
    assert not made.judging("torch/bf16/cpu", here)[1], "another class of the same precision"
    rough = derive("torch/fp32/cpu", [honest(600, noise=1e-2, seed=seed) for seed in range(20)], there)
    assert not rough.is_measured_on(here), "float32 that was measured elsewhere is no floor"


def root_of(signers: Sequence[CryptoSigner], threshold: int) -> Root:
    root = Root()
    for signer in signers:
        root.add_key(signer.public_key, "targets")
    root.roles["targets"].threshold = threshold
    return root


def test_a_rounds_own_tolerances_count_when_enough_of_its_keys_signed(tmp_path: Path) -> None:
    ours, thief = [CryptoSigner.generate_ed25519() for _ in range(2)], CryptoSigner.generate_ed25519()
    root = root_of(ours, 2)
    made = Calibration(version=7, made=date(2026, 11, 21), model="m", classes=(EXACT,))
    assert load(tmp_path, root) == read(SHIPPED)
    path = tmp_path / calibration.FILE
    path.write_bytes(sign(made, ours))
    assert load(tmp_path, root) == made
    for signers in ([thief], ours[:1], [ours[0], thief]):
        path.write_bytes(sign(made, signers))
        with pytest.raises(AuditFailed, match="not signed"):
            load(tmp_path, root)


def test_garbage_in_place_of_signed_tolerances_is_a_named_error(tmp_path: Path) -> None:
    signer = CryptoSigner.generate_ed25519()
    root, path = root_of([signer], 1), tmp_path / calibration.FILE
    sealed = json.loads(sign(Calibration(version=1, made=date(2026, 1, 1), model="m", classes=(EXACT,)), [signer]))
    altered = sealed | {"payload": sealed["payload"][:-8] + "AAAAAAAA"}
    for data in (b"", b"\xff", b"[]", b"{}", b'{"payload": 3}', json.dumps(altered).encode(), SHIPPED.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(AuditFailed):
            load(tmp_path, root)


def test_a_class_measured_again_replaces_the_old_one() -> None:
    first = Calibration(version=1, made=date(2026, 1, 1), model="m", classes=(EXACT,))
    wider = EXACT.model_copy(update={"mean_error": 1.0})
    second = first.with_class(wider, made=date(2026, 1, 2), model="n")
    assert (second.version, second.classes) == (2, (wider,))
