"""The metrics for Prometheus."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from coordinator.reports import metrics
from tests.coordinator.served import Served, serve

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


async def scraped(served: Served) -> dict[tuple[str, str], float]:
    """Name and label values → value, as Prometheus would store it."""
    response = await served.client.get("/metrics")
    assert response.status == 200
    families = text_string_to_metric_families((await response.read()).decode())
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_the_figures_are_those_of_the_status(served: Served) -> None:
    await served.publish()
    key = await served.join()
    [lease] = await served.lease(key)
    await served.submit(key, served.answer(key, lease))
    found = await scraped(served)
    status = json.loads(await (await served.client.get("/v1/status")).read())
    assert found["echo_swarm_policy_version", ""] == status["version"] == 1
    assert found["echo_swarm_nodes_alive", ""] == 1
    assert found["echo_swarm_rollouts", "groups"] == status["rollouts"]["groups"] == 1
    assert found["echo_swarm_leases", "accepted"] == 1
    assert found["echo_swarm_budget", ""] == pytest.approx(status["budget_micros"] / 1e6)


async def test_audits_are_counted_by_verdict_as_well() -> None:
    [family] = [family for family in metrics.FAMILIES if family.name == "audits"]
    audit = {"share": 0.5, "waiting": 2, "verdicts": {"accept": 3, "reject": 1}, "held": 0, "unsettled": 1}
    samples = family.read({"audit": audit})
    assert (samples["waiting"], samples["accept"], samples["reject"]) == (2, 3, 1)


async def test_requests_are_counted_by_route_and_not_by_what_callers_invent(served: Served) -> None:
    for path in ("/healthz", "/nothing/here", "/nothing/there", f"/v1/chunks/00/{'0' * 64}"):
        await served.client.get(path)
    found = {key: value for key, value in (await scraped(served)).items() if key[0] == "echo_swarm_http_seconds_count"}
    assert found["echo_swarm_http_seconds_count", "GET,/healthz,200"] == 1
    assert found["echo_swarm_http_seconds_count", "GET,none,404"] == 2
    assert found["echo_swarm_http_seconds_count", "GET,/v1/chunks/{start}/{chunk},404"] == 1


async def test_a_round_that_has_not_begun_has_figures(served: Served) -> None:
    found = await scraped(served)
    assert found["echo_swarm_policy_version", ""] == 0
    assert ("echo_swarm_broadcast_median_seconds", "") not in found


def asked_for(name: str) -> set[str]:
    text = (ROOT / "installers" / "monitoring" / name).read_text()
    return set(re.findall(r"echo_swarm_\w+", text))


def exported() -> set[str]:
    """Names as Prometheus stores them. `prometheus_client` itself adds those of the process."""
    families = {
        f"echo_swarm_{family.name}{'_total' if family.kind == 'counter' else ''}" for family in metrics.FAMILIES
    }
    return families | {
        f"echo_swarm_process_{name}" for name in ("open_fds", "max_fds", "cpu_seconds_total", "resident_memory_bytes")
    }


async def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    of_requests = {f"echo_swarm_http_seconds_{part}" for part in ("count", "sum", "bucket")}
    for name in ("grafana.json", "alerts.yaml"):
        assert asked_for(name)
        assert asked_for(name) <= exported() | of_requests


async def test_the_dashboard_shows_every_metric() -> None:
    missing = exported() - asked_for("grafana.json")
    assert not missing, "installers/monitoring/grafana.json: add a target for each"


async def test_no_two_metrics_have_one_name() -> None:
    names = [family.name for family in metrics.FAMILIES]
    assert not {name for name in names if names.count(name) > 1}
