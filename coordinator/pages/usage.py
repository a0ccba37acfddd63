"""The page on which the holder of an API key sees its usage, and the operator that of all keys.

- The page itself has no data of any key. Its script asks for them with the key or the operator's token that the visitor
  pastes, keeps it in the input field alone, and writes it to no storage.
- An API key shows its own usage (`GET /v1/usage`), and the operator's token all keys (`GET /v1/operator/keys`). Text of
  another form is not sent: it may be a secret of another service.
- Both have the usage of each of the last thirty days: a table of the days with answers, and bars of all thirty.
- What is announced to screen readers (`said`, `mistake`) is outside of the results, which are hidden at first.
"""

from coordinator.pages.layout import Site, document
from protocol.text.html import Markup, el

LEAD = "Paste your API key to see what it has spent, what is left, and its days. The operator's token shows all keys."
FORGETS = "This page forgets it when you leave. If your browser offers to save it, decline."


def render(site: Site) -> str:
    """Return the page, without figures."""
    script = el("script", type="module", src="/static/usage.js")
    return document(
        "Usage of API keys", "/usage", site, el("p", LEAD, class_="lead"), _form(), _results(), script, about=LEAD
    )


def _form() -> Markup:
    commands = (
        "This page needs scripts. Without them, use: curl /v1/usage with your key, or, as the operator, "
        "swarm-coordinator api-keys list"
    )
    plain = "This connection is not encrypted: others on the way can read what you paste. Use https, or a tunnel."
    return el(
        "form",
        el("p", el("label", "API key, or the operator's token", for_="secret")),
        el(
            "p",
            el("input", id="secret", type="password", size=48, required=True, autocomplete="off", spellcheck="false"),
            " ",
            el("button", "Show", id="show"),
        ),
        el("p", plain, class_="notice", id="plain", hidden=True),
        el("p", FORGETS, class_="soft"),
        el("noscript", el("p", commands, class_="bad")),
        id="form",
    )


def _results() -> tuple[Markup, ...]:
    shown = el(
        "section",
        el("h2", "", id="whose"),
        el("dl", class_="facts", id="figures"),
        el("div", id="keys"),
        el("div", id="days"),
        id="usage",
        aria_labelledby="whose",
        hidden=True,
    )
    return shown, el("p", "", id="said", role="status", class_="soft"), el("p", "", id="mistake", role="alert")
