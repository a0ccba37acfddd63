"""A snapshot as lines for people; the live view and `swarm-node status` say the same.

- Pure: a snapshot as JSON in, lines out. What is not known is said to be unknown, never shown as zero.
- Some of it is a coordinator's word: nothing in it steers a terminal.
"""

from collections.abc import Iterator
from typing import Any

from protocol.text.plain import counted, one_line, size_text

GB = 10**9


def of_status(told: dict[str, Any]) -> Iterator[str]:
    """Everything, one subject a line."""
    return map(one_line, _of_status(told))


def _of_status(told: dict[str, Any]) -> Iterator[str]:
    yield f"node      {told['name']}  {told['node_id']}"
    yield f"round     {told['coordinator']}  (agent {told['pid']}, up {ago(_since_s(told, told['started_ms']))})"
    yield f"doing     {doing(told)}"
    yield f"version   {version(told)}"
    yield f"speed     {speed(told)}"
    yield f"queue     {queue(told)}"
    yield f"credit    {credit(told)}"
    yield f"verdicts  {verdicts(told)}"
    yield f"traffic   {traffic(told)}"
    yield f"reach     {reach(told)}"
    yield f"machine   {machine(told)}"
    if told["limits"]:
        yield f"limits    {', '.join(f'{name} {value}' for name, value in told['limits'].items())}"


def of_stopped(said: str, last: dict[str, Any] | None, *, now_ms: int) -> Iterator[str]:
    """What there is to say where no agent runs."""
    return map(one_line, _of_stopped(said, last, now_ms))


def _of_stopped(said: str, last: dict[str, Any] | None, now_ms: int) -> Iterator[str]:
    yield said
    if last is None:
        yield "Nothing is noted of an earlier one, or it was killed. `swarm-node join` starts one."
        return
    code = f" [{last['code']}]" if last.get("code") else ""
    since = ago((now_ms - last["at_ms"]) / 1000)
    yield f"The last one ended {since} ago: {last.get('message') or last.get('said')}{code}"
    if last.get("hint"):
        yield str(last["hint"])


def doing(told: dict[str, Any]) -> str:
    """What it does, and why nothing where it does nothing."""
    if told["resting"]:
        return f"resting: {told['resting']}"
    if told["distrust"]:
        return f"stopped: {told['distrust']}"
    if told["trouble"]:
        return f"{told['phase']}, in trouble for {ago(_since_s(told, told['trouble_ms']))}: {told['trouble']}"
    if told["download"]:
        load = told["download"]
        share = load["bytes_done"] / load["bytes"] if load["bytes"] else 0.0
        rate = f"{load['bytes_per_s'] / 1e6:.1f} MB/s from {counted(load['peers'], 'peer')}"
        fetching = f"fetching version {load['version']}: {share:.0%} of {size_text(load['bytes'])}, {rate}"
        return f"{told['phase']}, {fetching}"
    if told["phase"] == "offline":
        return "waiting for the first version" if not told["newest_version"] else "loading"
    if not told["open_leases"] and told["no_work"]:
        return f"{told['phase']}: {told['no_work']}"
    return str(told["phase"])


def queue(told: dict[str, Any]) -> str:
    """What is under way here."""
    groups, unsent = told["open_leases"], told["unsent"]
    return f"{counted(groups, 'group')} in the engine, {counted(unsent, 'rollout')} not sent yet"


def version(told: dict[str, Any]) -> str:
    """Which version, how old, and whether there is a newer one."""
    if not told["version"] and told["resting"]:
        newest = f"; latest is {told['newest_version']}" if told["newest_version"] else ""
        return f"none loaded while paused{newest}"
    if not told["version"]:
        return "none loaded yet"
    age = f", {ago(told['version_age_s'])} old" if told["version_age_s"] is not None else ""
    newer = f"; latest is {told['newest_version']}" if told["newest_version"] > told["version"] else ""
    return f"{told['version']}{age}{newer}"


def speed(told: dict[str, Any]) -> str:
    """Tokens a second, and what samples."""
    rate = f"{told['tokens_per_s']:,.0f} tokens/s" if told["tokens_per_s"] else "not measured yet"
    return f"{rate}{', ' + told['engine'] if told['engine'] else ''}"


def credit(told: dict[str, Any]) -> str:
    """What is owed."""
    if told["earnings_ms"] is None:
        return f"{told['credit_micros']:,} micro-units in this run; pending and payable: not heard yet"
    return (
        f"{told['pending_micros'] or 0:,} pending, {told['payable_micros'] or 0:,} payable "
        f"({ago(_since_s(told, told['earnings_ms']))} ago); {told['credit_micros']:,} micro-units in this run"
    )


def verdicts(told: dict[str, Any]) -> str:
    """What became of rollouts."""
    rejected = ", ".join(f"{count} {code}" for code, count in told["rejected"].items())
    said = f"{told['accepted']:,} accepted, {rejected or 'none'} rejected"
    last = told["last_verdict"]
    if last is None:
        return f"{said}; none heard yet"
    code = f" {last['code']}" if last["code"] else ""
    return (
        f"{said}; last: {last['outcome']}{code} {ago(_since_s(told, last['at_ms']))} ago, lease {last['lease_id'][:8]}"
    )


def traffic(told: dict[str, Any]) -> str:
    """Bytes in and out."""
    moved = told["transfer"]
    fetched = moved["from_peers"] + moved["from_seeder"] + moved["from_http"]
    cap = f" of {told['upload_cap_bytes'] / GB:g} GB" if told["upload_cap_bytes"] else ""
    stop = f"; {told['no_upload']}" if told["no_upload"] else ""
    month = f"{size_text(told['uploaded_month_bytes'])}{cap} this month"
    return f"{size_text(fetched)} fetched, {size_text(moved['to_peers'])} passed on, {month}{stop}"


def reach(told: dict[str, Any]) -> str:
    """Whether others can connect, and what the router said."""
    return f"{told['reach']}; {told['mapping']}" if told["mapping"] else str(told["reach"])


def machine(told: dict[str, Any]) -> str:
    """Heat and power, as far as they are told."""
    found = []
    for card in told["cards"]:
        values = (
            ("{:.0f} °C", card["celsius"]),
            ("{:.0f} W", card["watts"]),
            ("{:.1f} GB used", card["used_bytes"] / GB if card["used_bytes"] is not None else None),
        )
        said = ", ".join(form.format(value) for form, value in values if value is not None)
        found.append(f"{card['name']}: {said or 'no readings'}")
    if not told["cards"]:
        found += [f"processor {told['celsius']:.0f} °C"] if told["celsius"] is not None else []
        found += [f"{told['watts']:.0f} W"] if told["watts"] is not None else []
    return "; ".join(found) or "temperature and power: not available"


def ago(seconds: float) -> str:
    """How long, in the two largest units that matter."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _since_s(told: dict[str, Any], moment_ms: int) -> float:
    return float(told["now_ms"] - moment_ms) / 1000
