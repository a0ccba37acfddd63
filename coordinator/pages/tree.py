"""A picture of a broadcast: the seeder on the left, each node to the right of its main sender."""

from collections import defaultdict
from collections.abc import Sequence

from coordinator.pages import words
from coordinator.pages.layout import Column, node_link, table
from coordinator.reports.curves import Branch
from protocol.people.names import without_id
from protocol.text.html import Markup, el

ROW, COLUMN, LEFT, TOP, NAME_WIDTH = 22, 220, 70, 18, 170
LETTER, LABEL_MAX = 8, 20

COLUMNS = (Column("node", is_text=True), Column("main sender", is_text=True), Column("received"))

Place = tuple[int, float]
"""Number of hops from the seeder, and the row."""


def picture(version: int, branches: Sequence[Branch]) -> Markup:
    """Draw the broadcast of `version`, with a table of the same figures."""
    if not branches:
        return el("p", "No transfer receipts for this version yet.", class_="soft")
    places, rows = _places(branches)
    names = {branch.node_id: branch.name for branch in branches}
    width = LEFT + COLUMN * max(depth for depth, _ in places.values()) + NAME_WIDTH
    labels = {branch.node_id: _label(branch) for branch in branches}
    drawn = [_edge(places, labels.get(branch.parent, ""), branch) for branch in branches]
    drawn += [_node(place, labels.get(node_id, "")) for node_id, place in places.items()]
    deepest = max(depth for depth, _ in places.values())
    svg = el(
        "svg",
        el("title", f"How version {version} spread", id="tree-title"),
        el(
            "desc",
            f"{words.counted(len(branches), 'node')}, at most {words.counted(deepest, 'hop')} from the "
            "seeder; the table below names them.",
            id="tree-desc",
        ),
        drawn,
        viewBox=f"0 0 {width} {2 * TOP + ROW * (rows - 1)}",
        role="img",
        aria_labelledby="tree-title tree-desc",
        class_="tree",
        width=width,
    )
    lines = [
        [node_link(branch.node_id, branch.name),
         node_link(branch.parent, names[branch.parent]) if branch.parent else "the seeder",
         words.size(branch.size_bytes)]
        for branch in branches
    ]  # fmt: skip
    listed = table("Main senders of each receiver", COLUMNS, lines, empty="")
    frame = el("div", svg, class_="wide", tabindex="0", role="region", aria_label="Picture of the broadcast")
    return el("div", frame, el("details", el("summary", "as a table"), listed, id="tree-table"))


def _places(branches: Sequence[Branch]) -> tuple[dict[str, Place], int]:
    """Place each leaf on its own row and each parent midway between its children.

    It does not recurse, since chains may be long.
    """
    children: defaultdict[str, list[str]] = defaultdict(list)
    for branch in branches:
        children[branch.parent].append(branch.node_id)
    depth = {"": 0}
    order = [""]
    for node_id in order:
        for child in children[node_id]:
            depth[child] = depth[node_id] + 1
            order.append(child)
    leaves = 0
    row: dict[str, float] = {}
    for node_id in _leaves_first(children):
        below = [row[child] for child in children[node_id]]
        if not below:
            leaves += 1
        row[node_id] = (below[0] + below[-1]) / 2 if below else leaves - 1
    return {node_id: (depth[node_id], row[node_id]) for node_id in order}, max(1, leaves)


def _leaves_first(children: dict[str, list[str]]) -> list[str]:
    """Return every node after its children, and siblings in their order."""
    waiting, order = [""], []
    while waiting:
        node_id = waiting.pop()
        order.append(node_id)
        waiting.extend(children[node_id])
    return order[::-1]


def _label(branch: Branch) -> str:
    """Return the beginning of a node's name with the complete id that may follow it."""
    shown = words.readable(branch.name, branch.node_id)
    name = without_id(shown)
    tail = shown[len(name) :]
    return f"{name[: LABEL_MAX - len(tail)]}{tail}"


def _at(place: Place) -> tuple[float, float]:
    return LEFT + COLUMN * place[0], TOP + ROW * place[1]


def _edge(places: dict[str, Place], label: str, branch: Branch) -> Markup:
    """Draw a curve that begins after the parent's label."""
    (x0, y0), (x1, y1) = _at(places[branch.parent]), _at(places[branch.node_id])
    start = x0 + (LETTER * len(label) + 12 if label else 0)
    middle = (start + x1) / 2
    curve = f"M{start:.0f} {y0:.1f} C{middle:.0f} {y0:.1f} {middle:.0f} {y1:.1f} {x1:.0f} {y1:.1f}"
    return el("path", el("title", words.size(branch.size_bytes)), d=curve, class_="edge")


def _node(place: Place, label: str) -> Markup:
    x, y = _at(place)
    dot = el("circle", cx=f"{x:.0f}", cy=f"{y:.1f}", r=4, class_="dot s0")
    if not label:
        return el("g", dot, el("text", "seeder", x=x - 8, y=f"{y:.1f}", class_="end"))
    return el("g", dot, el("text", label, x=x + 8, y=f"{y:.1f}"))
