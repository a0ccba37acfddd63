"""The units of a round: systemd reads them, rates them as hardened, and they start what the programs have."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.base.children import WRONG_SETTING
from coordinator.cli import app

FOLDER = Path(__file__).resolve().parents[2] / "installers" / "systemd"
UNITS = {"swarm-coordinator.service": 2.5, "swarm-api@.service": 1.5, "swarm-auditor@.service": 2.0}
"""Each unit with the highest exposure that `systemd-analyze security` may find, of 10."""

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")


def said(name: str) -> str:
    return (FOLDER / name).read_text()


def setting(name: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", said(name), re.MULTILINE)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


def test_every_unit_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(UNITS)


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_no_mistake(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name.replace("@", "@8702")
    unit.write_text(said(name).replace("/usr/local/lib/swarm-round/bin/swarm-coordinator", "/bin/true"))
    verify = analyze("verify", "--man=no", str(unit))
    assert verify.returncode == 0, verify.stderr
    assert unit.name not in verify.stderr, verify.stderr


@pytest.mark.parametrize(("name", "most"), UNITS.items())
def test_a_unit_is_hardened(name: str, most: float) -> None:
    rated = analyze("security", "--offline=true", f"--threshold={round(10 * most)}", "--no-pager", str(FOLDER / name))
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_command_with_options_that_exist(name: str) -> None:
    (line,) = setting(name, "ExecStart")
    program, command, file, *options = line.split()
    assert (program, file) == ("/usr/local/lib/swarm-round/bin/swarm-coordinator", "/etc/swarm-round/round.toml")
    helped = CliRunner().invoke(app, [command, "--help"])
    assert helped.exit_code == 0
    assert all(option in helped.output for option in options if option.startswith("--"))


def test_units_share_their_user_and_folder_since_they_share_the_rounds_keys() -> None:
    for key in ("User", "StateDirectory", "WorkingDirectory", "EnvironmentFile", "Environment"):
        assert len({tuple(setting(name, key)) for name in UNITS}) == 1, key


def test_a_wrong_setting_is_not_tried_for_ever_but_an_api_process_follows_its_leader() -> None:
    assert setting("swarm-coordinator.service", "RestartPreventExitStatus") == [str(WRONG_SETTING)]
    assert not setting("swarm-api@.service", "RestartPreventExitStatus")
    assert setting("swarm-api@.service", "StartLimitIntervalSec") == ["0"]


def test_the_coordinators_filter_permits_the_sandbox_of_rewards() -> None:
    """The calls of `coordinator.tasks.sandbox_kernel`; without them the reward would run with fewer walls."""
    permitted: set[str] = set()
    for rule in setting("swarm-coordinator.service", "SystemCallFilter"):
        for word in rule.split():
            permitted |= members(word) if word.startswith("@") else {word}
    needed = {"unshare", "mount", "mount_setattr", "prctl", "capset", "setresuid", "setgroups"}
    assert needed | {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= permitted
    assert {"bpf", "ptrace", "reboot", "init_module", "kexec_load"}.isdisjoint(permitted)
    assert set(setting("swarm-coordinator.service", "RestrictNamespaces")[0].split()) == {"user", "mnt"}


def members(group: str) -> set[str]:
    """Return the system calls of a group, also of the groups in it."""
    lines = {line.strip() for line in analyze("syscall-filter", group).stdout.splitlines()[1:]}
    lines = {line for line in lines if line and not line.startswith("#")}
    return {line for line in lines if line[0] != "@"}.union(*(members(line) for line in lines if line[0] == "@"))
