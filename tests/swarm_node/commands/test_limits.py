"""`swarm-node limits`: what changed, and a table that fits a terminal and has no JSON in it."""

from pathlib import Path

from typer.testing import CliRunner

from swarm_node.allowance.settings import CardLimits, Limits
from swarm_node.cli import app
from swarm_node.commands.agent import limit_lines, limit_text, sensor_lines
from swarm_node.machine.gpu import Card


def run(home: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ("limits", "--home", str(home), *words))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_change_prints_what_changed_and_that_the_agent_applies_it(tmp_path: Path) -> None:
    said = run(tmp_path, "--celsius", "80", "--price-floor", "1500000").splitlines()
    assert said[:2] == ["celsius is now 80, was 0", "price_floor is now 1500000 (1.50), was 0"]
    assert said[2] == f"Saved in {tmp_path / 'limits.toml'}; a running agent applies it within seconds."
    assert "vram_share" not in "".join(said)
    assert "nothing changed" in run(tmp_path, "--celsius", "80")
    assert run(tmp_path, "--card", "1", "--celsius", "70").startswith("card 1: celsius is now 70, was 0\n")


def test_the_table_has_no_json_and_no_row_wider_than_the_terminal() -> None:
    lines = list(limit_lines(Limits(cards={"1": CardLimits(celsius=70.0)}, on_battery=True), 80))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert not set('{}"') & set(text)
    assert "on_battery      true" in text
    assert limit_text("turns_mib", 1_048_576) == "1048576"
    assert lines[-1] == "card 1          celsius 70"


def test_a_limit_that_no_sensor_measures_is_said_to_have_no_effect() -> None:
    both = Limits(power_watts=200.0, cards={"1": CardLimits(celsius=70.0)})
    assert [line.partition(":")[0] for line in sensor_lines(both, [Card("intel", "Arc")])] == [
        "power_watts has no effect on this machine",
        "celsius has no effect on this machine",
    ]
    (nvidia,) = sensor_lines(both, [Card("nvidia", "L4", celsius=40.0, watts=30.0)])
    assert nvidia.endswith("A hard limit needs root: `nvidia-smi -pl 200`.")
    (amd,) = sensor_lines(both, [Card("amd", "MI300X", celsius=40.0, watts=90.0)])
    assert "nvidia-smi" not in amd
    assert list(sensor_lines(Limits(), [])) == []
