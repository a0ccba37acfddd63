"""A round on one screen: the learner's state and its cause, fleet, versions, staleness, credit, incidents.

- Pure: from the JSON of `/v1/operator/status` to lines, which `screen` draws on a terminal or prints.
- Names and messages come from nodes: control characters are replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from protocol.text.money import parse_unit
from protocol.text.plain import counted, duration_text

Tone = Literal["good", "bad", "plain"]

NODES_SHOWN = 8
"""The most nodes that are listed; `swarm-coordinator nodes list` lists all."""

UNFINISHED_SHOWN_MIN = 0.01
"""The least share of unfinished leases for which a node is listed; less is no problem and would read 0 %."""

OLD_S = 15.0
"""Figures of this age or older are marked as old."""

INCIDENTS_SHOWN = 5
"""The most incidents that are listed; the training page lists more."""


@dataclass(frozen=True)
class OverviewPart:
    """A title and the lines below it."""

    title: str
    lines: tuple[str, ...]
    tone: Tone = "plain"


def parts(told: Mapping[str, Any]) -> list[OverviewPart]:
    """Return all parts of the screen, from top to bottom."""
    shown = [
        *shown_age(told),
        *_verdict(told),
        *_standby(told),
        OverviewPart("round", tuple(_round(told))),
        OverviewPart("learning", tuple(_learning(told))),
        OverviewPart("fleet", tuple(_fleet(told))),
        OverviewPart("versions", tuple(_versions(told))),
        OverviewPart("staleness", tuple(_staleness(told))),
        OverviewPart("prompts", tuple(_prompts(told["selection"]))),
        OverviewPart("credit", tuple(_credit(told))),
        OverviewPart("audits", tuple(_audits(told))),
        OverviewPart("measured", tuple(evaluation(evaluation_row) for evaluation_row in told["evaluations"])),
        OverviewPart("incidents", tuple(_incident(incident) for incident in told["incidents"][:INCIDENTS_SHOWN])),
    ]
    return [OverviewPart(part.title, tuple(map(printable, part.lines)), part.tone) for part in shown if part.lines]


def shown_age(told: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """Yield the age of the figures, if they are old."""
    if told.get("age_s", 0.0) >= OLD_S:
        yield OverviewPart(
            "figures", (f"These figures are {duration_text(told['age_s'])} old: the machine is busy.",), "bad"
        )


def _verdict(status: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """Yield the learner's state and the alarm; of a stopped round, that it is stopped, and how its learner ended."""
    learner = status["learner"]
    if status.get("stopped"):
        yield OverviewPart("state", (status["stopped"],), "bad")
        if learner["state"] == "stands":
            yield OverviewPart("learner", (learner["why"],), "bad")
        return
    waits = learner["state"] in ("waits", "will wait", "stands")
    verdict = f"{learner['state'].upper() if waits else learner['state']}: {learner['why']}"
    yield OverviewPart("learner", (verdict,), "bad" if waits else "good")
    texts = dict.fromkeys([status["alarm"], *(alarm["text"] for alarm in status["alarms"])])
    yield OverviewPart("alarm", tuple(text for text in texts if text and text != learner["why"]), "bad")


def text(told: Mapping[str, Any]) -> str:
    """Return the screen as text for a pipe: a title before the first line of each part, and no line wrapped."""
    return "\n".join(
        f"{'' if number else part.title:<10} {line}" for part in parts(told) for number, line in enumerate(part.lines)
    )


def printable(line: str) -> str:
    """Return `line` with its control characters replaced."""
    return "".join(sign if sign.isprintable() else "�" for sign in line)


def evaluation(row: Mapping[str, Any]) -> str:
    """Return an evaluation as one line."""
    about = f"version {row['version']}, update {row['update']}, {row['split']}"
    result = row["result"]
    if result is None:
        return f"{about}: {row['state']}, {row['answered']} of {row['problems']} problems answered"
    low, high = result["interval"]
    passed = ", ".join(f"pass@{j} {share:.3f}" for j, share in result["passed"].items())
    state = "" if row["state"] == "done" else f" ({row['state']}: {result['problems']} of {row['problems']} problems)"
    return (
        f"{about}: avg@{result['samples']} {result['average']:.3f} [{low:.3f}, {high:.3f}] "
        f"on {result['problems']} problems, {passed}{state}"
    )


def suite_run(row: Mapping[str, Any]) -> list[str]:
    """Return an imported run of a suite as one line for each metric."""
    about = f"run {row['number']}, {row['suite']} {row['release']}".rstrip() + f", version {row['version']}"
    return [f"{about}: {printable(suite_metric(metric))}" for metric in row["results"]]


def suite_metric(metric: Mapping[str, Any]) -> str:
    """Return a metric as text: its task, name, value, standard error and number of samples."""
    samples = "" if metric["samples"] is None else f" on {counted(metric['samples'], 'sample')}"
    return f"{metric['task']}, {metric['metric']}: {value_text(metric)}{samples}"


