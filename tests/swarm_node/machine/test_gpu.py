"""Graphics cards by their vendors' programs: what these print in the wild, and what they print when they fail."""

import json
import os
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


def test_what_a_card_does_not_tell_is_unknown_and_not_zero() -> None:
    (first, second) = gpu.parse_nvidia("Tesla K80, 470.1, 11441, 0, 40, [N/A], [Not Supported]\n\n" + GOOD)
    assert (first.watts, first.limit_watts, first.used_bytes) == (None, None, 0)
    assert second.watts == 300.42


def test_cards_are_asked_through_the_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", f"printf '{GOOD}'", monkeypatch)
    seen = gpu.look()
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
    seen = gpu.look()
    assert seen.cards == ()
    assert "nvidia-smi" in seen.trouble


def test_a_driver_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    assert "does not answer" in gpu.look(timeout_s=0.2).trouble


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
    (card,) = gpu.look().cards
    assert card == gpu.Card("amd", "Radeon RX 7900 XTX", "6.3.6", 25753026560, 27250688, 45.0, 21.0)
