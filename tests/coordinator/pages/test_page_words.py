"""Words of single pages: of a round that has ended, of installing, of figures that have one name each."""

from dataclasses import replace
from typing import Any

from coordinator.pages import board, joining, training, verifying
from coordinator.pages.layout import Site, document
from coordinator.reports.ranking import SORTS, RankingLine
from protocol.policy.description import RoundDescription
from protocol.text.money import CREDITS
from protocol.wire.signing import NodeKey

DESCRIPTION = RoundDescription.model_construct(
    round_id="a" * 64, title="", description="", purpose="", licence="", operator="", contact=""
)
SITE = Site(f"https://swarm.example.org#{'a' * 64}", DESCRIPTION, "sums")
ENDED = replace(SITE, finished=True)


LINE = RankingLine(NodeKey(bytes(32)).node_id, "", "rig1", "working", 1.0, 2, 0, 0, 100, 1447, 2, 0, 1, 1.0, 0, 0, 0, 0)


EMPTY_BOARD = {"finished": False, "version": 0, "nodes_alive": 1}


def leaderboard() -> str:
    return board.render(board.BoardFigures(EMPTY_BOARD, [LINE], [LINE], [], {}, 9, 0, SITE), board.Wish())


def test_a_round_that_has_ended_invites_nobody() -> None:
    assert 'href="/join"' in document("Ledger", "/entries", SITE)
    assert 'href="/join"' not in document("Ledger", "/entries", ENDED)
    page = joining.render(ENDED)
    assert "This round has ended" in page
    assert "swarm-node join &quot;" not in page
    assert "install.sh" not in page
    assert "QR code" not in page
    assert "QR code" in joining.render(SITE)


def test_the_footer_says_which_links_are_data_and_leads_to_the_check_of_the_ledger() -> None:
    footer = document("Ledger", "/entries", SITE).partition("<footer>")[2]
    assert '<a href="/v1/status">status as JSON</a>' in footer
    assert 'href="/verify.html"' in footer
    assert 'href="/" ' in verifying.render() or 'href="/">' in verifying.render(), "and back"


def test_a_visitor_without_a_copy_of_the_software_can_install() -> None:
    page = joining.render(SITE)
    first, second = (
        page.index("curl -fsS https://swarm.example.org/install.sh | sh"),
        page.index("installers/install.sh"),
    )
    assert first < second, "the copy of the software is the other way"
    assert "installers/install.sh" not in joining.render(replace(SITE, serves_installer=True))


def test_recent_credit_is_called_credit_and_a_score_is_an_evaluations() -> None:
    page = leaderboard()
    assert "Nodes, sorted by recent credit; amounts in credits" in page
    assert ">score<" not in page


def test_every_order_has_a_column_and_every_sorting_column_an_order() -> None:
    assert {column.sort for column in board.COLUMNS} - {""} == SORTS.keys()


def test_an_interval_contains_its_own_share() -> None:
    assert "99.9\u202f% " in (page := leaderboard())
    assert "(99.5–100.0)" in page


MEASURED: dict[str, Any] = {"accuracy_before": 0.369, "accuracy_after": 0.704}
STATUS = MEASURED | {"external": False}


def test_a_score_of_the_learners_own_is_named_where_no_node_evaluated() -> None:
    said = training.without_evaluations(STATUS)
    assert "36.9\u202f% before training, 70.4\u202f% after it" in said
    begins = training.without_evaluations(STATUS | {"accuracy_after": None})
    assert begins.endswith("36.9\u202f% before training.")
    nothing = [STATUS | dict.fromkeys(MEASURED), STATUS | {"external": True}]
    assert {training.without_evaluations(status) for status in nothing} == {"No evaluations yet."}
    assert said in training.evaluation_parts([], CREDITS, empty=said)[1]


def test_a_flood_of_searches_makes_no_text_twice() -> None:
    """The texts of ten thousand nodes take 30 ms, for which no node is answered."""
    lines = [replace(LINE, name=f"node {number}") for number in range(3)]
    figures = board.BoardFigures(EMPTY_BOARD, lines, [], [], {}, 9, 0, SITE)
    texts = [line.searched for line in lines]
    page = board.render(figures, board.Wish(search="node 2"))
    assert ("node 2" in page, "node 1" in page) == (True, False)
    assert all(line.searched is text for line, text in zip(lines, texts, strict=True))
