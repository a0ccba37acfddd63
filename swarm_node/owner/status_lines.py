"""Text lines of an agent's snapshot, shared by the live view and `swarm-node status`.

- Pure: a snapshot as JSON in, lines out. Unknown values are shown as unknown, never as zero.
- Values that the coordinator supplied are stripped of terminal control characters.
"""

from collections.abc import Iterator
from typing import Any

from protocol.text.plain import counted, one_line, size_text

GB = 10**9


def of_status(told: dict[str, Any]) -> Iterator[str]:
    """Return the full status, one subject per line."""
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
    """Return the lines that `status` prints when no agent runs."""
    return map(one_line, _of_stopped(said, last, now_ms))


def _of_stopped(said: str, last: dict[str, Any] | None, now_ms: int) -> Iterator[str]:
    yield said
    if last is None:
        yield "No record of an earlier run (or it was killed). Start one with `swarm-node join`."
        return
    code = f" [{last['code']}]" if last.get("code") else ""
    since = ago((now_ms - last["at_ms"]) / 1000)
    yield f"The last agent ended {since} ago: {last.get('message') or last.get('said')}{code}"
    if last.get("hint"):
        yield str(last["hint"])


def doing(told: dict[str, Any]) -> str:
    """Return the current activity, or the reason why the node is not working."""
    if told["resting"]:
        return f"not working: {told['resting']}"
    if told["distrust"]:
        return f"stopped: {told['distrust']}"
    if told["trouble"]:
        return f"{told['phase']} with a problem for {ago(_since_s(told, told['trouble_ms']))}: {told['trouble']}"
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
    """Return the number of groups in the engine and of rollouts that are not sent yet."""
    groups, unsent = told["open_leases"], told["unsent"]
    return f"{counted(groups, 'group')} in the engine, {counted(unsent, 'rollout')} not sent yet"


def version(told: dict[str, Any]) -> str:
    """Return the loaded version, its age, and the latest version if it is newer."""
    if not told["version"] and told["resting"]:
        newest = f" (latest {told['newest_version']})" if told["newest_version"] else ""
        return f"none loaded while paused{newest}"
    if not told["version"]:
        return "none loaded yet"
    if told["newest_version"] > told["version"]:
        return f"{told['version']} (latest {told['newest_version']}{', downloading' if told['download'] else ''})"
    age = f", announced {ago(told['version_age_s'])} ago" if told["version_age_s"] is not None else ""
    return f"{told['version']} (latest{age})"


def speed(told: dict[str, Any]) -> str:
    """Return the tokens per second and the engine's name."""
    rate = f"{told['tokens_per_s']:,.0f} tokens/s" if told["tokens_per_s"] else "not measured yet"
    return f"{rate}{', ' + told['engine'] if told['engine'] else ''}"


def credit(told: dict[str, Any]) -> str:
    """Return the pending, payable and new credit in micro-units."""
    if told["earnings_ms"] is None:
        return f"{told['credit_micros']:,} micro-units in this run; pending and payable: not known yet"
    return (
        f"{told['pending_micros'] or 0:,} pending, {told['payable_micros'] or 0:,} payable "
        f"({ago(_since_s(told, told['earnings_ms']))} ago); {told['credit_micros']:,} micro-units in this run"
    )


def verdicts(told: dict[str, Any]) -> str:
    """Return the number of accepted and rejected rollouts and the last verdict."""
    rejected = ", ".join(f"{count} {code}" for code, count in told["rejected"].items())
    said = f"{told['accepted']:,} accepted, {rejected or 'none'} rejected"
    last = told["last_verdict"]
    if last is None:
        return f"{said}; no verdict received yet"
    code = f" {last['code']}" if last["code"] else ""
    return (
        f"{said}; last: {last['outcome']}{code} {ago(_since_s(told, last['at_ms']))} ago, lease {last['lease_id'][:8]}"
    )


def traffic(told: dict[str, Any]) -> str:
    """Return the downloaded and uploaded bytes."""
    moved = told["transfer"]
    fetched = moved["from_peers"] + moved["from_seeder"] + moved["from_http"]
    cap = f" of {told['upload_cap_bytes'] / GB:g} GB" if told["upload_cap_bytes"] else ""
    stop = f"; {told['no_upload']}" if told["no_upload"] else ""
    month = f"{size_text(told['uploaded_month_bytes'])}{cap} this month"
    return f"{size_text(fetched)} fetched, {size_text(moved['to_peers'])} uploaded to peers, {month}{stop}"


def reach(told: dict[str, Any]) -> str:
    """Return the state of incoming connections and of the router's port mapping."""
    return f"{told['reach']}; {told['mapping']}" if told["mapping"] else str(told["reach"])


def machine(told: dict[str, Any]) -> str:
    """Return the temperature and power of each GPU or of the CPU, where sensors report them."""
    found = []
    for card in told["cards"]:
        values = (
            ("{:.0f} °C", card["celsius"]),
            ("{:.0f} W", card["watts"]),
            ("{:.1f} GB used", card["used_bytes"] / GB if card["used_bytes"] is not None else None),
        )
        said = ", ".join(form.format(value) for form, value in values if value is not None)
        found.append(f"{card['name']}: {said or 'no sensor values'}")
    if not told["cards"]:
        found += [f"CPU {told['celsius']:.0f} °C"] if told["celsius"] is not None else []
        found += [f"{told['watts']:.0f} W"] if told["watts"] is not None else []
    return "; ".join(found) or "temperature/power: not available"


def ago(seconds: float) -> str:
    """Return a duration in its two largest units."""
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