def value_text(metric: Mapping[str, Any]) -> str:
    """Return the value of a metric, with its standard error if that is known."""
    error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.2g}"
    return f"{metric['value']:.4g}{error}"


def _standby(status: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """Yield the lag of the standby copy, if there is one."""
    if copy := status.get("standby"):
        where = f" at {copy['target']}" if copy.get("target") else ""
        lines = [f"the copy{where} is {duration_text(copy['behind_s'])} behind"]
        if not copy["keeps_up"]:
            lines.append("the round no longer waits for the copy: new versions may be missing in it")
        lines += [problem for problem in [copy.get("problem")] if problem]
        yield OverviewPart("standby", tuple(lines), "plain" if copy["keeps_up"] and not copy.get("problem") else "bad")


def _round(status: Mapping[str, Any]) -> Iterator[str]:
    detail = f" ({status['detail']})" if status["detail"] else ""
    reached = f"update {status['update']} of {status['max_updates']}"
    if status.get("external"):  # nothing is trained here, and only `finish` ends the round
        reached = f"update {status['version_update']} of the trainer"
    yield f"{status['phase']}: {reached}{detail}"
    if not status.get("external"):
        yield ", ".join([*_learner_times(status), _batch(status)])
    ages = {"last update": status.get("update_age_s"), "last learner request": status.get("learner_silent_s")}
    since_s = status.get("age_s", 0.0)
    known = [f"{name} {duration_text(age + since_s)} ago" for name, age in ages.items() if age is not None]
    if known or status.get("programs"):
        yield ", ".join([*known, *(_program(name, life) for name, life in status.get("programs", {}).items())])


def _learner_times(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the learner's time went into; nothing before the first batch."""
    if status["update"] or status["learner_idle_share"]:
        yield f"the learner waited {status['learner_idle_share']:.0%} of the whole round"
    if still := status.get("learner_outgoing_share_lately", 0.0):
        yield f"saving and publishing {still:.0%} of its time lately"


def _batch(status: Mapping[str, Any]) -> str:
    """Return the batch under way; the one that is formed after the last update is never trained on."""
    is_last = status["update"] >= status["max_updates"]
    if status["batch"] <= status["update"] or status["finished"] or is_last:
        return "no batch under way"
    return f"at work on batch {status['batch']}"


def _learning(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the last updates taught, and their pace; nothing before the first update."""
    found = status.get("learned") or {}

    def words(*names: str) -> str:
        return ", ".join(_LEARNED[name].format(found[name]) for name in names if name in found)

    if taught := words("reward", "signal", "entropy"):
        yield f"lately: {taught}"
    if answers := "; ".join(filter(None, (words("length", "cut"), words("dropped", "kl")))):
        yield answers
    if empty := status.get("updates_empty_lately"):
        yield f"{empty} of the last 32 updates had a step without a gradient: no sample taught anything"
    if takes_s := status.get("update_interval_s"):
        pace = f"an update takes {duration_text(takes_s)}"
        if "train_s" in found and "tokens_per_s" in found:
            pace += f", {duration_text(found['train_s'])} of it training at {found['tokens_per_s']:,.0f} tokens/s"
        yield pace + (f"; about {duration_text(status['left_s'])} left" if status.get("left_s") else "")


_LEARNED = {
    "reward": "reward {:.3f}", "signal": "rewards differ in {:.0%} of the groups", "entropy": "entropy {:.3f} nats",
    "length": "answers of {:.0f} tokens", "cut": "{:.1%} cut",
    "dropped": "{:.1%} of the tokens dropped", "kl": "KL from the samplers {:.2g}",
}  # fmt: skip
"""The figures of `coordinator.reports.learned` in words."""


def _program(name: str, life: Mapping[str, Any]) -> str:
    """Return the state of a child process of the coordinator."""
    if life["state"] != "runs":
        return f"{name} {life['state']} with code {life['code']}"
    return f"{name} runs" + (f" (started again {counted(life['restarts'], 'time')})" if life["restarts"] else "")


def _fleet(status: Mapping[str, Any]) -> Iterator[str]:
    holding = f", version {status['version']} on {status['nodes_up_to_date']} of them" if status["version"] else ""
    paused = f", {status['nodes_paused']:,} paused by the operator" if status.get("nodes_paused") else ""
    yield f"{status['nodes_alive']:,} of {counted(status['nodes'], 'node')} alive{holding}{paused}"
    for node in status["fleet"][:NODES_SHOWN]:
        part = "works" if node["works"] else "standby"
        yield f"{node['name']} {part}, {node['groups_per_s']:.3g} groups/s: {node['reason']}"
    if len(status["fleet"]) > NODES_SHOWN:
        yield f"and {len(status['fleet']) - NODES_SHOWN} more: `swarm-coordinator nodes list`"
    for node in status["unfinished_by"]:
        if node["skipped_share"] + node["expired_share"] < UNFINISHED_SHOWN_MIN:
            continue
        shares = f"skipped {node['skipped_share']:.0%} of its leases, let {node['expired_share']:.0%} expire"
        yield f"{node['name']} {shares}"


def _versions(status: Mapping[str, Any]) -> Iterator[str]:
    every = f"one every {counted(status['publish_every'], 'update')}"
    if status.get("external"):
        every = "one for each publication of the trainer"
    if not status["version"]:
        yield f"none is published yet; then {every}"
        return
    yield f"version {status['version']} of update {status['version_update']}, {every}"
    until = "its load" if status.get("external") else "the first token"
    if last := status["broadcast"]:
        yield (
            f"T_bcast of version {last['version']}, from publication to {until}: median "
            f"{last['median_s']:.2f} s, p90 {last['p90_s']:.2f} s, max {last['max_s']:.2f} s, "
            f"on {last['reached']:,} of {counted(last['nodes'], 'node')}"
        )


def _staleness(status: Mapping[str, Any]) -> Iterator[str]:
    age = status["age"]
    bound = bound_in_force(status)
    if status["update"]:
        yield f"trained on groups {age['mean']:.1f} updates old (p99 {age['p99']}, max {age['max']}; S = {bound})"
    else:
        yield f"samples are at most {bound} updates old (S)"
    yield f"wasted work: {status['in_vain_share']:.1%}{_counted(status['in_vain'])}"
    if alike := status["rollouts"].get("alike"):
        yield f"replaced {counted(alike, 'group')} whose rewards were all alike by other groups"
    if refused := sum(status["rejected"].values()):
        yield f"rejected {counted(refused, 'answer')}{_counted(status['rejected'])}"


def bound_in_force(status: Mapping[str, Any]) -> str:
    """Return S, and the operator's bound if S is lower."""
    now, most = status["staleness_bound"], status["staleness"]
    return f"{now}" if now == most else f"{now} of at most {most}"


def _prompts(selection: Mapping[str, int]) -> Iterator[str]:
    """Yield the difficulty of the prompts lately, and the numbers that were left out because of it."""
    if selection:
        yield (
            f"{selection['prompts_seen']} prompts seen, lately always right {selection['prompts_always_right']}, "
            f"always wrong {selection['prompts_always_wrong']}"
        )
        yield (
            f"left out {selection['always_right']} times as always right, {selection['always_wrong']} as always wrong, "
            f"{selection['passed_over']} for better ones; sampled again {selection['probed']} times"
        )


def _credit(status: Mapping[str, Any]) -> Iterator[str]:
    credit, left, unit = status["credit"], status["budget_micros"], parse_unit(status.get("unit"))
    yield (
        f"earned {unit.short_figure(credit['posted_micros'])}, "
        f"in escrow {unit.short_figure(credit['pending_micros'])}, taken back {unit.amount(credit['voided_micros'])}"
    )
    spent = credit["posted_micros"] + credit["pending_micros"]
    lasts = ""
    if spent and status["update"] and not status["finished"]:
        lasts = f", about {left * status['update'] // spent:,} more updates at the current cost"
    yield f"budget left {unit.amount(left)}{lasts}"


def _audits(status: Mapping[str, Any]) -> Iterator[str]:
    audit = status["audit"]
    verdicts = ", ".join(f"{count} {finding}" for finding, count in audit["verdicts"].items()) or "no verdicts"
    waiting = status.get("backlog", audit["waiting"])  # the public status counts revealed epochs only
    yield (
        f"audited {audit['share']:.1%} of the claims: {verdicts}; {waiting} wait for an auditor, "
        f"{audit['unsettled']} for their settlement"
        + (f"; held for a calibration: {', '.join(audit['held'])}" if audit.get("held") else "")
    )
    pace = status.get("audit_pace")
    if pace and pace["auditor_tokens_per_s"]:
        yield (
            f"an auditor checks {pace['auditor_tokens_per_s']:,.0f} tokens/s, "
            f"{pace['incoming_tokens_per_s']:,.0f} tokens/s arrive, {pace['waiting_tokens']:,} tokens wait"
        )


def _incident(incident: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(incident["ms"] / 1000, UTC).strftime("%d %b %H:%M:%S")
    times = f" {incident['count']} times" if incident["count"] > 1 else ""
    return f"{when} UTC {incident['name'] or incident['node_id'][-8:]} {incident['what']}{times}: {incident['detail']}"


def _counted(by_name: Mapping[str, int]) -> str:
    """Return counts with their names, the most frequent first."""
    counts = ", ".join(f"{count} {why}" for why, count in sorted(by_name.items(), key=lambda item: (-item[1], item[0])))
    return f" ({counts})" if counts else ""
