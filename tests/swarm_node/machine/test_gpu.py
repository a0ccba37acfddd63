"""Graphics cards by their vendors' programs: what these print in the wild, and what they print when they fail."""

import json
import os
import re
from pathlib import Path

import pytest

from swarm_node.machine import gpu

GOOD = "NVIDIA GeForce RTX 4090, 550.54.14, 24564, 1234, 61, 300.42, 450.00\n"


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only program of the vendor's that can be found."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")


def test_a_card_tells_driver_memory_heat_and_watts() -> None:
    (card,) = gpu.parse_nvidia(GOOD)
    assert card == gpu.Card(
        "nvidia", "NVIDIA GeForce RTX 4090", "550.54.14", 24564 * gpu.MIB, 1234 * gpu.MIB, 61.0, 300.42, 450.0
    )


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ("550.54.14", 550),
        ("470.1", 470),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", 535),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3.0", 580),
        ("6.3.6", 0),
        ("unknown", 0),
    ],
)
def test_the_major_version_of_a_driver_is_read_from_nvidia_smi_and_from_the_kernel(text: str, major: int) -> None:
    assert gpu.driver_major(text) == major


def test_a_driver_is_judged_by_the_cuda_that_an_engine_is_built_for() -> None:
    assert gpu.outdated(579) == "CUDA 13 needs NVIDIA driver 580 or newer, and this machine has 579"
    assert gpu.outdated(579, cuda_major=12) == gpu.outdated(580) == gpu.outdated(0) == ""
    assert "525" in gpu.outdated(470, cuda_major=12)


def test_our_lists_are_built_for_the_cuda_that_drivers_are_judged_by() -> None:
    installers = Path(__file__).parents[3] / "installers"
    (toolkit,) = re.findall(r"^cuda-toolkit==(\d+)\.", (installers / "vllm.lock").read_text(), re.MULTILINE)
    (least,) = re.findall(r"^DRIVER_MIN=(\d+)$", (installers / "install.sh").read_text(), re.MULTILINE)
    assert int(toolkit) == gpu.CUDA_MAJOR
    assert int(least) == gpu.DRIVERS_MIN[gpu.CUDA_MAJOR]


def test_what_a_card_does_not_tell_is_unknown_and_not_zero() -> None:
    (first, second) = gpu.parse_nvidia("Tesla K80, 470.1, 11441, 0, 40, [N/A], [Not Supported]\n\n" + GOOD)
    assert (first.watts, first.limit_watts, first.used_bytes) == (None, None, 0)
    assert second.watts == 300.42


def test_cards_are_asked_through_the_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", f"printf '{GOOD}'", monkeypatch)
    seen = gpu.find_cards()
    assert [card.name for card in seen.cards] == ["NVIDIA GeForce RTX 4090"]
    assert seen.trouble == ""


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "printf 'a, b\\n'",
        "exit 0",
        "printf '\\377\\376'",
    ],
)
def test_a_driver_in_trouble_is_told_of_and_is_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    program(tmp_path, "nvidia-smi", script, monkeypatch)
    seen = gpu.find_cards()
    assert seen.cards == ()
    assert "nvidia-smi" in seen.trouble


def test_a_driver_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    assert "does not answer" in gpu.find_cards(timeout_s=0.2).trouble


def test_amd_cards_are_read_whatever_their_keys_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "card0": {
            "Card Series": "Radeon RX 7900 XTX",
            "VRAM Total Memory (B)": "25753026560",
            "VRAM Total Used Memory (B)": "27250688",
            "Temperature (Sensor edge) (C)": "45.0",
            "Average Graphics Package Power (W)": "21.0",
        },
        "system": {"Driver version": "6.3.6"},
    }
    (tmp_path / "said.json").write_text(json.dumps(said))
    program(tmp_path, "rocm-smi", f"cat {tmp_path / 'said.json'}", monkeypatch)
    (card,) = gpu.find_cards().cards
    assert card == gpu.Card("amd", "Radeon RX 7900 XTX", "6.3.6", 25753026560, 27250688, 45.0, 21.0)
