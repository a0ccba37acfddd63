"""A round on one screen: whether the learner waits and why, fleet, versions, staleness, credit, incidents.

- Pure: from the JSON of `/v1/operator/status` to lines, which `screen` draws on a terminal or prints.
- Names and messages come from nodes: what could steer a terminal is replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from protocol.text.plain import counted, duration_text

Tone = Literal["good", "bad", "plain"]

NODES_SHOWN = 8
"""Of those at work or standing by; `swarm-coordinator nodes list` has them all."""

UNFINISHED_SHOWN_MIN = 0.01
"""Of a node's leases; fewer are no trouble, and would read 0 %."""

OLD_S = 15.0
"""Figures of this age say so."""

INCIDENTS_SHOWN = 5
"""The training page has more."""


@dataclass(frozen=True)
class OverviewPart:
    """Some lines under one title."""

    title: str
    lines: tuple[str, ...]
    tone: Tone = "plain"


def parts(told: Mapping[str, Any]) -> list[OverviewPart]:
    """The whole screen, from top to bottom."""
    found = [
        *shown_age(told),
        *_verdict(told),
        *_standby(told),
        OverviewPart("round", tuple(_round(told))),
        OverviewPart("fleet", tuple(_fleet(told))),
        OverviewPart("versions", tuple(_versions(told))),
        OverviewPart("staleness", tuple(_staleness(told))),
        OverviewPart("prompts", tuple(_prompts(told["selection"]))),
        OverviewPart("credit", tuple(_credit(told))),
        OverviewPart("audits", tuple(_audits(told))),
        OverviewPart("measured", tuple(evaluation(one) for one in told["evaluations"])),
        OverviewPart("incidents", tuple(_incident(one) for one in told["incidents"][:INCIDENTS_SHOWN])),
    ]
    return [OverviewPart(one.title, tuple(map(printable, one.lines)), one.tone) for one in found if one.lines]


