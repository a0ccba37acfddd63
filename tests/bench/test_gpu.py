"""The learner's part of bench/gpu, as far as a machine without a GPU can show it."""

from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import learner, sampling
from bench.gpu.shapes import SHAPES, TINY, LearnerShape
from bench.harness import Bench

ONE = LearnerShape(hidden=2, layers=1, heads=1, kv_heads=1, head=2, intermediate=3, vocabulary=5)


def test_arithmetic_is_what_one_counts_by_hand() -> None:
    matrices = 4 * (2 * 2) + 3 * (2 * 3)  # q, k, v, o and the gated unit
    assert ONE.layer_parameters == matrices == 34
    assert ONE.parameters == 34 + 10
    # a prompt of 4 and a completion of 2: 6 tokens through the layer, 2 through the output layer, 8 + 8 + 2 pairs
    forward = 2 * 6 * 34 + 2 * 2 * 10 + 4 * 18 * 2
    assert ONE.step_flops(4, [2]) == 3 * forward


def test_a_prompt_counts_once_however_many_samples_it_has() -> None:
    apart = 2 * ONE.step_flops(4, [2])
    assert apart - ONE.step_flops(4, [2, 2]) == 3 * (2 * 4 * 34 + 4 * 8 * 2)


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-0.6B", 0.596), ("Qwen3-4B", 4.02)])
def test_shapes_have_the_sizes_that_their_names_say(name: str, billions: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L40S", 362)],
)
def test_a_device_is_known_by_its_longest_name(device: str, peak: float) -> None:
    assert learner.peak_tflops(device) == peak


def test_an_unknown_device_has_no_peak() -> None:
    assert learner.peak_tflops("Somebody's Accelerator 9") is None


def test_the_learners_part_runs_on_a_cpu(tmp_path: Path) -> None:
    bench = Bench("gpu", inputs={}, results=tmp_path, quick=True)
    settings = learner.settings_of(learner.SMALL, "cpu", "float32")
    learner.measure(bench, "tiny", TINY, learner.SMALL, settings, peak=0.01, rounds=1)
    for case in ("completion tokens", "arithmetic", "matrix product", "MFU"):
        assert bench.median(f"tiny: {case}") > 0


def test_the_engines_part_runs_on_a_cpu(tmp_path: Path) -> None:
    bench = Bench("gpu", inputs={}, results=tmp_path, quick=True)
    demand = sampling.Demand(groups=2, samples=2, prompt=8, longest=16)
    sampling.measure(bench, "tiny", TINY, demand, device="cpu", rounds=1)
    for case in ("torch engine, bf16", "generate, bf16"):
        assert bench.median(f"tiny: {case}") > 0


def test_a_shape_that_does_not_fit_is_tried_with_smaller_moments() -> None:
    whole = learner.predicted_bytes(TINY, learner.SMALL, learner.settings_of(learner.SMALL, "cuda", "float32"))
    found = learner.fitting(TINY, learner.SMALL, whole - 1)
    assert found is not None
    assert found[0].optimizer_dtype == "bfloat16"
    assert found[1] < whole
    assert learner.fitting(TINY, learner.SMALL, 1000) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUICK", raising=False)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert program.main() == 0
    assert "skipped: no CUDA device" in capsys.readouterr().out


def test_a_part_that_fails_is_a_missed_goal_and_hides_no_other(tmp_path: Path) -> None:
    bench = Bench("gpu", inputs={}, results=tmp_path, quick=True)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    program.attempt(bench, "a large shape", full)
    program.attempt(bench, "a small one", lambda: bench.measure("a small one", 1.0, unit="s"))
    assert bench.median("a small one") == 1.0
    assert bench.finish() == 1
