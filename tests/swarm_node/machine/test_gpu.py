"""Graphics cards by their vendors' programs: what these print in the wild, and what they print when they fail."""

import json
import os
import re
from pathlib import Path

import pytest

from protocol.limits import MIB
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
        "nvidia", "NVIDIA GeForce RTX 4090", "550.54.14", 24564 * MIB, 1234 * MIB, 61.0, 300.42, 450.0
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


def kernel_card(
    drm: Path, name: str, vendor: str, *, place: str, sensors: dict[str, str] | None = None, **files: str
) -> None:
    """Write the files that the kernel has of a card; its folder is a link to its place on the bus, as there."""
    device = drm.parent / "bus" / place
    device.mkdir(parents=True)
    for file, text in ({"vendor": vendor} | files).items():
        (device / file).write_text(f"{text}\n")
    if sensors is not None:
        (device / "hwmon" / "hwmon2").mkdir(parents=True)
        for file, text in sensors.items():
            (device / "hwmon" / "hwmon2" / file).write_text(f"{text}\n")
    (drm / name).mkdir(parents=True)
    (drm / name / "device").symlink_to(device)


def test_cards_of_amd_and_intel_are_read_from_the_kernel_without_a_vendors_program(tmp_path: Path) -> None:
    drm = tmp_path / "drm"
    memory = {"mem_info_vram_total": "25753026560", "mem_info_vram_used": "1234000000", "device": "0x744c"}
    hot = {"temp1_input": "61000", "power1_average": "251000000"}
    kernel_card(drm, "card1", "0x1002", place="0000:0c:00.0", sensors=hot, **memory)
    kernel_card(drm, "card2", "0x1002", place="0000:03:00.0", product_name="Radeon PRO W7900")
    kernel_card(drm, "card0", "0x8086", place="0000:00:02.0", device="0x9a49")
    kernel_card(drm, "card3", "0x8086", place="0000:09:00.0", sensors={"temp2_input": "48000"}, device="0xe20b")
    kernel_card(drm, "card4", "0x1a03", place="0000:01:00.0")
    (drm / "card1-DP-1").mkdir()
    first, second = gpu.kernel_cards(drm)
    assert first == gpu.Card("amd", "Radeon PRO W7900")
    assert second == gpu.Card("amd", "AMD GPU 0x744c", "", 25753026560, 1234000000, 61.0, 251.0, None, 1)
    for name in ("card1", "card2"):
        (drm / name / "device").unlink()
    assert gpu.kernel_cards(drm) == (gpu.Card("intel", "INTEL GPU 0xe20b", celsius=48.0),)


def test_a_machine_without_the_kernels_files_has_no_such_cards(tmp_path: Path) -> None:
    assert gpu.kernel_cards(tmp_path / "none") == ()


def test_the_cards_of_rocm_smi_keep_their_numbers() -> None:
    said = {f"card{number}": {"Card series": f"MI {number}"} for number in (10, 2, 0)}
    cards = gpu.parse_amd(json.dumps(said | {"system": {"Driver version": "6.3.6"}}))
    assert [(card.number, card.name) for card in cards] == [(0, "MI 0"), (2, "MI 2"), (10, "MI 10")]


@pytest.mark.parametrize(("driver", "cuda"), [(580, 13), (579, 12), (525, 12), (524, 11), (449, 0), (0, 0)])
def test_the_newest_cuda_that_a_driver_runs(driver: int, cuda: int) -> None:
    assert gpu.newest_cuda(driver) == cuda


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-8f2a0d6e-0000-2b2c-524d-9e3d8d2b8a77)
"""
SLICE = (
    "<mig_device><index>{}</index><fb_memory_usage><total>{} MiB</total><used>{} MiB</used></fb_memory_usage>"
    "</mig_device>"
)
READ = (
    "<nvidia_smi_log><gpu><fb_memory_usage><total>40960 MiB</total><used>9 MiB</used></fb_memory_usage><mig_devices>"
    + SLICE.format(0, 19968, 12)
    + SLICE.format(1, 4864, 2000)
    + "</mig_devices></gpu><gpu><mig_devices>None</mig_devices></gpu></nvidia_smi_log>"
)
PAIR = "NVIDIA A100-SXM4-40GB, 550.54.14, 40960, 9, 31, 60, 400\n" * 2


def test_the_slices_of_a_card_replace_it_each_with_its_own_memory() -> None:
    cards = gpu.with_slices(gpu.parse_nvidia(PAIR), LISTED, READ)
    assert [(card.number, card.memory_bytes, card.used_bytes) for card in cards] == [
        (100, 19968 * MIB, 12 * MIB),
        (101, 4864 * MIB, 2000 * MIB),
        (1, 40960 * MIB, 9 * MIB),
    ]
    assert cards[0].name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert gpu.only_cards(cards[1:2])["CUDA_VISIBLE_DEVICES"] == "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
    assert gpu.only_cards(cards[2:])["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("read", ["", "<nvidia_smi_log>", "<nvidia_smi_log><gpu/></nvidia_smi_log>"])
def test_the_memory_of_a_slice_that_is_not_reported_is_unknown(read: str) -> None:
    cards = gpu.with_slices(gpu.parse_nvidia(PAIR), LISTED, read)
    assert [card.memory_bytes for card in cards] == [None, None, 40960 * MIB]


def test_a_card_without_slices_stays_as_it_is() -> None:
    cards = gpu.parse_nvidia(PAIR)
    assert gpu.with_slices(cards, LISTED.replace("  MIG", "  NIX"), READ) == cards


def test_slices_are_asked_for_through_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listed").write_text(LISTED)
    (tmp_path / "read").write_text(READ)
    answers = f"-L) cat {tmp_path}/listed ;; *-x*) cat {tmp_path}/read ;; *) printf '{PAIR}'"
    program(tmp_path, "nvidia-smi", f'case "$*" in {answers} ;; esac'.replace("\n", "\\n"), monkeypatch)
    assert [card.number for card in gpu.find_cards().cards] == [100, 101, 1]
