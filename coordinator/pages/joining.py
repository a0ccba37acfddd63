"""The two commands that join a round, and the page that has them."""

from typing import Any

from coordinator.pages.layout import Site, document
from coordinator.pages.qr import qr_svg
from protocol.text.html import Markup, el

FROM_CHECKOUT = "sh installers/install.sh"
"""The command that installs the node from a copy of the software."""


def commands(site: Site) -> Any:
    """Build the commands, in their order, each with a button that copies it where scripts run."""
    install = f"curl -fsS {site.home}/install.sh | sh"
    steps = {"Install the node": install, "Join this round": f'swarm-node join "{site.join_string}"'}
    listed = el("ol", (_step(name, command) for name, command in steps.items()), class_="steps")
    if site.serves_installer:
        return listed
    newest = "This installs the newest release. In a copy of the software, its own installer builds the node: "
    return listed, el("p", newest, el("code", FROM_CHECKOUT), ".", class_="soft")


def _step(name: str, command: str) -> Markup:
    copy = el("button", "Copy", type="button", data_copy=True, hidden=True, aria_label=f"Copy: {name}")
    return el("li", el("span", name, class_="step"), el("div", el("code", command), copy, class_="command"))


def panel(site: Site) -> Markup:
    """Build the section of a page that invites visitors to join."""
    return el(
        "section",
        el("h2", "Join with your computer", id="join-heading"),
        el("p", "Two commands on Linux or macOS; on Windows, in WSL 2. A GPU helps, a CPU is enough to try."),
        commands(site),
        el("p", "No account, no open port, no administrator's rights. Pause or leave at any time.", class_="soft"),
        id="join",
        class_="join",
        aria_labelledby="join-heading",
    )


def picture(site: Site) -> Markup | None:
    """Build the QR code of the join string, with the text that it holds; None if the join string is too long."""
    code = qr_svg(site.join_string, "QR code of the join string, which stands beside it")
    if code is None:
        return None
    said = el("p", "The join string, to take to another device. It opens this round in a browser, and ",
              el("code", "swarm-node join"), " takes it as it is.")  # fmt: skip
    return el("div", code, el("div", said, el("code", site.join_string)), class_="carry")


def _ended() -> Any:
    learned, ledger = (
        el("a", "See what it learned", href="/training", class_="button"),
        el("a", "Ledger", href="/entries"),
    )
    said = "A node that joins now gets no work. Credit and receipts stay in the public ledger."
    return el("p", said, class_="lead"), el("p", learned, " ", ledger, class_="actions")


def render(site: Site) -> str:
    """Return the page for those who want to join; after the end of the round it says so."""
    if site.finished:
        return document("This round has ended", "/join", site, _ended())
    questions: dict[str, Any] = {
        "What does my computer do?": "It downloads the newest version of the model, answers problems with it, and "
        "sends the answers back. The operator's machine learns from them and publishes the next version.",
        "What do I get?": ["Credit for each verified answer, in a ", el("a", "public ledger", href="/entries"),
                           " that anybody can check. Before you join, ", el("code", "--dry-run"),
                           " prints the demand and an estimate."],
        "What can it cost me?": ["Electricity, disk and traffic, within the limits that you set: ",
                                 el("code", "swarm-node limits"), " has hours, power, memory and upload."],
        "Whom do I trust?": ["The part after # of the join string is the fingerprint of the round's keys. Your node "
                             "runs only weights that these keys have signed, whoever answers at this address.",
                             [" In words, which the operator can tell you: ", el("strong", site.phrase), "."]
                             if site.phrase else None],
    }  # fmt: skip
    asked = (el("div", el("h2", question), el("p", answer)) for question, answer in questions.items())
    return document(
        "Join this round", "/join", site, commands(site), picture(site), el("div", asked, class_="questions")
    )
