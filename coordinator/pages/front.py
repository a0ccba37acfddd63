"""The front page: what is trained and why, whether it works, who helps, and how to join."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.pages import joining, words
from coordinator.pages.board import BoardFigures
from coordinator.pages.layout import aged, bar, document, live, node_link, numbers, wanted
from coordinator.pages.measured import done, main_curve, quality, score
from coordinator.pages.training import Training
from protocol.text.html import Markup, el
from protocol.text.money import parse_unit

LEADERS_SHOWN = 5

TITLE_CHARS, LEAD_CHARS = 40, 200
"""Lengths up to which the title and the description are set in large type."""

AWAY = ("silent", "left")


@dataclass(frozen=True)
class FrontFigures:
    """The figures of the front page: those of the leaderboard, and those of training."""

    board: BoardFigures
    training: Training


def render(figures: FrontFigures) -> str:
    """Return the front page as HTML."""
    board, site = figures.board, figures.board.site
    return document(
        site.title,
        "/",
        site,
        _hero(board),
        live("now", aged(board.age_ms), wanted(board.status), _now(figures)),
        live("curve", _curve(figures.training), el("p", el("a", "All charts", href="/training"), class_="more")),
        live("leaders", _leaders(board), heading="Who helps most"),
        _gifts(board),
        None if board.status["finished"] else joining.panel(site),
        heading=False,
    )


def _hero(board: BoardFigures) -> Markup:
    site = board.site
    said = site.description
    return el(
        "div",
        el("p", _state(board.status), class_="kicker"),
        el("h1", el("bdi", site.title), class_="long" if len(site.title) > TITLE_CHARS else None),
        el("p", site.lead, class_="lead long" if len(site.lead) > LEAD_CHARS else "lead"),
        el("p", el("strong", "Why: "), said.purpose, class_="why") if said.purpose else None,
        el("p", _first_step(board.status), " ", el("a", "How it works", href="/join"), class_="actions"),
        class_="hero",
    )  # fmt: skip


def _first_step(status: Mapping[str, Any]) -> Markup:
    if status["finished"]:
        return el("a", "See what it learned", href="/training", class_="button")
    return el("a", "Join with your GPU", href="#join", class_="button")


def _state(status: Mapping[str, Any]) -> Markup:
    if status["finished"]:
        return el("span", "Finished", class_="state left")
    if not status["version"]:
        return el("span", "Getting ready", class_="state standby")
    return el("span", "Training now", class_="state")


def _now(figures: FrontFigures) -> Any:
    status = figures.board.status
    found = quality(status, figures.training.evaluations)
    shown = _helpers(figures.board)
    shown["Versions"] = (words.whole(status["version"]), _published(figures.board))
    if found.newest is not None:
        at = f"at update {words.whole(found.update)}"
        shown["Score"] = (score(found.newest), at if found.first is None else f"from {score(found.first)} at the start")
    return numbers(shown), _progress(status)


def _progress(status: Mapping[str, Any]) -> Markup:
    """Build the bar of the round's updates; a round of another trainer makes none, and its line says so."""
    if status["external"]:
        return el("p", "Versions are made by another trainer: this round samples for it.", class_="soft")
    update, most = status["update"], status["max_updates"]
    ends = f"Update {words.whole(update)} of {words.whole(most)}", words.percent(update / most)
    progress = el("p", (el("span", end) for end in ends), class_="ends")
    return el("div", progress, bar(update / most), class_="progress")


def _helpers(board: BoardFigures) -> dict[str, tuple[Any, Any]]:
    """Return the numbers of computers and tokens: those of now, or in a finished round those of all its time."""
    nodes = board.nodes
    present = nodes if board.status["finished"] else [line for line in nodes if line.state not in AWAY]
    owners = words.counted(len({line.owner for line in present}), "owner")
    tokens = words.whole(sum(line.validated_tokens for line in nodes))
    if board.status["finished"]:
        return {"Computers": (words.whole(len(nodes)), f"of {owners}"), "Tokens": (tokens, "verified")}
    speed = words.figure(sum(line.tokens_per_s for line in present if line.validated_tokens))  # others may boast
    return {
        "Computers helping": (words.whole(len(present)), f"of {owners}; {words.whole(len(nodes))} so far"),
        "Tokens per second": (speed, f"{tokens} verified so far"),
    }


def _published(board: BoardFigures) -> str:
    since_ms = board.status["published_ms"]
    return f"newest {words.ago(board.now_ms + board.age_ms - since_ms)}" if since_ms else "the first is on its way"


def _curve(training: Training) -> Markup | None:
    if training.status["external"] and len(done(training.evaluations)) < 2:  # its trainer keeps the rewards to itself
        return None
    return el("div", main_curve(training.evaluations, training.metrics, training.published), class_="large")


def _leaders(board: BoardFigures) -> Any:
    leaders = sorted((line for line in board.nodes if line.validated_tokens), key=lambda line: -line.validated_tokens)
    leaders = leaders[:LEADERS_SHOWN]
    if not leaders:
        if board.status["finished"]:
            return el("p", "Nobody has earned credit.", class_="soft")
        return el("p", "Nobody has earned credit yet. ", el("a", "Be the first", href="#join"), ".", class_="soft")
    most = leaders[0].validated_tokens
    rows = (
        el(
            "li",
            el("span", node_link(line.node_id, line.name), class_="who"),
            el("span", words.counted(line.validated_tokens, "token"), class_="figure"),
            bar(line.validated_tokens / most),
        )
        for line in leaders
    )
    return el("ol", rows, class_="leaders"), el("p", el("a", "Leaderboard", href="/leaderboard"), class_="more")


def _gifts(board: BoardFigures) -> Markup | None:
    """Build the section with what others gave to the budget, the newest gifts first; None without any."""
    gifts, unit = board.status.get("gifts"), parse_unit(board.status.get("unit"))
    if not gifts or not gifts["count"]:
        return None
    total = f"{words.counted(gifts['count'], 'gift')}, {words.exact(unit, gifts['micros'])}. All of it pays for work."
    rows = (
        el("li", el("bdi", gift["given_by"] or "Somebody"), f" gave {words.exact(unit, gift['amount_micros'])}")
        for gift in gifts["newest"]
    )
    return live("gifts", el("p", total), el("ul", rows), heading="Who gives to the budget")
