"""Text lines of an agent's snapshot, shared by the live view and `swarm-node status`.

- Pure: a snapshot as JSON in, lines out. Unknown values are shown as unknown, never as zero.
- Values that the coordinator supplied are stripped of terminal control characters.
"""

from collections.abc import Iterator
from typing import Any

from protocol.limits import GB
from protocol.text.money import EarningPace, Unit, next_payout, pace_text, parse_unit
from protocol.text.plain import counted, one_line, size_text
from swarm_node.versions.progress import progress_text


def of_status(state: dict[str, Any]) -> Iterator[str]:
    """Return the full status, one subject per line."""
    return map(one_line, _of_status(state))


def _of_status(state: dict[str, Any]) -> Iterator[str]:
    yield f"node      {state['name']}  {state['node_id']}"
    agent = f"agent {state['pid']}, up {ago(_since_s(state, state['started_ms']))}"
    several = numbered_rounds(state)
    yield f"round     {f'{len(several)} rounds' if several else state['coordinator']}  ({agent})"
    for label, line in several:
        yield f"{label:<9} {line}"
    if several:
        yield f"shown     {shown_round(state)}"
    yield f"doing     {doing(state)}"
    yield f"version   {version(state)}"
    yield f"speed     {speed(state)}"
    yield f"queue     {queue(state)}"
    yield f"credit    {credit(state)}"
    yield f"rate      {rate(state)}"
    yield f"payouts   {payouts(state)}"
    yield f"verdicts  {verdicts(state)}"
    yield f"traffic   {traffic(state)}"
    yield f"reach     {reach(state)}"
    yield f"machine   {machine(state)}"
    for label, line in cards(state):
        yield f"{label:<9} {line}"
    if state["limits"]:
        yield f"limits    {', '.join(_limits(state['limits']))}"


