"""The chart in installers/helm: values and settings exist, and rendered objects are complete. No cluster is started."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config import load

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "installers" / "helm"
ROUND = ROOT / "examples" / "demo.toml"

VERSIONS = {
    **dict.fromkeys(("ConfigMap", "PersistentVolumeClaim", "Service"), "v1"),
    **dict.fromkeys(("StatefulSet", "Deployment"), "apps/v1"),
    "Ingress": "networking.k8s.io/v1",
}
PUBLIC = ("publicUrl=https://swarm.example.org", "ingress.host=swarm.example.org", "ingress.tlsSecret=tls")
MORE = (*PUBLIC, "databaseSecret=database", "apiReplicas=2", "trustedProxies={10.0.0.0/8}", "service.type=LoadBalancer")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm; skip the test if there is none."""
    program = os.environ.get("HELM") or shutil.which("helm")
    if not program:
        pytest.skip("helm is not installed: put it on PATH, or name it in HELM")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def render(values: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rendered objects by kind and name."""
    options = [f"--set={value}" for value in ("image=registry.example.org/coordinator:1", *values)]
    run = helm("template", "swarm", CHART, f"--set-file=round={ROUND}", *options)
    assert run.returncode == 0, run.stderr
    objects = [each for each in yaml.safe_load_all(run.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def paths(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{above}.{name}")
        else:
            yield f"{above}.{name}"


def test_the_chart_has_the_version_of_the_project_and_uses_each_of_its_values() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["apiVersion"], chart["version"], chart["appVersion"]) == ("v2", version, version)
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    values = set(paths(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert set(re.findall(r"\.Values((?:\.\w+)+)", templates)) == values


def test_the_charts_settings_exist() -> None:
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    names = re.findall(r"--set=([\w.]+)=", helpers)
    samples = {"trusted_proxies": "[]", "url": "postgresql://swarm@database/swarm", "directory": "/data/round"}
    samples |= {"public_url": "http://swarm:8700", "seeder_public": "swarm:8701"}
    settings = [f"{name}={samples.get(name.split('.')[1], '0.0.0.0:1')}" for name in names]
    assert len(names) == 7
    assert load(ROUND, settings).round.public_url == "http://swarm:8700"
    assert re.findall(r"runAsUser: (\d+)", helpers) == re.findall(
        r"useradd --uid (\d+) \S+ \S+ /data swarm", (ROOT / "Dockerfile").read_text()
    )


@pytest.mark.parametrize("values", [(), PUBLIC, MORE], ids=["inside", "public", "database"])
def test_what_the_chart_renders_is_complete_and_refers_to_itself(values: tuple[str, ...]) -> None:
    objects = render(values)
    expected = {
        ("ConfigMap", "swarm"),
        ("PersistentVolumeClaim", "swarm"),
        ("Service", "swarm"),
        ("StatefulSet", "swarm"),
    }
    expected |= {("Ingress", "swarm")} if values else set()
    expected |= {("Deployment", "swarm-api"), ("Service", "swarm-api")} if values == MORE else set()
    assert set(objects) == expected
    assert all(each["apiVersion"] == VERSIONS[kind] for (kind, _), each in objects.items())
    assert objects["ConfigMap", "swarm"]["data"]["round.toml"].strip() == ROUND.read_text().strip()
    labels = []
    for (kind, _), each in objects.items():
        if kind not in ("StatefulSet", "Deployment"):
            continue
        template = each["spec"]["template"]
        labels.append(template["metadata"]["labels"])
        assert each["spec"]["selector"]["matchLabels"] == labels[-1]
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert {"persistentVolumeClaim": {"claimName": "swarm"}, "name": "data"} in spec["volumes"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == ({"api": 8700, "seeder": 8701} if kind == "StatefulSet" else {"api": 8700})
        assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "api"}
        settings = [word.removeprefix("--set=") for word in container["args"] if word.startswith("--set=")]
        settings = [word.replace("$(STORE_URL)", "postgresql://swarm@database/swarm") for word in settings]
        config = load(ROUND, settings)
        assert config.round.public_url == ("https://swarm.example.org" if values else "http://swarm:8700")
        assert bool(config.store.url) == (values == MORE)
        assert len(config.round.proxies) == (values == MORE)
    for (kind, _), each in objects.items():
        if kind == "Service":
            assert each["spec"]["selector"] in labels
    if values:
        ingress = objects["Ingress", "swarm"]["spec"]
        assert ingress["tls"] == [{"hosts": ["swarm.example.org"], "secretName": "tls"}]
        services = {path["path"]: path["backend"]["service"] for path in ingress["rules"][0]["http"]["paths"]}
        assert all(("Service", service["name"]) in objects for service in services.values())
        leading = {path for path, service in services.items() if service["name"] == "swarm"}
        assert leading == ({"/v1/plan", "/v1/learner"} if values == MORE else {"/"})


def test_helm_finds_no_mistake_in_the_chart_and_refuses_missing_values() -> None:
    lint = helm("lint", CHART, "--set=image=a", f"--set-file=round={ROUND}")
    assert lint.returncode == 0, lint.stdout
    assert "--set-file round=round.toml" in helm("template", "swarm", CHART, "--set=image=a").stderr
    alone = helm("template", "swarm", CHART, "--set=image=a", "--set=apiReplicas=1", f"--set-file=round={ROUND}")
    assert "databaseSecret" in alone.stderr
