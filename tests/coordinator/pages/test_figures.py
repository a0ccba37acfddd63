"""Standings, curves and histories out of a real store; words and elements out of any text."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.pages import charts, pictures, tree, words
from coordinator.pages.board import Wish
from coordinator.reports import curves, history
from coordinator.reports.curves import Branch, Curves, thinned
from coordinator.reports.ranking import HALF_LIFE_MS, Fold, RankingLine, by_node, by_owner, by_team, risen
from coordinator.rules.scores import wilson
from coordinator.store.facts import FINISHED, set_fact
from protocol.limits import DAY_MS, HOUR_MS, NAME_MAX_CHARS
from protocol.text.html import Markup, el
from tests.coordinator.world import HONEST_TOKENS, World

ANY_TEXT = st.text(st.characters(exclude_categories=[]))


def lines(world: World, fold: Fold) -> dict[str, RankingLine]:
    def read(connection: object) -> list[RankingLine]:
        fold.read(connection)  # type: ignore[arg-type]  # the world's effects are untyped
        return by_node(connection, fold, {}, silent_after_ms=10_000, now_ms=world.now_ms)  # type: ignore[arg-type]  # the same

    return {line.node_id: line for line in world.run(read)}


class TestStandings:
    def test_credit_counts_half_as_much_after_every_half_life(self, world: World) -> None:
        key = world.join(1)
        world.earn(key)
        world.earn(key)
        world.train(1)
        assert lines(world, Fold())[key.node_id].score_micros == pytest.approx(2 * HONEST_TOKENS)
        world.now_ms += 2 * HALF_LIFE_MS
        line = lines(world, Fold())[key.node_id]
        assert line.score_micros == pytest.approx(HONEST_TOKENS / 2)
        assert line.posted_micros == 2 * HONEST_TOKENS
        assert line.state == "silent"
        world.run(lambda connection: set_fact(connection, FINISHED, True))
        assert lines(world, Fold())[key.node_id].state == "left", "a finished round expects nobody"

    def test_a_fold_that_goes_on_and_one_that_begins_anew_agree(self, world: World) -> None:
        keys = [world.join(number) for number in (1, 2)]
        kept = Fold()
        for number in (1, 2, 3):
            for key in keys:
                world.earn(key)
            world.train(number)
            world.now_ms += DAY_MS
            assert lines(world, kept) == lines(world, Fold())
        anew = Fold()
        lines(world, anew)
        assert kept.days == anew.days
        assert [day.groups for day in kept.days.values()] == [2, 2, 2]
        assert {day.nodes for day in kept.days.values()} == {2}

    def test_the_last_day_is_known_by_the_hour_and_ranks_are_compared_with_the_day_before(self, world: World) -> None:
        """A fold that reads everything anew agrees, and one that was not asked for a long time."""
        early, late = world.join(1), world.join(2)
        kept, seldom = Fold(), Fold()
        for number, (key, hours) in enumerate([(early, 30), (late, 1), (late, 0)], 1):
            world.earn(key)
            world.earn(key)
            world.train(number)
            lines(world, kept)
            world.now_ms += hours * HOUR_MS
        ranked = lines(world, kept)
        assert ranked == lines(world, Fold()) == lines(world, seldom)
        assert [line.node_id for line in ranked.values()] == [late.node_id, early.node_id]
        assert ranked[early.node_id].hours == (0,) * 24
        assert ranked[late.node_id].hours == (0,) * 22 + (2 * HONEST_TOKENS, 2 * HONEST_TOKENS)
        assert risen(list(ranked.values())) == [None, -1]
        (owner,) = by_owner(replace(line, owner="o") for line in ranked.values())
        assert owner.hours == ranked[late.node_id].hours
        world.now_ms += DAY_MS
        assert risen(list(lines(world, kept).values())) == [0, 0]

    def test_what_waits_in_escrow_is_told_and_does_not_rank(self, world: World) -> None:
        rich, waits = world.join(1), world.join(2)
        world.earn(rich)
        world.earn(rich)
        world.train(1)
        world.earn(waits)
        found = lines(world, Fold())
        assert list(found) == [rich.node_id, waits.node_id]
        assert found[waits.node_id].escrow_share == 1.0
        assert found[waits.node_id].score_micros == 0

    def test_an_owner_has_what_all_its_nodes_have(self, world: World) -> None:
        keys = [world.join(number) for number in (1, 2)]
        for key in keys:
            world.earn(key)
        world.train(1)
        found = list(lines(world, Fold()).values())
        shared = [replace(line, owner="them") for line in found]
        (line,) = by_owner(shared)
        assert (line.nodes, line.posted_micros, line.accepted) == (2, 2 * HONEST_TOKENS, 2)

    def test_a_team_has_what_its_nodes_have_whatever_the_case_and_nobody_else(self, world: World) -> None:
        keys = [world.join(number) for number in range(1, 6)]
        for key in keys:
            world.earn(key)
        world.train(1)
        names = ("a@Heron", "b@x@ heron ", "plain", "c@", "@")
        named = [replace(line, name=name) for line, name in zip(lines(world, Fold()).values(), names, strict=True)]
        (team,) = by_team(named)
        assert (team.team.casefold(), team.nodes) == ("heron", 2)
        assert team.posted_micros == sum(line.posted_micros for line in named[:2])

    @pytest.mark.parametrize(
        ("won", "tried", "expected"), [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962))]
    )
    def test_wilson_gives_the_published_intervals(self, won: int, tried: int, expected: tuple[float, float]) -> None:
        assert wilson(won, tried) == pytest.approx(expected, abs=1e-3)
        assert wilson(0, 0) is None

    def test_history_leads_from_a_claim_to_its_entries(self, world: World) -> None:
        key = world.join(1)
        world.earn(key)
        world.earn(key)
        world.train(1)
        claims = world.run(history.claims, key.node_id)
        assert [(claim["state"], claim["entry"] < claim["settled_entry"]) for claim in claims] == [("posted", True)] * 2
        (day,) = world.run(history.days, key.node_id)
        assert (day["groups"], day["posted"], day["pending"]) == (2, 2 * HONEST_TOKENS, 0)


class TestCurves:
    def test_an_update_is_read_once_and_costs_what_its_groups_were_credited(self, world: World) -> None:
        key = world.join(1)
        kept = Curves()
        for number in (1, 2):
            world.earn(key)
            world.earn(key)
            world.train(number)
            world.run(kept.read)
            world.run(kept.read)
        assert kept.cost_micros() == [(1, 2 * HONEST_TOKENS), (2, 2 * HONEST_TOKENS)]
        assert kept.idle_share() == [(1, 0.25), (2, 0.25)]
        assert world.run(curves.ages) == [(0, 2.0), (1, 2.0)]

    @given(st.lists(st.floats(-1e9, 1e9), max_size=500))
    def test_a_thinned_curve_keeps_its_end_and_stays_within_its_bounds(self, values: list[float]) -> None:
        points = [(float(x), y) for x, y in enumerate(values)]
        thin = thinned(points, 20)
        assert len(thin) <= 20
        assert [x for x, _ in thin[-1:]] == [x for x, _ in points[-1:]]
        assert all(min(values) - 1e-3 <= y <= max(values) + 1e-3 for _, y in thin)

    def test_a_chain_of_many_nodes_is_drawn(self) -> None:
        branches = [Branch(str(number), "", str(number - 1) if number else "", 1) for number in range(150)]
        assert tree.picture(1, branches).count("<circle") == 151

    @pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(0.0, -1e300), (1.0, 1e300)]])
    def test_any_finite_figures_make_a_chart(self, points: list[tuple[float, float]]) -> None:
        made: list[Callable[[], Markup]] = [
            lambda: charts.lines("a", "title", "x", {"y": points}),
            lambda: charts.bars("a", "title", "x", points),
        ]
        assert all("nan" not in make() for make in made)


class TestWords:
    @given(ANY_TEXT)
    def test_any_name_becomes_a_short_line_that_turns_nothing_around(self, name: str) -> None:
        shown = words.readable(name, "id")
        assert 0 < len(shown) <= NAME_MAX_CHARS
        assert shown == shown.strip()
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\n\r\0")
        shown.encode()

    @given(ANY_TEXT, ANY_TEXT)
    def test_no_text_leaves_its_element(self, text: str, attribute: str) -> None:
        made = el("p", text, title=attribute)
        inside = made.removeprefix("<p title=").removesuffix("</p>")
        assert inside.count("<") == 0
        assert inside.count('"') - text.count('"') == 2
        assert inside.count(">") == 1

    @given(st.dictionaries(st.sampled_from(["view", "sort", "q", "page"]), ANY_TEXT))
    @example({"q": "\ud800"})
    def test_any_query_is_a_wish_whose_link_means_the_same(self, query: dict[str, str]) -> None:
        wish = Wish.parse(query)
        assert wish.page >= 1
        assert wish.link().startswith("/leaderboard?")


class TestPictures:
    @given(st.text(max_size=80), st.integers(0, 10**12), st.lists(st.integers(0, 10**15), max_size=24))
    @example("\ud800<script>", 0, [])
    def test_any_node_has_a_badge_and_a_card_that_are_sound_xml(self, name: str, tokens: int, hours: list[int]) -> None:
        who = pictures.Contribution("n" * 52, name, f"{name} & co", 1, 9_999, tokens, "5", "<b>", hours)
        for draw in (pictures.badge, pictures.card):
            root = ElementTree.fromstring(draw(who).encode(errors="replace").decode())
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert not [part for part in root.iter() if part.tag.endswith("script")]
            assert float(root.get("width", 0)) > 100

    def test_portraits_differ_and_a_portrait_stays(self) -> None:
        faces = [pictures.portrait(f"12D3Koo{number}") for number in range(500)]
        assert len(set(faces)) > 490
        assert faces[7] == pictures.portrait("12D3Koo7")

    def test_nothing_has_no_curve(self) -> None:
        assert pictures.sparkline([0, 0], "none") is None
        assert pictures.sparkline([], "none") is None


def test_everything_in_a_chart_has_a_style() -> None:
    """An element without a rule of its own would be drawn in black, or not at all."""
    curve = [(0.0, 1.0), (1.0, 2.0)]
    two = charts.lines("a", "a", "x", {"one": curve, "other": curve})
    three = {"one": curve, "low": curve, "high": curve}
    band = charts.lines("b", "b", "x", three, interval=("low", "high"), marks={0.0: "version 1"})
    style = (Path(charts.__file__).parent / "static" / "style.css").read_text()
    found = set(re.findall(r'class="([^"]+)"', f"{two}{band}{charts.bars('c', 'c', 'x', curve)}"))
    assert {"series s0", "series s1", "dot s1", "key s1", "bar s0", "band", "key band", "mark", "key mark"} <= found
    assert not [one for one in found if not re.search(rf"\.{one.replace(' ', '[.]')}[ :,]", style)]
    with pytest.raises(AssertionError, match="style sheet"):
        charts.lines("d", "d", "x", {"one": curve, "two": curve, "three": curve})


def test_labels_of_an_axis_are_told_apart() -> None:
    drawn = str(charts.lines("e", "e", "x", {"ratio": [(0.0, 0.99996), (1.0, 1.00004)]}))
    assert labels(drawn) == ["1.00004", "1.00002", "1", "0.99998", "0.99996"]


def labels(drawn: str) -> list[str]:
    """The labels of the vertical axis, from top to bottom."""
    (up,) = re.findall(r'<div class="up"[^>]*>(.*?)</div>', drawn)
    return re.findall(r"<span>([^<]*)</span>", up)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 0.73, ["0", "0.2", "0.4", "0.6", "0.8"]), (3.0, 17.0, ["0", "5", "10", "15", "20"]),
     (-0.3, 0.4, ["-0.4", "-0.2", "0", "0.2", "0.4"]), (1.0, 2.0, ["1", "1.25", "1.5", "1.75", "2"])],
)  # fmt: skip
def test_an_axis_has_round_labels_around_all_figures(low: float, high: float, expected: list[str]) -> None:
    assert labels(str(charts.lines("f", "f", "x", {"a": [(0.0, low), (1.0, high)]})))[::-1] == expected


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_every_figure_is_within_its_axis(low: float, high: float) -> None:
    drawn = str(charts.lines("g", "g", "x", {"a": [(0.0, low), (1.0, high)]}))
    assert len(labels(drawn)) <= charts.TICKS_MAX
    (places,) = re.findall(r'<polyline points="([^"]+)"', drawn)
    assert all(-0.01 <= float(place.partition(",")[2]) <= charts.SIDE + 0.01 for place in places.split())


def test_an_interval_is_a_band_from_its_lower_to_its_upper_bound() -> None:
    average, low, high = ([(0.0, y), (1.0, y)] for y in (0.5, 0.25, 1.0))
    drawn = str(
        charts.lines(
            "e", "e", "x", {"average": average, "low": low, "high": high}, from_zero=True, interval=("low", "high")
        )
    )
    (band,) = re.findall(r'<polygon points="([^"]+)" class="band"', drawn)
    assert [float(place.partition(",")[2]) for place in band.split()] == [75.0, 75.0, 0.0, 0.0]
    assert "low to high" in drawn
    assert drawn.count("<polyline") == 1


def one_line(name: str, title: str, across: str, points: list[charts.Point]) -> Markup:
    return charts.lines(name, title, across, {"one": points})


def test_a_short_number_has_three_digits_and_its_unit_at_every_size() -> None:
    sizes = (999, 1_000, 999_499, 999_500, 999_999, 12_345_678, 999_600_000, 10**12)
    assert [words.short(size) for size in sizes] == ["999", "1k", "999k", "1M", "1M", "12.3M", "1B", "1T"]


@pytest.mark.parametrize("draw", [charts.bars, one_line])
def test_an_axis_with_one_figure_has_one_label(draw: Callable[..., Markup]) -> None:
    """The label is below the point, and names it."""
    two = draw("a", "a", "update", [(7.0, 0.5), (8.0, 0.5)])
    single = str(draw("a", "a", "update", [(7.0, 0.5)]))
    assert re.findall(r"<span>((?:update )?7)</span>", single) == ["update 7"]
    assert "1 point; update 7" in single
    assert re.findall(r"<span>((?:update )?[78])</span>", str(two)) == ["7", "update 8"]
