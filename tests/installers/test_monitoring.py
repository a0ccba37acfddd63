"""Prometheus's own tool checks the alarms, and plays healthy and broken rounds against them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from coordinator.reports.alarms import CRITICAL

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "installers" / "monitoring" / "alerts.yaml"
DASHBOARD = RULES.with_name("grafana.json")
TEST = Path(__file__).with_name("alerts.test.yaml")


def test_every_alarm_has_a_severity_a_time_and_a_next_step() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["for"], rule["alert"]
        assert len(rule["annotations"]["summary"]) > 30, rule["alert"]
    assert {"critical", "warning"} == {rule["labels"]["severity"] for rule in group["rules"]}
    assert CRITICAL, "the same two words as in the coordinator's own alarms"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("words", [("check", "rules", str(RULES)), ("test", "rules", str(TEST))])
def test_promtool_finds_no_mistake_and_every_alarm_rises_when_it_must(words: tuple[str, ...]) -> None:
    ran = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SUCCESS" in ran.stdout


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_a_rule_that_looks_at_too_little_fails_the_played_rounds(tmp_path: Path) -> None:
    loose = RULES.read_text().replace(" and on() sum(echo_swarm_groups_in_vain_total) > 50", "")
    (tmp_path / "alerts.yaml").write_text(loose)
    (tmp_path / "test.yaml").write_text(TEST.read_text().replace("../../installers/monitoring/", ""))
    ran = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 50
    assert all('instance=~"$instance"' in expression for expression in expressions), "of the coordinator that is chosen"
    records = [{"record": f"shown:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    rules = tmp_path / "shown.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    ran = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
