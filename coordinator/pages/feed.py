"""The news of a round as an Atom feed: its versions and its incidents, the newest first."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from coordinator.pages import words
from coordinator.pages.layout import Site
from coordinator.reports.history import Incident

ENTRIES_MAX = 50


class PublishedVersion(NamedTuple):
    """A version of the policy, the last update that it contains, and the time of its publication."""

    version: int
    update: int
    published_ms: int


class _News(NamedTuple):
    ms: int
    name: str
    title: str
    text: str
    link: str


def render(site: Site, versions: Sequence[PublishedVersion], incidents: Sequence[Incident], round_id: str) -> str:
    """Return the feed as XML."""
    news = sorted([*_of_versions(versions), *_of_incidents(incidents)], key=lambda one: -one.ms)[:ENTRIES_MAX]
    newest = news[0].ms if news else 0
    entries = "".join(
        f"<entry><id>urn:echo-swarm:{round_id}:{escape(one.name)}</id><title>{_text(one.title)}</title>"
        f"<updated>{_moment(one.ms)}</updated><link href={quoteattr(site.home + one.link)}/>"
        f"<summary>{_text(one.text)}</summary></entry>\n"
        for one in news
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<feed xmlns="http://www.w3.org/2005/Atom">'
        f"<id>urn:echo-swarm:{round_id}</id><title>{_text(site.title)}</title><subtitle>{_text(site.lead)}</subtitle>"
        f"<author><name>{_text(site.description.operator or site.title)}</name></author>"
        f"<updated>{_moment(newest)}</updated><link href={quoteattr(site.home + '/')}/>"
        f'<link rel="self" href={quoteattr(site.home + "/feed.atom")}/>\n{entries}</feed>\n'
    )


def _of_versions(versions: Sequence[PublishedVersion]) -> Iterator[_News]:
    for one in versions:
        text = f"It contains the learner's updates up to {one.update}."
        yield _News(one.published_ms, f"version:{one.version}", f"Version {one.version}", text, "/training")


def _of_incidents(incidents: Sequence[Incident]) -> Iterator[_News]:
    for one in incidents:
        who = words.readable(one.name, one.node_id) if one.node_id else words.line(one.name)
        title = f"Incident: {one.what}, {who}"
        link = f"/nodes/{one.node_id}" if one.node_id else "/training"
        yield _News(one.ms, f"incident:{one.node_id}:{one.what}", title, words.line(one.detail), link)


def _text(text: str) -> str:
    """Return text that XML allows: on one line and without control characters."""
    return escape(words.line(text))


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
