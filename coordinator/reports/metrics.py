"""The round's metrics for Prometheus, read from the public status.

- The table below lists every metric: name, kind, help, and its place in the status.
- Counters are the store's own sums, so a restart of the coordinator does not reset them.
- Labels come from closed sets (states, codes of the protocol, reasons), never from values that clients choose.
- Amounts are in the operator's unit, times in seconds, sizes in bytes, as Prometheus expects.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.rules.selection import Reason

Status = Mapping[str, Any]
Samples = Mapping[str, float]
"""Value of the one label → value; a family without a label has one sample under the empty name."""

MICROS = 1_000_000


@dataclass(frozen=True)
class MetricFamily:
    """A metric: its name, kind and help, and the function that reads its samples from the status."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[Status], Samples]
    label: str = ""


def _number_at(*path: str, scale: float = 1.0) -> Callable[[Status], Samples]:
    """Return a reader of the number at `path` in the status, if there is one."""

    def read(status: Status) -> Samples:
        value: Any = status
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return {} if value is None else {"": float(value) * scale}

    return read


def _numbers_at(*path: str) -> Callable[[Status], Samples]:
    """Return a reader of all numbers of the table at `path` in the status, by their names."""

    def read(status: Status) -> Samples:
        table: Any = status
        for key in path:
            table = table.get(key) or {}
        return {name: float(value) for name, value in table.items() if isinstance(value, int | float)}

    return read


def _programs(read: Callable[[Mapping[str, Any]], float]) -> Callable[[Status], Samples]:
    """Return a reader of one figure of each child process of the coordinator."""
    return lambda status: {name: float(read(child)) for name, child in status.get("programs", {}).items()}


def _fleet(status: Status) -> Samples:
    working = sum(1 for node in status.get("fleet") or () if node["works"])
    return {"working": working, "standby": len(status.get("fleet") or ()) - working}


def _prompts(status: Status) -> Samples:
    counters = _numbers_at("selection")(status)
    return {name.removeprefix("prompts_"): value for name, value in counters.items() if name.startswith("prompts_")}


def _audits(status: Status) -> Samples:
    return {**_numbers_at("audit")(status), **_numbers_at("audit", "verdicts")(status)}


def _credit(unit: str, scale: float = 1.0) -> Callable[[Status], Samples]:
    """Return a reader of the claims' micro-units or tokens, by the state of the claim."""

    def read(status: Status) -> Samples:
        found = _numbers_at("credit")(status)
        return {name.removesuffix(unit): value * scale for name, value in found.items() if name.endswith(unit)}

    return read


def _alarms(status: Status) -> Samples:
    return {alarm["code"]: 1.0 for alarm in status.get("alarms", ())}


def _left_out(status: Status) -> Samples:
    counters = _numbers_at("selection")(status)
    return {name: counters[name] for name in get_args(Reason) if name in counters}


