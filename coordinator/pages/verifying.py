"""The page that checks a round's whole ledger in the browser: one file that also works when saved or hosted elsewhere.

- The file is the same for every round of this version: it has no data of the round.
- The scripts in `pages/static` are modules of their own for other pages and for tests. Here they are joined into one,
  since a page that is opened from a disk cannot import files.
- The policy names the hashes of the script and of the style. The server's own header also forbids every other host;
  a saved copy may connect to the round that its visitor names.
"""

import base64
import re
from functools import cache
from hashlib import sha256
from importlib import resources

from protocol.text.html import Markup, el

MODULES = ("msgpack", "signed", "blake", "tree", "entries", "book", "draws", "round", "verify")
"""The scripts of the page; each imports from earlier ones only."""

_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ", re.MULTILINE)

LEAD = (
    "This page reads the public ledger of a round and checks all of it on your machine. "
    "It believes no figure of the server; it sends nothing but requests for the ledger's files."
)


@cache
def script() -> str:
    """Return the joined scripts."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _static(f"{name}.js"))) for name in MODULES)


def policy(connect: str = "'self'") -> str:
    """Return the Content-Security-Policy of the page, without what only a header can say."""
    return (
        f"default-src 'none'; connect-src {connect}; style-src {_hash(_static('style.css'))}; "
        f"script-src {_hash(script())}; img-src 'self'; form-action 'none'; base-uri 'none'"
    )


@cache
def render() -> str:
    """Return the page."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy("http: https:")),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", "Check a round's ledger"),
        el("style", Markup(_static("style.css"))),
    )
    back = el("p", el("a", "Back to the round", href="/"), id="back", hidden=True)  # a saved copy has no round
    main = el(
        "main", back, el("h1", "Check a round's ledger"), el("p", LEAD, class_="lead"), _form(), _results(), id="main"
    )
    body = el("body", main, el("script", Markup(script()), type="module"))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _form() -> Markup:
    without = el("p", "This page needs scripts. Without them, use: swarm-node ledger verify JOIN_STRING", class_="bad")
    save = el("a", "Save this page", href="verify.html", download="verify.html")
    pinned = "A join string pins the round's first key. With an address alone, the key that the server names counts."
    return el(
        "form",
        el("p", el("label", "Round: its join string, or its address", for_="round")),
        el("p", el("input", id="round", type="text", size=60, required=True, spellcheck="false", autocomplete="off")),
        el("p", pinned, class_="soft"),
        el("p", el("label", "Keys of witnesses whom you trust, one on each line (optional)", for_="witnesses")),
        el("p", el("textarea", id="witnesses", rows=2, cols=60, spellcheck="false")),
        el("p", el("button", "Check", id="check"), " ", save),
        el("noscript", without),
        id="form",
    )


def _results() -> Markup:
    titles = {"proved": "What was proved", "left": "What was not proved"}
    lists = {name: (el("h2", title), el("ul", id=name)) for name, title in titles.items()}
    return el(
        "section",
        el(
            "p",
            el("progress", id="bar", value=0, max=1, aria_label="Entries checked", hidden=True),
            " ",
            el("span", id="progress"),
        ),
        el("p", id="verdict", role="status"),
        el("p", id="mistake", role="alert"),
        (el("div", *parts, id=f"{name}-part", hidden=True) for name, parts in lists.items()),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _static(name: str) -> str:
    return resources.files("coordinator").joinpath("pages/static", name).read_text("utf-8")
