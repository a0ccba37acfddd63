"""The front page and what all pages say about the round: hostile, missing and very long texts; what visitors see."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from coordinator.pages import charts, entries, feed, metric_words
from coordinator.pages.layout import SOFTWARE, Site, strip, wanted
from coordinator.pages.measured import done, main_curve, quality
from coordinator.reports.history import Incident
from coordinator.store.facts import PROGRESS, set_fact
from ledger import store
from ledger.entry import Deposit
from protocol import limits
from protocol.policy.description import RoundDescription
from protocol.work.learning import LearnerProgress
from tests.coordinator.pages.rounds import earn, furnished
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKUP = "</title><script>window.pwned = 1</script>\"'><b>&amp;"
PAGES = ("/", "/leaderboard", "/training", "/join", "/usage", "/entries", "/nothing", "/nodes/nobody")
BROWSER = {"Accept": "text/html,application/xhtml+xml"}


async def read(served: Served, path: str, **headers: str) -> str:
    return await (await served.client.get(path, headers=BROWSER | headers)).text()


def told(**texts: str) -> list[str]:
    return [f"round.{name}={text}" for name, text in texts.items()]


class TestDescription:
    @pytest.mark.parametrize("path", PAGES)
    async def test_every_page_has_the_title_and_the_operator(self, tmp_path: Path, path: str) -> None:
        async with serve(tmp_path, *told(title="Sums for all", operator="Ada & Co", licence="CC0-1.0")) as described:
            page = await read(described, path)
        assert '<bdi>Sums for all</bdi></a><nav aria-label="Pages">' in page
        assert "<dd>Ada &amp; Co</dd>" in page
        assert "<dd>CC0-1.0</dd>" in page

    async def test_markup_in_a_description_stays_text(self, tmp_path: Path) -> None:
        texts = dict.fromkeys(("title", "description", "purpose", "licence", "operator", "contact"), MARKUP)
        async with serve(tmp_path, *told(**texts)) as hostile:
            for path in (*PAGES, "/feed.atom"):
                page = await read(hostile, path)
                assert "<script>" not in page
                assert "<b>" not in page
                assert "&lt;script&gt;window.pwned" in page, path
            ET.fromstring(await read(hostile, "/feed.atom"))

    @pytest.mark.parametrize("contact", ["javascript:alert(1)", "data:text/html,x", "https://a.example b", "a@b:c"])
    async def test_only_web_and_mail_addresses_become_links(self, tmp_path: Path, contact: str) -> None:
        async with serve(tmp_path, *told(contact=contact)) as odd:
            assert f"<dd>{contact}</dd>" in await read(odd, "/")

    async def test_longest_texts_are_shown_whole(self, tmp_path: Path) -> None:
        title, passage = "W" * limits.ROUND_TITLE_MAX_CHARS, "word " * (limits.ROUND_TEXT_MAX_CHARS // 5 - 1) + "end"
        async with serve(tmp_path, *told(title=title, description=passage, purpose=passage)) as long:
            page = await read(long, "/")
        assert f"<bdi>{title}</bdi></h1>" in page
        assert page.count(passage) >= 3, "lead, purpose and preview"

    async def test_a_round_without_a_description_says_what_it_is(self, served: Served) -> None:
        page = await read(served, "/")
        assert f"<h1><bdi>{SOFTWARE}</bdi></h1>" in page
        assert "Volunteers&#x27; computers" in page or "Volunteers' computers" in page
        assert "<dt>Operator</dt>" not in page
        assert "Why: " not in page

    async def test_previews_name_the_round_and_an_image_that_exists(self, served: Served) -> None:
        page = await read(served, "/")
        home = served.round.config.round.join_string("").partition("#")[0]
        assert f'<meta property="og:image" content="{home}/static/card.png">' in page
        assert '<meta property="og:title"' in page
        image = await served.client.get("/static/card.png")
        assert (image.status, image.content_type) == (200, "image/png")


class TestVisitors:
    async def test_the_operators_alarm_is_not_shown_to_visitors(self, served: Served) -> None:
        status = await (await served.client.get("/v1/status")).json()
        assert status["alarm"], "this round has one"
        for path in PAGES:
            page = await read(served, path)
            assert "Alarm" not in page
            assert status["alarm"][:30] not in page

    async def test_leaders_and_commands_are_on_the_front_page(self, served: Served) -> None:
        page = await read(served, "/")
        assert page.count('class="who"') == 2
        assert f'swarm-node join "{served.round.config.round.join_string(served.round.round_id)}"' in page
        assert 'id="join"' in page

    async def test_an_old_address_of_the_leaderboard_leads_there(self, served: Served) -> None:
        response = await served.client.get("/?view=owners&q=a%26b", allow_redirects=False)
        assert (response.status, response.headers["Location"]) == (302, "/leaderboard?view=owners&q=a%26b")
        assert (await served.client.get("/?utm_source=x", allow_redirects=False)).status == 200

    async def test_the_ledger_opens_at_its_newest_entry(self, served: Served) -> None:
        deposits = [Deposit(reference=f"d{number}", amount_micros=1) for number in range(2 * entries.SHOWN)]
        await served.round.database.run(store.append_all, deposits, 1)
        size = await served.round.database.run(store.size)
        newest = await read(served, "/entries")
        assert f'href="/entries/{size - 1}"' in newest
        assert f'href="/entries/{size - entries.SHOWN}"' in newest
        assert 'rel="next"' not in newest

    async def test_browsers_get_a_page_and_programs_get_json(self, served: Served) -> None:
        page = await served.client.get("/nothing", headers=BROWSER)
        assert (page.status, page.content_type) == (404, "text/html")
        for path, accept in (("/nothing", "application/json"), ("/v1/nothing", BROWSER["Accept"])):
            answer = await served.client.get(path, headers={"Accept": accept})
            assert (answer.status, answer.content_type) == (404, "application/json")

    async def test_browsers_and_search_engines_find_their_files(self, served: Served) -> None:
        icon = await served.client.get("/favicon.ico")
        assert (await icon.read()).startswith(b"\x89PNG")
        assert "Disallow: /v1/" in await read(served, "/robots.txt")


class TestTrainersOfOthers:
    @pytest.mark.parametrize("path", ["/", "/training"])
    async def test_a_round_of_another_trainer_shows_its_versions_and_no_updates_of_its_own(
        self, tmp_path: Path, path: str
    ) -> None:
        async with serve(tmp_path, "learner.external=true") as external:
            await external.publish()
            before = LearnerProgress(phase="waiting", fraction=0.0, detail="", accuracy_before=0.0)
            await external.round.database.run(set_fact, PROGRESS, before.model_dump())
            page = await read(external, path)
        text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
        assert re.search(r"version 1 published|Versions 1 newest", text, re.IGNORECASE)
        assert "another trainer" in text
        for meaningless in ("Update 0 of", "update 0 /", "last update", "learner idle", "publish interval"):
            assert meaningless not in text
        for unmeasured in ("Reward", "held-out", "Is it learning?", "Groups by age", "Waiting of the learner"):
            assert unmeasured not in text


class TestTraining:
    async def test_charts_stand_below_their_question_with_both_names(self, served: Served) -> None:
        page = await read(served, "/training")
        places = [
            page.index(part) for part in ("Is it learning?", "<code>reward/mean</code>", "Is it healthy?", "Fleet")
        ]
        assert places == sorted(places)
        assert '<span class="name">Reward</span>' in page

    async def test_a_chart_that_does_not_change_is_folded(self, tmp_path: Path) -> None:
        async with furnished(tmp_path) as longer:
            await earn(longer, await longer.join(1))
            page = await read(longer, "/training")
        (folded,) = re.findall(r'<details id="flat-health".*?</details></figure></div></details>', page)
        assert "<summary>1 chart without a change</summary>" in folded
        assert "&lt;b&gt;kl/k3" in folded
        assert "reward/mean" not in folded

    @pytest.mark.parametrize(
        ("values", "flat"),
        [([1.0, 1.0], True), ([0.0, 0.0, 0.0], True), ([1.0], False), ([1e-9, 2e-9], False), ([], False)],
    )
    async def test_a_curve_is_flat_if_no_value_differs(self, values: list[float], flat: bool) -> None:
        assert charts.is_flat([(float(x), y) for x, y in enumerate(values)]) is flat

    async def test_unknown_metrics_keep_their_names(self) -> None:
        assert metric_words.caption("my/own_metric") == charts.Caption("my/own metric", "my/own_metric")
        assert metric_words.question("reward/of_style") == metric_words.LEARNING


WORKS: dict[str, Any] = {"finished": False, "version": 3, "nodes_alive": 2, "learner_idle_share_lately": 0.0}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, False),
        ({"learner_idle_share_lately": 0.9}, True),
        ({"nodes_alive": 0}, True),
        ({"nodes_alive": 0, "finished": True}, False),
        ({"nodes_alive": 0, "version": 0}, False),
    ],
)
async def test_visitors_are_called_when_training_waits_for_samples(changes: dict[str, Any], shown: bool) -> None:
    assert ("We need more GPUs" in (wanted(WORKS | changes) or "")) is shown


@pytest.mark.parametrize(
    ("update", "shown"), [(0, "–"), (1, "25.0\u202f% in 1 update"), (90, "25.0\u202f% in 32 updates")]
)
async def test_the_share_of_waiting_names_the_updates_that_it_counts(update: int, shown: str) -> None:
    figures = {"phase": "training", "published_ms": None, "update": update, "max_updates": 99, "update_age_s": None}
    others = {"nodes_up_to_date": 2, "external": False, "learner_idle_share_lately": 0.25}
    assert f"<dt>learner idle</dt><dd>{shown}</dd>" in strip(WORKS | figures | others, now_ms=1)


def evaluated(update: int, average: float | None, split: str = "held_out") -> dict[str, Any]:
    result = None if average is None else {"average": average, "interval": (average - 0.1, average + 0.1)}
    return {"update": update, "split": split, "result": result}


NOTHING = {"accuracy_before": None, "accuracy_after": None, "update": 9}


class TestQuality:
    async def test_the_newest_score_is_shown_after_the_first(self) -> None:
        rows = [
            evaluated(0, 0.25),
            evaluated(6, 0.5),
            evaluated(3, 0.375),
            evaluated(9, None),
            evaluated(9, 0.1, "other"),
        ]
        assert quality(NOTHING, rows).text == "25.0\u202f% → 50.0\u202f%"
        assert quality(NOTHING, rows).update == 6

    async def test_a_score_from_before_training_is_no_result(self) -> None:
        assert quality(NOTHING | {"accuracy_before": 0.369}, []).text == ""
        finished = NOTHING | {"accuracy_before": 0.369, "accuracy_after": 0.5}
        assert quality(finished, []).text == "36.9\u202f% → 50.0\u202f%"

    async def test_scores_beyond_one_are_no_percent(self) -> None:
        assert quality(NOTHING, [evaluated(0, -3.5)]).text == "-3.5"
        assert done([]) == []

    async def test_the_main_curve_is_the_evaluations_or_else_the_reward(self) -> None:
        metrics, published = {"reward/mean": [(1.0, 0.1), (2.0, 0.2)]}, {1.0: "version 1"}
        rows = [evaluated(0, 0.25), evaluated(6, 0.5)]
        assert "never trains on" in main_curve(rows, metrics, published)
        drawn = main_curve(rows[:1], metrics, published)
        assert "Average reward of the answers" in drawn
        assert drawn.count('class="mark"') == 1
        assert "No data yet" in main_curve([], {}, {})


async def test_the_feed_has_versions_and_incidents_newest_first() -> None:
    said = RoundDescription(
        round_id="ab" * 32, title=MARKUP, description="", purpose="", licence="", operator="", contact=""
    )
    site = Site("http://127.0.0.1:1#" + "ab" * 32, said, "sums")
    versions = [feed.PublishedVersion(number, number, 1000 * number) for number in range(1, 100)]
    incidents = [Incident(10**9, "12D3", "\u202e\x00<b>", "bad_signature", 1, "\ud800]]>")]
    tree = ET.fromstring(feed.render(site, versions, incidents, "ab" * 32).encode(errors="replace"))
    titles = [
        entry.findtext("{http://www.w3.org/2005/Atom}title")
        for entry in tree.iter("{http://www.w3.org/2005/Atom}entry")
    ]
    assert len(titles) == feed.ENTRIES_MAX
    assert titles[:2] == ["Incident: bad_signature, <b>", "Version 99"]