def _limits(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name != "cards":
            yield f"{name} {value}"
    for number, own in values.get("cards", {}).items():
        yield from (f"card {number} {name} {value}" for name, value in own.items())


def of_stopped(said: str, last: dict[str, Any] | None, *, now_ms: int) -> Iterator[str]:
    """Return the lines that `status` prints when no agent runs."""
    return map(one_line, _of_stopped(said, last, now_ms))


def _of_stopped(said: str, last: dict[str, Any] | None, now_ms: int) -> Iterator[str]:
    yield said
    if last is None:
        yield "No earlier run is recorded: none was started here, or it was killed. `swarm-node` names the next step."
        yield "An agent that was started with --home is found with `swarm-node status --home FOLDER`, or by SWARM_HOME."
        return
    code = f" [{last['code']}]" if last.get("code") else ""
    since = ago((now_ms - last["at_ms"]) / 1000)
    yield f"The last agent ended {since} ago: {last.get('message') or last.get('said')}{code}"
    if last.get("hint"):
        yield str(last["hint"])


def doing(state: dict[str, Any]) -> str:
    """Return the current activity, or the reason why the node is not working."""
    if state["resting"]:
        return f"not working: {state['resting']}"
    if state["distrust"]:
        return f"stopped: {state['distrust']}"
    if state["trouble"]:
        return f"{state['phase']} with a problem for {ago(_since_s(state, state['trouble_ms']))}: {state['trouble']}"
    if state["download"]:
        load = progress_text(state["download"])
        return load if state["phase"] in ("idle", "offline") else f"{state['phase']}, {load}"
    if state["phase"] == "offline":
        return "waiting for the first version" if not state["newest_version"] else "loading"
    if not state["open_leases"] and state["no_work"]:
        return f"{state['phase']}: {state['no_work']}"
    return str(state["phase"])


def is_working(state: dict[str, Any]) -> bool:
    """Return True if the node samples or uploads, and nothing needs the owner's attention."""
    return state["phase"] not in ("idle", "offline") and not (state["resting"] or state["distrust"] or state["trouble"])


def rounds(state: dict[str, Any]) -> list[str]:
    """Return a line for each round of an agent that takes part in several."""
    return [_round(row) for row in state.get("rounds", ())]


def numbered_rounds(state: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a label and a line for each round of an agent that takes part in several."""
    return [(f"round {number}", line) for number, line in enumerate(rounds(state), 1)]


def shown_round(state: dict[str, Any]) -> str:
    """Say which of several rounds all other rows are of."""
    return f"the rows below are those of {state['coordinator']}"


def _round(row: dict[str, Any]) -> str:
    """Return what the agent does in one of its rounds, and its credit there."""
    if row["error"]:
        return f"{row['coordinator']}: left: {row['error']}"
    if "phase" not in row:
        return f"{row['coordinator']}: starting"
    why = row["distrust"] or row["trouble"] or row["no_work"]
    if row["ended"]:
        doing = "left by you until the agent starts again" if row["by_owner"] else "the round is finished"
    elif row["resting"]:
        doing = f"not working: {row['resting']}"
    elif row["open_leases"]:
        doing = counted(row["open_leases"], "group")
    else:
        doing = f"waiting{f': {why}' if why else ''}"
    unit = parse_unit(row["unit"])
    earned = f"{row['accepted']:,} accepted, {unit.amount(row['credit_micros'])} in this run"
    return f"{row['coordinator']}: {doing}; {earned}{'' if row['ended'] else _pay(row, unit)}"


def _pay(row: dict[str, Any], unit: Unit) -> str:
    """Return what a round pays for tokens and, if this machine's speed there is known, for an hour of work."""
    if row.get("price_micros_per_mtok") is None:  # of an agent of an earlier release
        return ""
    pays = f"; pays {unit.price(row['price_micros_per_mtok'])}"
    return pays if row["hour_micros"] is None else f"{pays}, {unit.amount(row['hour_micros'])} per hour of work"


def queue(state: dict[str, Any]) -> str:
    """Return the number of groups in the engine and of rollouts that are not sent yet."""
    groups, unsent = state["open_leases"], state["unsent"]
    return f"{counted(groups, 'group')} in the engine, {counted(unsent, 'rollout')} not sent yet"


def version(state: dict[str, Any]) -> str:
    """Return the loaded version, its age, and the latest version if it is newer."""
    if not state["version"]:
        newest = f" (latest {state['newest_version']})" if state["newest_version"] else ""
        return f"none loaded {'while paused' if state['resting'] else 'yet'}{newest}"
    if state["newest_version"] > state["version"]:
        return f"{state['version']} (latest {state['newest_version']}{', downloading' if state['download'] else ''})"
    age = f", announced {ago(state['version_age_s'])} ago" if state["version_age_s"] is not None else ""
    return f"{state['version']} (latest{age})"


def speed(state: dict[str, Any]) -> str:
    """Return the tokens per second and the engine's name."""
    rate = f"{state['tokens_per_s']:,.0f} tokens/s" if state["tokens_per_s"] else "not measured yet"
    return f"{rate}{', ' + state['engine'] if state['engine'] else ''}"


def credit(state: dict[str, Any]) -> str:
    """Return the pending, payable and new credit in the round's unit."""
    unit = parse_unit(state.get("unit"))
    run = f"{unit.amount(state['credit_micros'])} in this run"
    if state["earnings_ms"] is None:
        return f"{run}; pending and payable: not known yet"
    parts = {"pending": state["pending_micros"] or 0, "payable": state["payable_micros"] or 0}
    if state.get("today_micros") is not None:
        parts["today"] = state["today_micros"]
    reported = ", ".join(f"{unit.amount(micros)} {name}" for name, micros in parts.items())
    return f"{run}; reported {ago(_since_s(state, state['earnings_ms']))} ago: {reported}"


def rate(state: dict[str, Any]) -> str:
    """Return this node's earnings per hour and per day, with the trend."""
    told = state.get("rates")
    pace = EarningPace.parse(told["rate"]) if told else None
    if pace is None:
        return "not known yet"
    if pace.earning_s is None and state["credit_micros"] > 0:
        return "not known yet; the credit of this run is counted within two minutes"
    return pace_text(parse_unit(state.get("unit")), pace)


def payouts(state: dict[str, Any]) -> str:
    """Return what the owner was paid, and when the next payout is due."""
    told, unit = state.get("rates"), parse_unit(state.get("unit"))
    if not told:
        return "not known yet"
    return "; ".join(payout_lines(unit, told, now_ms=state["now_ms"]))


def payout_lines(unit: Unit, told: dict[str, Any], *, now_ms: int) -> Iterator[str]:
    """Yield what an owner was paid, what is on its way, and when the next payout is due."""
    if told["payouts"]:
        last = f", the last {ago((now_ms - told['last_ms']) / 1000)} ago" if told["last_ms"] is not None else ""
        yield f"{unit.exact(told['paid_micros'])} paid to the owner in {counted(told['payouts'], 'payout')}{last}"
    else:
        yield "nothing paid to the owner yet"
    if told["under_way_micros"]:
        yield f"{unit.exact(told['under_way_micros'])} being paid"
    yield f"next payout: {next_payout(unit, told['next_ms'], told['minimum_micros'], now_ms)}"


def verdicts(state: dict[str, Any]) -> str:
    """Return the number of accepted and rejected rollouts and the last verdict."""
    said = f"{counted(state['accepted'], 'rollout')} accepted, {rejected_text(state['rejected'])}"
    last = state["last_verdict"]
    if last is None:
        return f"{said}; no verdict received yet"
    code = f" {last['code']}" if last["code"] else ""
    return (
        f"{said}; last: {last['outcome']}{code} {ago(_since_s(state, last['at_ms']))} ago, lease {last['lease_id'][:8]}"
    )


def rejected_text(rejected: dict[str, int]) -> str:
    """Return the number of rejected rollouts with their codes: `3 rejected (2 stale_version, 1 lease_closed)`."""
    if not rejected:
        return "none rejected"
    codes = next(iter(rejected)) if len(rejected) == 1 else ", ".join(f"{n:,} {code}" for code, n in rejected.items())
    return f"{sum(rejected.values()):,} rejected ({codes})"


def traffic(state: dict[str, Any]) -> str:
    """Return the downloaded and uploaded bytes."""
    moved = state["transfer"]
    fetched = moved["from_peers"] + moved["from_seeder"] + moved["from_http"]
    cap = f" of {state['upload_cap_bytes'] / GB:g} GB" if state["upload_cap_bytes"] else ""
    stop = f"; {state['no_upload']}" if state["no_upload"] else ""
    month = f"{size_text(state['uploaded_month_bytes'])}{cap} this month"
    return f"{size_text(fetched)} fetched, {size_text(moved['to_peers'])} uploaded to peers ({month}){stop}"


def reach(state: dict[str, Any]) -> str:
    """Return the state of incoming connections and of the router's port mapping."""
    return f"{state['reach']}; {state['mapping']}" if state["mapping"] else str(state["reach"])


def machine(state: dict[str, Any]) -> str:
    """Return the temperature and power of the GPU or of the CPU, where sensors report them."""
    if len(state["cards"]) > 1:
        return counted(len(state["cards"]), "graphics card")
    readings = [f"{card['name']}: {_sensors(card)}" for card in state["cards"]]
    if not state["cards"]:
        readings += [f"CPU {state['celsius']:.0f} °C"] if state["celsius"] is not None else []
        readings += [f"{state['watts']:.0f} W"] if state["watts"] is not None else []
    return "; ".join(readings) or "temperature/power: not available"


def cards(state: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a label and a line for each card of a machine that has several."""
    return [(f"card {card['number']}", _card(card)) for card in state["cards"]] if len(state["cards"]) > 1 else []


def _card(card: dict[str, Any]) -> str:
    """Return what a card does, how fast, its readings, and why it rests."""
    if "state" not in card:
        return f"{card['name']}: not used by this node; {_sensors(card)}"
    work = f"{card['state']}, {card['tokens_per_s']:,.0f} tokens/s, {counted(card['groups'], 'group')}"
    reason = f"; {card['reason']}" if card["reason"] else ""
    return f"{card['name']}: {work}; {_sensors(card)}{reason}"


def _sensors(card: dict[str, Any]) -> str:
    total = f" of {card['memory_bytes'] / GB:.1f}" if card.get("memory_bytes") is not None else ""
    values = (
        ("{:.0f} °C", card["celsius"]),
        ("{:.0f} W", card["watts"]),
        (f"{{:.1f}}{total} GB used", card["used_bytes"] / GB if card["used_bytes"] is not None else None),
    )
    return ", ".join(form.format(value) for form, value in values if value is not None) or "no sensor values"


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


def _since_s(state: dict[str, Any], moment_ms: int) -> float:
    return float(state["now_ms"] - moment_ms) / 1000
