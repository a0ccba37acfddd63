"""The installer as the coordinator fills it: values are words of the shell, and a wrong wheel is named."""

import subprocess
from pathlib import Path

import pytest

from coordinator.api.install import filled, wheel_of
from coordinator.config import load
from protocol.errors import ConfigInvalid

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo.toml"
ROUND_ID = "a" * 64


@pytest.mark.parametrize(
    "url",
    [
        "https://swarm.example.org",
        "http://[2001:db8::1]:8700",
        "http://h/'; touch ran; '",
        "http://h/$(touch ran)`touch ran`",
    ],
)
def test_a_url_is_one_word_of_the_shell_and_never_a_command(tmp_path: Path, url: str) -> None:
    script = filled(load(DEMO, [f"round.public_url={url}"]), ROUND_ID)
    (line,) = [line for line in script.splitlines() if line.startswith("ROUND_JOIN=")]
    printed = subprocess.run(
        ["/bin/sh", "-c", f'{line}\nprintf %s "$ROUND_JOIN"'], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"{url}#{ROUND_ID}"
    assert list(tmp_path.iterdir()) == []
    assert subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_without_a_wheel_the_script_installs_a_release() -> None:
    script = filled(load(DEMO, []), ROUND_ID)
    assert "\nROUND_WHEEL=\n" in script
    assert wheel_of(load(DEMO, [])) is None


def test_a_file_that_is_no_wheel_of_the_agent_is_named(tmp_path: Path) -> None:
    (tmp_path / "other-1.0-py3-none-any.whl").touch()
    for name in ("other-1.0-py3-none-any.whl", "echo_swarm-1.0-py3-none-any.whl"):
        with pytest.raises(ConfigInvalid, match=name):
            wheel_of(load(DEMO, [f"round.agent_wheel={tmp_path / name}"]))
