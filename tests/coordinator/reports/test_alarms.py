"""Alarms of the machine: a disk that fills up, and signed documents and certificates that expire."""

import time
from pathlib import Path

import pytest

from coordinator.config import load
from coordinator.reports import alarms
from tests.certificates import write_certificate
from tests.coordinator.served import serve

DAY_S = 86_400
GIB = 2**30


def codes(figures: dict[str, object]) -> set[str]:
    return {code for code, text in alarms.upkeep_alarms(figures, load(None, [])) if text}


@pytest.mark.parametrize(
    ("free", "size", "rises"),
    [(3 * GIB, 100 * GIB, True), (3 * GIB, 20 * GIB, False), (5 * GIB, 1000 * GIB, False), (0, 10 * GIB, True)],
)
def test_a_disk_is_low_by_bytes_and_by_share(free: int, size: int, rises: bool) -> None:
    found = codes({"disk": {"free_bytes": free, "size_bytes": size}, "expires_s": {}})
    assert ("disk_low" in found) == rises


@pytest.mark.parametrize(
    ("name", "days", "rises"),
    [
        ("root", 31, False),
        ("root", 29, True),
        ("root", -1, True),
        ("certificate", 15, False),
        ("certificate", 13, True),
    ],
)
def test_documents_are_renewed_in_time(name: str, days: int, rises: bool) -> None:
    disk = {"free_bytes": GIB * 90, "size_bytes": GIB * 100}
    found = codes({"disk": disk, "expires_s": {name: days * DAY_S}})
    assert (f"{name}_expires" in found) == rises


@pytest.mark.asyncio
async def test_the_operator_alone_sees_when_a_real_rounds_keys_and_certificate_expire(tmp_path: Path) -> None:
    write_certificate(tmp_path, "round")
    tls = [f"round.tls_certificate={tmp_path / 'tls.crt'}", f"round.tls_key={tmp_path / 'tls.key'}"]
    async with serve(tmp_path, "round.tls_listen=127.0.0.1:8443", *tls) as served:
        await served.publish()
        public = await (await served.client.get("/v1/status")).json()
        told = await (await served.client.get("/v1/operator/status", headers=served.operator)).json()
        metrics = await (await served.client.get("/metrics", headers=served.operator)).text()
        assert (await served.client.get("/metrics", headers={"Authorization": "Bearer wrong"})).status == 401
        plain = await (await served.client.get("/metrics")).text()
    left_s = told["upkeep"]["expires_s"]
    assert left_s.keys() == {"root", "targets", "snapshot", "certificate"}
    assert all(364 * DAY_S < left_s[name] <= 365 * DAY_S for name in ("root", "targets", "snapshot"))
    assert 0 < left_s["certificate"] < 3600
    assert "certificate_expires" in {alarm["code"] for alarm in told["alarms"]}
    assert "upkeep" not in public
    assert 'echo_swarm_expires_seconds{document="certificate"}' in metrics
    assert "echo_swarm_audit_backlog 0.0" in metrics
    assert "echo_swarm_audit_backlog 0.0" not in plain, "it would reveal which claims were drawn"
    assert "echo_swarm_process_open_fds" in plain


def test_a_damaged_or_missing_document_raises_nothing_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "2.root.json").write_text("{")
    config = load(None, [f"round.directory={tmp_path}", "round.tls_listen=127.0.0.1:8443"])
    assert alarms.upkeep(config, time.time_ns() // 1_000_000)["expires_s"] == {}