def shown_age(told: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """That the figures are old, where they are."""
    if told.get("age_s", 0.0) >= OLD_S:
        yield OverviewPart(
            "figures", (f"These figures are {duration_text(told['age_s'])} old: the machine is busy.",), "bad"
        )


def _verdict(told: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """That nobody leads the round; else whether the learner waits, and what is wrong besides."""
    if told.get("stopped"):
        yield OverviewPart("round", (told["stopped"],), "bad")
        return
    learner = told["learner"]
    waits = learner["state"] in ("waits", "will wait", "stands")
    verdict = f"{learner['state'].upper() if waits else learner['state']}: {learner['why']}"
    yield OverviewPart("learner", (verdict,), "bad" if waits else "good")
    yield OverviewPart("alarm", tuple(line for line in [told["alarm"]] if line and line != learner["why"]), "bad")


def text(told: Mapping[str, Any]) -> str:
    """The screen for a pipe: a title before the first line of each part, no line broken."""
    return "\n".join(
        f"{'' if number else one.title:<10} {line}" for one in parts(told) for number, line in enumerate(one.lines)
    )


def printable(line: str) -> str:
    """The same without what could steer a terminal."""
    return "".join(sign if sign.isprintable() else "�" for sign in line)


def evaluation(row: Mapping[str, Any]) -> str:
    """An evaluation in a line."""
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


def _standby(told: Mapping[str, Any]) -> Iterator[OverviewPart]:
    """How far the standby copy is, if one follows."""
    if copy := told.get("standby"):
        where = f" at {copy['target']}" if copy.get("target") else ""
        lines = [f"the copy{where} is {duration_text(copy['behind_s'])} behind"]
        if not copy["keeps_up"]:
            lines.append("it is not waited for any more: what is published now may be missing in it")
        lines += [one for one in [copy.get("problem")] if one]
        yield OverviewPart("standby", tuple(lines), "plain" if copy["keeps_up"] and not copy.get("problem") else "bad")


def _round(told: Mapping[str, Any]) -> Iterator[str]:
    detail = f" ({told['detail']})" if told["detail"] else ""
    yield f"{told['phase']}: update {told['update']} of {told['max_updates']}{detail}"
    still = told.get("learner_outgoing_share_lately", 0.0)
    versions = f"still for versions {still:.0%} of its time lately, " if still else ""
    yield f"learner idle {told['learner_idle_share']:.0%} of the whole round, {versions}" + (
        f"at work on batch {told['batch']}" if told["batch"] > told["update"] else "no batch under way"
    )
    ages = {"last update": told.get("update_age_s"), "learner heard of": told.get("learner_silent_s")}
    since_s = told.get("age_s", 0.0)
    known = [f"{name} {duration_text(age + since_s)} ago" for name, age in ages.items() if age is not None]
    if known or told.get("programs"):
        yield ", ".join([*known, *(_program(name, one) for name, one in told.get("programs", {}).items())])


def _program(name: str, one: Mapping[str, Any]) -> str:
    """How a child of the coordinator fares."""
    if one["state"] != "runs":
        return f"{name} {one['state']} with code {one['code']}"
    return f"{name} runs" + (f" (started again {counted(one['restarts'], 'time')})" if one["restarts"] else "")


def _fleet(told: Mapping[str, Any]) -> Iterator[str]:
    holding = f", version {told['version']} on {told['nodes_up_to_date']} of them" if told["version"] else ""
    yield f"{told['nodes_alive']:,} of {counted(told['nodes'], 'node')} alive{holding}"
    for one in told["fleet"][:NODES_SHOWN]:
        part = "works" if one["works"] else "standby"
        yield f"{one['name']} {part}, {one['groups_per_s']:.3g} groups/s: {one['reason']}"
    if len(told["fleet"]) > NODES_SHOWN:
        yield f"and {len(told['fleet']) - NODES_SHOWN} more: `swarm-coordinator nodes list`"
    for one in told["unfinished_by"]:
        if one["skipped_share"] + one["expired_share"] < UNFINISHED_SHOWN_MIN:
            continue
        yield f"{one['name']} skipped {one['skipped_share']:.0%} of its leases, let {one['expired_share']:.0%} expire"


def _versions(told: Mapping[str, Any]) -> Iterator[str]:
    every = f"one every {counted(told['publish_every'], 'update')}"
    if not told["version"]:
        yield f"none is published yet; then {every}"
        return
    yield f"version {told['version']} of update {told['version_update']}, {every}"
    if last := told["broadcast"]:
        yield (
            f"T_bcast of version {last['version']}, from publication to the first token: median "
            f"{last['median_s']:.2f} s, p90 {last['p90_s']:.2f} s, max {last['max_s']:.2f} s, "
            f"on {last['reached']:,} of {counted(last['nodes'], 'node')}"
        )


def _staleness(told: Mapping[str, Any]) -> Iterator[str]:
    age = told["age"]
    bound = bound_in_force(told)
    yield f"trained on groups {age['mean']:.1f} updates old (p99 {age['p99']}, max {age['max']}; S = {bound})"
    yield f"wasted work: {told['in_vain_share']:.1%}{_counted(told['in_vain'])}"
    if alike := told["rollouts"].get("alike"):
        yield f"set aside {counted(alike, 'group')} whose rewards were all alike, for others in their place"
    if refused := sum(told["rejected"].values()):
        yield f"rejected {counted(refused, 'answer')}{_counted(told['rejected'])}"


def bound_in_force(told: Mapping[str, Any]) -> str:
    """S, and the operator's where it is below that."""
    now, most = told["staleness_bound"], told["staleness"]
    return f"{now}" if now == most else f"{now} of at most {most}"


def _prompts(told: Mapping[str, int]) -> Iterator[str]:
    """How difficult they are at the moment, and which were left out for that."""
    if told:
        yield (
            f"{told['prompts_seen']} prompts seen, lately always right {told['prompts_always_right']}, "
            f"always wrong {told['prompts_always_wrong']}"
        )
        yield (
            f"left out {told['always_right']} times as always right, {told['always_wrong']} as always wrong, "
            f"{told['passed_over']} for better ones; taken again {told['probed']} times"
        )


def _credit(told: Mapping[str, Any]) -> Iterator[str]:
    credit, left = told["credit"], told["budget_micros"]
    yield (
        f"earned {credit['posted_micros']:,}, in escrow {credit['pending_micros']:,}, "
        f"taken back {credit['voided_micros']:,} micro-units"
    )
    spent = credit["posted_micros"] + credit["pending_micros"]
    lasts = f", about {left * told['update'] // spent:,} more updates at the current cost" if spent else ""
    yield f"budget left {left:,} micro-units{lasts}"


def _audits(told: Mapping[str, Any]) -> Iterator[str]:
    audit = told["audit"]
    verdicts = ", ".join(f"{count} {finding}" for finding, count in audit["verdicts"].items()) or "no verdicts"
    waiting = told.get("backlog", audit["waiting"])  # who is not the operator knows of revealed epochs alone
    yield (
        f"audited {audit['share']:.1%} of the claims: {verdicts}; {waiting} wait for an auditor, "
        f"{audit['unsettled']} for their settlement"
        + (f"; held for a calibration: {', '.join(audit['held'])}" if audit.get("held") else "")
    )
    pace = told.get("audit_pace")
    if pace and pace["auditor_tokens_per_s"]:
        yield (
            f"an auditor checks {pace['auditor_tokens_per_s']:,.0f} tokens/s, "
            f"{pace['incoming_tokens_per_s']:,.0f} come in to be checked, {pace['waiting_tokens']:,} wait"
        )


def _incident(one: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(one["ms"] / 1000, UTC).strftime("%d %b %H:%M:%S")
    times = f" {one['count']} times" if one["count"] > 1 else ""
    return f"{when} UTC {one['name'] or one['node_id'][-8:]} {one['what']}{times}: {one['detail']}"


def _counted(by_name: Mapping[str, int]) -> str:
    """Counts by what they are of, the most frequent first."""
    told = ", ".join(f"{count} {why}" for why, count in sorted(by_name.items(), key=lambda one: (-one[1], one[0])))
    return f" ({told})" if told else ""
