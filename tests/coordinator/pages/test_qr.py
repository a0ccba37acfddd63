"""QR codes: the modules of codes that another program has read, the picture on the page, and too long a text."""

import hashlib
import io
import re

import pytest
from rich.console import Console

from coordinator.pages.joining import picture
from coordinator.pages.layout import Site
from coordinator.pages.qr import BLACK_ON_WHITE, HALVES, PLAIN, QUIET, qr_matrix, qr_svg, qr_terminal
from coordinator.reports.screen import code_drawer
from protocol.policy.description import RoundDescription

LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
FULL = {
    14: "557a63858ac474aa",
    26: "5393643ed9b13df6",
    42: "46bb934440c644a3",
    62: "f3ab42e9833c9c26",
    84: "466f6c60a71e6cab",
    106: "7a0baab53bf2359e",
    122: "5cf9b51571d56c62",
    152: "2c415ec772490151",
    180: "af58222b93fd2a34",
    213: "866b889973c3858d",
}
"""The longest text of each version, and the digest of a code that zxing-cpp 3.1 has read as this text."""


def text_of(length: int) -> bytes:
    return bytes(LETTERS[n % len(LETTERS)] for n in range(length))


@pytest.mark.parametrize(("version", "length"), list(enumerate(FULL, 1)))
def test_a_code_is_the_one_that_another_program_has_read(version: int, length: int) -> None:
    matrix = qr_matrix(text_of(length))
    assert matrix is not None
    assert len(matrix) == 17 + 4 * version
    assert hashlib.sha256(bytes(dark for row in matrix for dark in row)).hexdigest()[:16] == FULL[length]


def test_one_byte_more_takes_the_next_size_and_in_the_end_none() -> None:
    sides = [len(matrix) for length in FULL if (matrix := qr_matrix(text_of(length + 1)))]
    assert sides == [25, 29, 33, 37, 41, 45, 49, 53, 57]
    assert qr_svg("a" * 214, "too long") is None
    assert qr_matrix(b"") is not None


def site_at(url: str) -> Site:
    description = RoundDescription(
        round_id="a" * 64, title="", description="", purpose="", licence="", operator="", contact=""
    )
    return Site(f"{url}#{'a' * 64}", description, "arithmetic")


def test_the_picture_of_the_page_has_the_modules_a_border_and_its_text_beside_it() -> None:
    site = site_at("https://swarm.example.org")
    shown = picture(site)
    assert shown is not None
    matrix = qr_matrix(site.join_string.encode())
    assert matrix is not None
    side = len(matrix) + 2 * QUIET
    assert f'viewBox="0 0 {side} {side}"' in shown
    assert 'role="img" aria-label="QR code of the join string' in shown
    assert f"<code>{site.join_string}</code>" in shown
    drawn = [[False] * side for _ in range(side)]
    for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", shown):
        for step in range(int(length)):
            drawn[int(y)][int(x) + step] = True
    assert [row[QUIET:-QUIET] for row in drawn[QUIET:-QUIET]] == matrix
    assert not any(any(row) for row in drawn[:QUIET] + drawn[-QUIET:])


def test_a_join_string_that_is_too_long_has_no_picture() -> None:
    assert picture(site_at("https://" + "a" * 200)) is None


JOIN = f"https://swarm.example.org#{'a' * 64}"


class Screen(io.TextIOWrapper):
    """A stream in an encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)


def drawn_on(
    join_string: str, *, height: int = 60, width: int = 120, encoding: str = "utf-8", terminal: bool = True
) -> str | None:
    console = Console(file=Screen(encoding), height=height, width=width, color_system="256", force_terminal=terminal)
    return code_drawer(qr_terminal, console)(join_string)


def test_a_flood_of_requests_for_the_page_draws_its_code_once() -> None:
    """The search for the best mask takes 12 ms, for which no node is answered."""
    assert qr_svg("http://x#" + "0" * 64, "about") is qr_svg("http://x#" + "0" * 64, "about")


def test_a_terminal_shows_the_modules_and_a_border() -> None:
    matrix = qr_matrix(JOIN.encode())
    shown = drawn_on(JOIN)
    assert matrix is not None
    assert shown is not None
    rows: list[list[bool]] = []
    modules = {character: both for both, character in HALVES.items()}
    for line in shown.splitlines():
        pairs = [modules[character] for character in line.removeprefix(BLACK_ON_WHITE).removesuffix(PLAIN)]
        rows += [[upper for upper, _ in pairs], [lower for _, lower in pairs]]
    assert [row[QUIET:-QUIET] for row in rows[QUIET : QUIET + len(matrix)]] == matrix
    assert not any(any(row) for row in rows[:QUIET] + rows[QUIET + len(matrix) :])


def test_no_code_is_drawn_in_a_log_where_it_does_not_fit_or_where_it_leads_nowhere() -> None:
    assert drawn_on(JOIN, terminal=False) is None
    assert drawn_on(JOIN, height=24) is None
    assert drawn_on(JOIN, width=40) is None
    assert drawn_on(JOIN, encoding="ascii") is None
    for host in ("127.0.0.1", "0.0.0.0", "localhost.", "[::1]", "[::]", "[::ffff:127.0.0.1]"):
        assert drawn_on(f"http://{host}:8700#{'a' * 64}") is None, host
    assert drawn_on(f"https://{'a' * 200}.example#{'a' * 64}") is None
