"""The doctor: each check on machines that are well and on machines that are not."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import cast

import pytest
import trio

from protocol.wire import generation
from protocol.wire.signing import NodeKey
from swarm_node.allowance.governor import Governor
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.doctor import cards, line, report
from swarm_node.doctor import examine as house
from swarm_node.doctor.engines import engine, engines, make_tiny_model, processor
from swarm_node.doctor.examine import Patient, examine, unreached
from swarm_node.doctor.report import CheckResult, CheckState
from swarm_node.engine.choose import EngineOptions, HostMachine, this_machine
from swarm_node.keys import identity
from swarm_node.machine.gpu import Card, GpuProbe
from swarm_node.owner.control_server import listening

GB = 10**9
UNASKED = cast(Governor, None)
"""`status` asks no governor."""
RTX = Card("nvidia", "RTX 4090", "550.54", 24 * GB, 1 * GB, 40.0, 20.0, 450.0)


def states(*findings: CheckResult) -> list[str]:
    return [finding.state.value for finding in findings]


def test_a_home_that_cannot_be_written_fails_and_one_that_is_not_there_yet_does_not(tmp_path: Path) -> None:
    assert states(house.home(tmp_path / "a" / "b"), house.home(tmp_path)) == ["ok", "ok"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    (tmp_path / "file").touch()
    assert house.home(tmp_path / "file").state is CheckState.FAIL


def test_a_key_that_others_can_read_fails_with_the_command_that_mends_it(tmp_path: Path) -> None:
    assert house.key(tmp_path).state is CheckState.SKIP
    identity.load_or_create(tmp_path / identity.FILE)
    assert house.key(tmp_path).state is CheckState.OK
    (tmp_path / identity.FILE).chmod(0o644)
    finding = house.key(tmp_path)
    assert (finding.state, finding.evidence) == (CheckState.FAIL, "mode 0644")
    assert "chmod 600" in finding.next_step
    (tmp_path / identity.FILE).chmod(0o600)
    (tmp_path / identity.FILE).write_text("half a k")
    assert house.key(tmp_path).state is CheckState.FAIL


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (GpuProbe((RTX,)), "warn"),
        (GpuProbe((RTX._replace(driver="580.65.06"),)), "ok"),
        (GpuProbe((RTX._replace(driver="[N/A]"),)), "skip"),
        (GpuProbe((RTX._replace(vendor="amd", driver="550.1"),)), "skip"),
        (GpuProbe(), "skip"),
    ],
)
def test_a_driver_that_is_too_old_for_the_engines_is_named_with_the_next_step(seen: GpuProbe, state: str) -> None:
    finding = cards.driver(seen)
    assert finding.state.value == state
    assert ("Update the driver" in finding.next_step) == (state == "warn")
    assert ("a build of torch for CUDA 12, which this driver runs" in finding.next_step) == (state == "warn")


def test_a_driver_is_judged_by_the_torch_that_is_installed() -> None:
    assert states(cards.driver(GpuProbe((RTX,)), 12), cards.driver(GpuProbe((RTX,)), 13)) == ["ok", "warn"]


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (GpuProbe((RTX,)), "ok"),
        (GpuProbe(), "warn"),
        (GpuProbe(trouble="Driver/library version mismatch"), "fail"),
        (GpuProbe((RTX._replace(celsius=93.0),)), "warn"),
    ],
)
def test_a_card_that_answers_is_told_from_none_and_from_one_in_trouble(seen: GpuProbe, state: str) -> None:
    assert cards.card(seen).state.value == state


@pytest.mark.parametrize(
    ("weights_gb", "share", "state"), [(16, 1.0, "ok"), (19, 1.0, "warn"), (25, 1.0, "fail"), (16, 0.5, "warn")]
)
def test_the_model_is_compared_with_the_memory_that_is_free_and_allowed(
    weights_gb: int, share: float, state: str
) -> None:
    assert cards.memory(GpuProbe((RTX,)), weights_gb * GB, vram_share=share).state.value == state


def test_a_card_that_cannot_hold_the_model_is_named_beside_one_that_can() -> None:
    small = RTX._replace(name="GTX 1650", memory_bytes=4 * GB, number=1)
    finding = cards.memory(GpuProbe((RTX, small)), 8 * GB)
    assert finding.state is CheckState.OK
    assert "; card 1 (GTX 1650) is too small and left out" in finding.evidence
    assert "left out" not in cards.memory(GpuProbe((RTX, RTX)), 8 * GB).evidence


def test_who_may_not_open_the_files_of_a_card_gets_the_command_that_permits_it(tmp_path: Path) -> None:
    amd = GpuProbe((RTX._replace(vendor="amd"),))
    assert cards.access(GpuProbe((RTX,)), tmp_path).state is CheckState.SKIP
    finding = cards.access(amd, tmp_path)
    assert (finding.state, "kfd is missing" in finding.evidence) == (CheckState.WARN, True)
    (tmp_path / "kfd").touch()
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert cards.access(amd, tmp_path).state is CheckState.OK
    if os.getuid():  # root may open everything
        (tmp_path / "dri" / "renderD128").chmod(0)
        assert "usermod -aG render,video" in cards.access(amd, tmp_path).next_step


def test_what_differs_in_wsl_is_said() -> None:
    assert "Windows has the graphics driver" in cards.wsl().said
    assert "--hours" in cards.wsl().evidence


def test_the_threads_of_an_engine_are_told_before_it_joins() -> None:
    here = this_machine()._replace(nvidia=False, llama_offloads=False, threads=4)
    finding = processor(EngineOptions(threads=0), here)
    assert (finding.state, finding.check) == (CheckState.OK, "cpu")
    assert "uses 4 CPU threads" in finding.said
    assert "--threads" in finding.evidence
    assert "uses 1 CPU thread" in processor(EngineOptions(threads=1), here).said


def test_memory_that_nobody_tells_is_not_judged() -> None:
    assert states(cards.memory(GpuProbe(), 1), cards.memory(GpuProbe((RTX,)), None)) == ["skip", "skip"]
    assert cards.memory(GpuProbe((RTX._replace(memory_bytes=None),)), 1).state is CheckState.SKIP


@pytest.mark.parametrize(
    ("total", "free", "on_card", "state"),
    [
        (32, 30, False, "ok"),
        (32, 10, False, "warn"),
        (16, 15, False, "fail"),
        (16, 15, True, "ok"),
        (None, None, False, "skip"),
    ],
)
def test_the_machines_memory_must_hold_what_no_card_does(
    total: int | None, free: int | None, on_card: bool, state: str
) -> None:
    all_of_it, unused = (None if value is None else value * GB for value in (total, free))
    assert cards.ram(all_of_it, unused, 16 * GB, on_card=on_card).state.value == state


def test_disks_are_measured_where_the_home_is_and_nothing_stays(tmp_path: Path) -> None:
    assert cards.space(tmp_path / "home", 1).state is CheckState.OK
    assert cards.space(tmp_path, 10**18).state is CheckState.FAIL
    assert cards.speed(tmp_path / "home", tried_bytes=2**20).state in (CheckState.OK, CheckState.WARN)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_finding(tiny_disk: Path) -> None:
    finding = cards.space(tiny_disk, 1)
    assert finding.state is CheckState.FAIL
    assert not finding.evidence.startswith("0"), "a small rest has its own unit"
    assert cards.speed(tiny_disk).next_step == "Free some space."
    assert not list(tiny_disk.iterdir())


def test_a_folder_that_is_no_folder_is_not_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = cards.speed(tmp_path / "file")
    assert finding.state is CheckState.FAIL
    assert "Free some space" not in finding.next_step


@pytest.mark.parametrize(
    ("offset_s", "state"),
    [(0.4, "ok"), (-9.9, "ok"), (12.0, "warn"), (-90.0, "fail"), (3600.0, "fail"), (None, "skip")],
)
def test_a_clock_is_judged_by_what_the_coordinator_still_accepts(offset_s: float | None, state: str) -> None:
    assert line.clock(offset_s).state.value == state


def nothing(_python: str) -> str:
    return "none"


@pytest.mark.trio
async def test_a_machine_without_any_engine_fails_and_names_what_to_install() -> None:
    bare = HostMachine(nvidia=False, packages=frozenset(), llama_offloads=False, find_vllm=nothing)
    found = await engines(EngineOptions(), lambda: bare)
    assert states(*found) == ["skip", "skip", "skip", "fail"]
    assert "pip install 'echo-swarm[torch]'" in found[-1].next_step
    assert not any("vllm" in finding.next_step for finding in found), "there is no card for it"
    rows = [next(report.lines(finding)) for finding in found[:-1]]
    for finding, row in zip(found[:-1], rows, strict=True):
        assert row == f"skip  {finding.check:<12} {finding.said}", "the column holds the longest name"
        assert not finding.said.startswith(f"{finding.check.removeprefix('engine ')}: "), "the name stands once"


@pytest.mark.trio
@pytest.mark.parametrize("nvidia", [True, False])
async def test_a_missing_vllm_is_proposed_for_an_nvidia_card_only(nvidia: bool) -> None:
    bare = HostMachine(nvidia=nvidia, packages=frozenset(), llama_offloads=False, find_vllm=nothing)
    missing = [await engine(name, EngineOptions(), bare, Path()) for name in ("vllm", "llama", "torch")]
    assert ["pip install vllm" in finding.next_step for finding in missing] == [nvidia, False, False]


@pytest.mark.trio
async def test_an_installed_engine_samples_the_tiny_model(tmp_path: Path) -> None:
    finding = await engine("llama", EngineOptions(), this_machine(), make_tiny_model(tmp_path / "model"))
    assert finding.state is CheckState.OK, finding
    assert "llama/fp32" in finding.evidence


@pytest.mark.trio
async def test_an_engine_that_cannot_load_is_told_from_one_that_is_not_installed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    await trio.Path(model / "model.safetensors").write_bytes(b"not weights")
    finding = await engine("llama", EngineOptions(), this_machine(), model)
    assert finding.state is CheckState.FAIL
    assert finding.next_step


@pytest.mark.trio
async def test_a_round_that_does_not_answer_is_a_finding_and_the_machine_is_examined_all_the_same(
    tmp_path: Path,
) -> None:
    join = JoinString("http://127.0.0.1:9", "0" * 64)
    told: list[CheckResult] = []
    other = JoinString("http://127.0.0.1:10", "1" * 64)
    patient = Patient(tmp_path, join, "127.0.0.1:0", EngineOptions(), with_engines=False, others=(other,))
    with trio.fail_after(60):
        found = await examine(patient, told.append)
    assert found == told
    by_name = {finding.check: finding.state for finding in found}
    assert by_name["round"] is CheckState.FAIL
    rounds = [finding.said.partition(" ")[0] for finding in found if finding.check == "round"]
    assert rounds == [join.url, other.url]
    refused = next(finding for finding in found if finding.check == "round")
    assert refused.next_step not in refused.evidence, "the next step stands once"
    urls = {check: [finding.to_json()["url"] for finding in found if finding.check == check] for check in by_name}
    assert urls["round"] == urls["clock"] == [join.url, other.url]
    assert (urls["reach"], urls["disk"]) == ([join.url], [""]), "checks of the machine name no round"
    assert {by_name[name] for name in ("clock", "down", "up", "reach")} == {CheckState.SKIP}
    assert by_name["disk"] is CheckState.OK
    assert report.failed(found)
    assert not await trio.to_thread.run_sync(lambda: list(tmp_path.iterdir())), "an examination leaves nothing behind"


class NewerRound(BaseHTTPRequestHandler):
    """A coordinator of a later generation, as far as its status says."""

    def do_GET(self) -> None:
        body = json.dumps({"generation": generation.CURRENT + 1}).encode()
        self.send_response(200 if self.path == "/v1/status" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.trio
async def test_a_round_of_a_later_generation_is_named_before_the_node_joins(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), NewerRound) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        join = JoinString(f"http://127.0.0.1:{server.server_port}", "0" * 64)
        patient = Patient(tmp_path, join, "127.0.0.1:0", EngineOptions(), with_engines=False)
        with trio.fail_after(60):
            found = await examine(patient, lambda _: None)
        server.shutdown()
    refused = next(finding for finding in found if finding.check == "round")
    assert refused.state is CheckState.FAIL
    assert f"generation {generation.CURRENT + 1}" in refused.said
    assert "install.sh" in refused.next_step


def test_every_finding_that_is_not_well_says_what_to_do() -> None:
    found = [cards.card(GpuProbe()), line.clock(100.0), house.key(Path(os.devnull) / "none")]
    for finding in found[:2]:
        assert finding.next_step
        assert "→" in "\n".join(report.lines(finding))
    assert "1 warn, 1 fail, 1 skip" in report.summary(found)


def test_a_finding_is_plain_json() -> None:
    assert report.ok("disk", "fine").to_json()["state"] == "ok"


@pytest.mark.trio
@pytest.mark.parametrize("listen", ["8701", "::1:0", "no-such-host.invalid:0"])
async def test_an_address_on_which_the_node_would_not_start_is_a_failure(listen: str) -> None:
    coordinator = Coordinator("http://127.0.0.1:9", "0" * 64, NodeKey(bytes(32)))
    finding = await line.reach(line.RoundAnswer(coordinator, None), listen)
    assert finding.state is CheckState.FAIL
    assert listen in finding.said


@pytest.mark.trio
@pytest.mark.parametrize(
    ("dialled", "said"),
    [(True, "Others can connect to you."), (False, "Others cannot connect to you, so your node connects to them.")],
)
async def test_a_running_agent_knows_whether_others_could_dial_it(tmp_path: Path, dialled: bool, said: str) -> None:
    coordinator = Coordinator("http://127.0.0.1:9", "0" * 64, NodeKey(bytes(32)))
    async with listening(tmp_path, UNASKED, lambda: {"dialled": dialled}):
        finding = await line.reach(line.RoundAnswer(coordinator, None), "", tmp_path)
    assert (finding.state, finding.said) == (CheckState.OK, said)


@pytest.mark.trio
async def test_an_agent_of_which_nobody_has_said_anything_is_tried(tmp_path: Path) -> None:
    coordinator = Coordinator("http://127.0.0.1:9", "0" * 64, NodeKey(bytes(32)))
    async with listening(tmp_path, UNASKED, lambda: {"dialled": None}):
        finding = await line.reach(line.RoundAnswer(coordinator, None), "", tmp_path)
    assert finding.state is CheckState.SKIP, "nobody answers at that address"


def test_a_check_that_needs_the_round_says_why_there_is_no_answer() -> None:
    """A round that was not named and one that does not respond have different next steps."""
    without, silent = unreached(None), unreached(JoinString("https://swarm.example.org", "a" * 64))
    assert {(result.state, result.said) for result in without} == {
        (CheckState.SKIP, "Not checked: no round was joined or named.")
    }
    assert {result.next_step for result in without} == {"swarm-node doctor JOIN_STRING"}
    assert {(result.said, result.next_step) for result in silent} == {
        ("Not checked: the round at https://swarm.example.org did not respond.", "")
    }


def test_cards_that_vllm_joins_for_the_model_are_counted_in_one_sentence() -> None:
    seen = GpuProbe(tuple(RTX._replace(number=number) for number in range(2)))
    joined = cards.memory(seen, 28 * GB, splits=(2, 4), joins_cards=True)
    assert joined.state is CheckState.OK
    assert joined.said.startswith("2 cards per engine: the model needs about 35.5 GB, one card has ")
    other = cards.memory(seen, 28 * GB, splits=(2, 4))
    assert other.state is CheckState.FAIL
    assert other.next_step.startswith("vLLM can join 2 of these cards: `--engine vllm` takes `pip install vllm")
    assert cards.memory(seen, 28 * GB, splits=(), joins_cards=True).state is CheckState.FAIL