FAMILIES = (
    MetricFamily("learner_update", "gauge", "Last update that the learner reported.", _number_at("update")),
    MetricFamily(
        "learner_idle_seconds", "counter", "Time the learner waited for a batch.", _number_at("learner_idle_s")
    ),
    MetricFamily("learner_busy_seconds", "counter", "Time the learner worked.", _number_at("learner_busy_s")),
    MetricFamily(
        "learner_idle_share",
        "gauge",
        "Share of time the learner waited during its last updates.",
        _number_at("learner_idle_share_lately"),
    ),
    MetricFamily(
        "learner_wait_seconds",
        "gauge",
        "Seconds the learner has waited for the current batch.",
        _number_at("learner_waits_s"),
    ),
    MetricFamily(
        "learner_silent_seconds", "gauge", "Seconds since the learner last reported.", _number_at("learner_silent_s")
    ),
    MetricFamily(
        "update_age_seconds", "gauge", "Seconds since the last update was reported.", _number_at("update_age_s")
    ),
    MetricFamily(
        "program_up",
        "gauge",
        "1 while a child of the coordinator runs.",
        _programs(lambda child: child["state"] == "runs"),
        "program",
    ),
    MetricFamily(
        "program_restarts",
        "gauge",
        "Restarts of the child since the launch.",
        _programs(lambda child: child["restarts"]),
        "program",
    ),
    MetricFamily(
        "figures_age_seconds", "gauge", "Seconds since the figures of the status were read.", _number_at("age_s")
    ),
    MetricFamily(
        "updates_skipped",
        "gauge",
        "Updates with a step whose gradient was not finite, among the last 32.",
        _number_at("updates_skipped_lately"),
    ),
    MetricFamily(
        "updates_empty",
        "gauge",
        "Updates with a step that no sample taught anything, among the last 32.",
        _number_at("updates_empty_lately"),
    ),
    MetricFamily(
        "masked_ratio",
        "gauge",
        "Share of the last 8 updates' tokens that the correction dropped.",
        _number_at("masked_share_lately"),
    ),
    MetricFamily("policy_version", "gauge", "Newest published version.", _number_at("version")),
    MetricFamily(
        "policy_version_update", "gauge", "Update at which the newest version was made.", _number_at("version_update")
    ),
    MetricFamily(
        "broadcast_median_seconds",
        "gauge",
        "Seconds from publication to first token, median node.",
        _number_at("broadcast", "median_s"),
    ),
    MetricFamily(
        "broadcast_max_seconds",
        "gauge",
        "Seconds from publication to first token, last node.",
        _number_at("broadcast", "max_s"),
    ),
    MetricFamily(
        "broadcast_nodes_reached",
        "gauge",
        "Nodes that sample with the version of the last broadcast.",
        _number_at("broadcast", "reached"),
    ),
    MetricFamily(
        "staleness_bound",
        "gauge",
        "The staleness bound S in force for new leases, in updates.",
        _number_at("staleness_bound"),
    ),
    MetricFamily(
        "trained_age_mean", "gauge", "Updates between sampling and training, mean.", _number_at("age", "mean")
    ),
    MetricFamily(
        "trained_age_p99", "gauge", "Updates between sampling and training, 99th percentile.", _number_at("age", "p99")
    ),
    MetricFamily(
        "trained_age_max", "gauge", "Updates between sampling and training, oldest group.", _number_at("age", "max")
    ),
    MetricFamily(
        "length_bias",
        "gauge",
        "Mean time of work on late groups over that on trained groups.",
        _number_at("length_bias"),
    ),
    MetricFamily(
        "groups_in_vain", "counter", "Groups that were not trained on (wasted work).", _numbers_at("in_vain"), "reason"
    ),
    MetricFamily(
        "groups_in_vain_share",
        "gauge",
        "Share of finished groups that were not trained on.",
        _number_at("in_vain_share"),
    ),
    MetricFamily(
        "kept_for_audits_bytes",
        "gauge",
        "Size of the versions that are kept for audits alone.",
        _number_at("kept_for_audits", "size_bytes"),
    ),
    MetricFamily(
        "standby_behind_seconds", "gauge", "Seconds that the standby copy is behind.", _number_at("standby", "behind_s")
    ),
    MetricFamily(
        "alarm", "gauge", "1 while `status` names a cause and a setting.", lambda s: {"": float(bool(s["alarm"]))}
    ),
    MetricFamily(
        "alarms", "gauge", "1 for each alarm that stands; those of the operator need the token.", _alarms, "code"
    ),
    MetricFamily("reward_mean", "gauge", "Mean reward of the last 8 updates.", _number_at("learned", "reward")),
    MetricFamily(
        "learned",
        "gauge",
        "Means of the last 8 updates: reward, entropy in nats, tokens of an answer, seconds, and shares.",
        _numbers_at("learned"),
        "figure",
    ),
    MetricFamily(
        "update_interval_seconds",
        "gauge",
        "Time from one update to the next, mean without pauses.",
        _number_at("update_interval_s"),
    ),
    MetricFamily("left_seconds", "gauge", "Time left at the pace of the last updates.", _number_at("left_s")),
    MetricFamily(
        "credit",
        "gauge",
        "Credit of all claims by state, in the operator's unit.",
        _credit("_micros", 1 / MICROS),
        "state",
    ),
    MetricFamily("tokens", "gauge", "Tokens of all claims by state.", _credit("_tokens"), "state"),
    MetricFamily(
        "audit_backlog", "gauge", "Claims that wait for an auditor; needs the operator's token.", _number_at("backlog")
    ),
    MetricFamily(
        "audit_backlog_max", "gauge", "audit.backlog_max: no work is offered from here on.", _number_at("backlog_max")
    ),
    MetricFamily(
        "disk_free_bytes", "gauge", "Free disk space of the round's folder.", _number_at("upkeep", "disk", "free_bytes")
    ),
    MetricFamily(
        "disk_size_bytes",
        "gauge",
        "Size of the disk of the round's folder.",
        _number_at("upkeep", "disk", "size_bytes"),
    ),
    MetricFamily(
        "expires_seconds",
        "gauge",
        "Seconds until a signed document or the certificate expires.",
        _numbers_at("upkeep", "expires_s"),
        "document",
    ),
    MetricFamily("prompts", "gauge", "Prompts by the last outcomes of their groups.", _prompts, "outcome"),
    MetricFamily("prompts_left_out", "counter", "Times that the selection skipped a prompt.", _left_out, "reason"),
    MetricFamily(
        "prompts_probed", "counter", "Times that a skipped prompt was sampled again.", _number_at("selection", "probed")
    ),
    MetricFamily("rollouts", "gauge", "Accepted groups by state.", _numbers_at("rollouts"), "state"),
    MetricFamily("rollouts_rejected", "counter", "Refused rollouts.", _numbers_at("rejected"), "code"),
    MetricFamily("leases", "gauge", "Leases by state.", _numbers_at("leases"), "state"),
    MetricFamily("audits", "gauge", "Audits by state and verdict.", _audits, "state"),
    MetricFamily(
        "budget", "gauge", "Budget left, in the operator's unit.", _number_at("budget_micros", scale=1 / MICROS)
    ),
    MetricFamily("nodes_registered", "gauge", "Nodes that ever registered.", _number_at("nodes")),
    MetricFamily("nodes_alive", "gauge", "Nodes that contacted the coordinator lately.", _number_at("nodes_alive")),
    MetricFamily(
        "nodes_up_to_date", "gauge", "Alive nodes that hold the newest version.", _number_at("nodes_up_to_date")
    ),
    MetricFamily("fleet_nodes", "gauge", "Working nodes and nodes on standby.", _fleet, "part"),
    MetricFamily("finished", "gauge", "1 when the round has all its updates.", lambda s: {"": float(s["finished"])}),
)


class _Round(Collector):
    """A Prometheus collector over one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        for family in FAMILIES:
            kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
            metric = kind(f"echo_swarm_{family.name}", family.help, labels=[family.label] if family.label else [])
            for label, value in sorted(family.read(self._status).items()):
                metric.add_metric([label] if family.label else [], value)
            yield metric


def exposition(status: Status) -> bytes:
    """Return the page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Round(status))
    return generate_latest(registry)
