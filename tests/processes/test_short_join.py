"""`swarm-node join HOST`: the owner confirms the round by its phrase, by a fingerprint, or in a terminal."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from protocol.policy.phrase import phrase
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import JoinString, parse
from tests.processes.programs import PATIENCE_S, Swarm, said, script
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, operator_of

pytestmark = pytest.mark.processes

WRONG = "abandon ability able about above absent"


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    coordinator = Coordinator(swarm, NOBODY_LEARNS).start()
    operator_of(swarm, coordinator, policy).publish()
    return coordinator


@pytest.fixture
def join(coordinator: Coordinator) -> JoinString:
    return parse(coordinator.join_string)


def preview(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `join --dry-run` without a terminal."""
    full = [script("swarm-node"), "join", *words, "--dry-run", "--home", str(home)]
    return subprocess.run(
        full, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def host_of(join: JoinString) -> str:
    return join.url.removeprefix("http://")


def test_the_operators_phrase_confirms_the_round(coordinator: Coordinator, join: JoinString, tmp_path: Path) -> None:
    shown = re.search(r"^Phrase: +((?:[a-z]+ ){5}[a-z]+) \(", coordinator.program.output, re.MULTILINE)
    assert shown is not None, coordinator.program.output
    assert shown[1] == phrase(join.round_id)
    found = preview(tmp_path, host_of(join), "--phrase", shown[1].upper())
    assert found.returncode == 0, found.stderr
    assert "Demand:" in found.stderr


def test_a_dry_run_without_an_engine_shows_the_round_before_the_refusal(join: JoinString, tmp_path: Path) -> None:
    found = preview(tmp_path, str(join), "--engine", "vllm", "--vllm-python", "/nowhere/python")
    assert found.returncode == 2
    told, refusal = found.stderr.split("swarm-node: ")
    assert told.startswith(f"Asking {join.url} …\n")
    assert "Demand: " in told
    assert "Payouts: " in told
    assert refusal.startswith("No installed engine can run here. vllm: ")
    assert "`--engine vllm`" in refusal


def test_status_shows_the_phrase(swarm: Swarm, coordinator: Coordinator, join: JoinString) -> None:
    shown = said(swarm, "swarm-coordinator", "status", str(coordinator.config_file))
    assert f"Phrase:      {phrase(join.round_id)}\n" in shown


@pytest.mark.parametrize("options", [("--phrase", WRONG), ("--fingerprint", "0" * 64)], ids=["phrase", "fingerprint"])
def test_another_round_is_refused(join: JoinString, tmp_path: Path, options: tuple[str, str]) -> None:
    found = preview(tmp_path / "home", join.url, *options)
    assert found.returncode == 1
    assert f"serves another round than the one that {options[0]} names" in found.stderr
    assert not (tmp_path / "home").exists()


def test_the_right_fingerprint_confirms_the_round(join: JoinString, tmp_path: Path) -> None:
    assert preview(tmp_path, join.url, "--fingerprint", join.round_id).returncode == 0
    both = preview(tmp_path, join.url, "--fingerprint", join.round_id, "--phrase", WRONG)
    assert both.returncode == 1, "every given proof must be right"


def test_without_a_terminal_and_a_phrase_it_refuses_and_says_what_to_give(join: JoinString, tmp_path: Path) -> None:
    found = preview(tmp_path / "home", host_of(join))
    assert found.returncode == 2
    assert "--phrase 'WORD WORD …'" in found.stderr
    assert phrase(join.round_id) not in found.stderr, "a script must not copy it from here"
    assert not (tmp_path / "home").exists()


def test_the_round_that_was_joined_last_needs_no_second_confirmation(join: JoinString, tmp_path: Path) -> None:
    last_round.record_joined(tmp_path, [join], "")
    assert preview(tmp_path, host_of(join)).returncode == 0
    moved = JoinString(join.url, "0" * 64)
    last_round.record_joined(tmp_path, [moved], "")
    assert preview(tmp_path, host_of(join)).returncode == 1, "its fingerprint counts, not the one that is served now"


def test_a_phrase_beside_a_whole_join_string_is_wrong_usage(join: JoinString, tmp_path: Path) -> None:
    assert preview(tmp_path, str(join), "--phrase", WRONG).returncode == 2


def test_nobody_at_the_address_is_named(tmp_path: Path) -> None:
    found = preview(tmp_path, "127.0.0.1:9", "--phrase", WRONG)
    assert found.returncode == 1
    assert "127.0.0.1:9" in found.stderr
    assert preview(tmp_path, "no host!", "--phrase", WRONG).returncode == 2


@pytest.mark.parametrize(("answer", "code"), [("y", 0), pytest.param("n", 2, marks=pytest.mark.slow), ("", 2)])
def test_in_a_terminal_the_owner_is_asked(join: JoinString, tmp_path: Path, answer: str, code: int) -> None:
    ours, theirs = pty.openpty()
    full = [script("swarm-node"), "join", host_of(join), "--dry-run", "--home", str(tmp_path)]
    with subprocess.Popen(full, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = ""
        while "same?" not in shown:
            shown += os.read(ours, 4096).decode()
        assert phrase(join.round_id) in shown
        os.write(ours, f"{answer}\n".encode())
        try:
            while part := os.read(ours, 4096):
                shown += part.decode(errors="replace")
        except OSError:  # the terminal's other end is closed
            pass
        assert process.wait(timeout=PATIENCE_S) == code, shown
    os.close(ours)
