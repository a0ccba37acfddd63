"""The pages, exports and events as programs see them."""

import asyncio
import csv
import gzip
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from aiohttp import web

from coordinator.api.guard import Bounds
from coordinator.api.snapshot import PageSnapshot
from coordinator.api.stats import number
from coordinator.api.watch import WATCH, Watch
from protocol.text.money import CREDITS
from protocol.wire.signing import NodeKey
from tests.coordinator.pages.rounds import HOSTILE, hostile_id
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_VERIFIERS = (
    "ledger/checkpoint", "ledger/cosigned", "ledger/tile/entries/000.p/1", "metadata/1.root.json",
    "metadata/9.root.json", "leaderboard", "audits/1",
)  # fmt: skip

EARNER = NodeKey((1).to_bytes(32)).node_id


def watch_of(served: Served) -> Watch:
    runner = served.client.server.runner
    assert isinstance(runner, web.AppRunner)
    return runner.app[WATCH]


class TestAmounts:
    @pytest.mark.parametrize("path", ["/leaderboard", "/leaderboard?view=days", "/entries/0", f"/nodes/{EARNER}"])
    async def test_amounts_on_pages_have_the_rounds_unit(self, served: Served, path: str) -> None:
        text = await (await served.client.get(path)).text()
        assert "credits" in text
        assert "amounts are in millionths" not in text.lower()

    async def test_the_total_of_the_leaderboard_is_in_the_rounds_unit_too(self, served: Served) -> None:
        text = await (await served.client.get("/leaderboard")).text()
        told = await (await served.client.get("/v1/leaderboard")).json()
        micros = sum(node["posted_micros"] for node in told["nodes"])
        assert f'<dt>Credit</dt><dd><span class="number">{CREDITS.figure(micros)}</span>' in text

    async def test_a_nodes_page_has_its_rate_what_was_paid_and_the_next_payout(self, served: Served) -> None:
        text = (await (await served.client.get(f"/nodes/{EARNER}")).text()).split('id="earnings"')[1]
        assert "<dt>rate</dt><dd>Too early for a rate" in text
        for figure in ("price per million tokens", "credit per million validated tokens", "revoked credit"):
            assert f"<dt>{figure}</dt>" in (await (await served.client.get(f"/nodes/{EARNER}")).text())
        assert "<dt>paid to the owner</dt><dd>nothing yet" in text
        assert "not scheduled (minimum balance 1.00 credits)" in text

    async def test_rates_are_public_json_in_micro_units(self, served: Served) -> None:
        told = await (await served.client.get(f"/v1/owners/{EARNER}/rates")).json()
        assert told["unit"] == {"name": "credits", "decimals": 4}
        assert told["owner"] == EARNER
        by_node = {node["node_id"]: node for node in told["nodes"]}
        assert by_node[EARNER]["day_micros"] > 0
        assert told["total"]["day_micros"] == sum(node["day_micros"] for node in told["nodes"])
        assert all(isinstance(node["hour_micros"], int) for node in told["nodes"])
        assert set(told["payouts"]) == {"paid_micros", "batches", "last_ms", "next_ms", "minimum_micros"}

    async def test_an_unknown_owner_has_no_rates(self, served: Served) -> None:
        assert (await served.client.get("/v1/owners/<script>/rates")).status == 404

    async def test_the_status_names_the_unit_and_the_payouts(self, served: Served) -> None:
        status = await (await served.client.get("/v1/status")).json()
        assert status["unit"] == {"name": "credits", "decimals": 4}
        assert status["payouts"]["next_ms"] is None


class TestPages:
    async def test_pages_of_other_sites_may_read_what_a_verifier_needs_and_nothing_else(self, tmp_path: Path) -> None:
        """A file that is not there yet is an answer, too."""
        async with serve(tmp_path, "round.public_url=https://swarm.example.org") as public:
            for name in FOR_VERIFIERS:
                found = await public.client.get(f"/v1/{name}")
                assert found.headers.getall("Access-Control-Allow-Origin", []) == ["*"], name
            for path in ("/v1/status", "/v1/nodes", "/v1/operator/status", "/", "/verify.html"):
                found = await public.client.get(path, headers={"Origin": "https://elsewhere.example"})
                assert "Access-Control-Allow-Origin" not in found.headers, path
            assert "Access-Control-Allow-Origin" not in (await public.client.post("/v1/ledger/cosignatures")).headers

    async def test_a_website_cannot_read_a_private_ledger_through_a_visitors_browser(self, served: Served) -> None:
        """The round's own address decides; what a browser asks before it calls a private network is not granted."""
        asks = {"Origin": "https://elsewhere.example", "Access-Control-Request-Private-Network": "true",
                "Access-Control-Request-Method": "GET", "Host": "swarm.example.org"}  # fmt: skip
        for name in FOR_VERIFIERS:
            for method in ("GET", "OPTIONS"):
                found = await served.client.request(method, f"/v1/{name}", headers=asks)
                assert not [header for header in found.headers if header.startswith("Access-Control")], name

    @pytest.mark.parametrize(
        ("url", "is_public"),
        [
            ("https://swarm.example.org:8443/round", True), ("http://swarm.example.org:8702", True),
            ("HTTPS://SWARM.EXAMPLE.ORG.", True), ("http://127.0.0.1.:8702", False), ("http://127.1:8702", False),
            ("http://[::ffff:10.0.0.1]:8702", False), ("http://[64:ff9b::a00:1]", False),
            ("http://10.0.0.1:8702", False), ("http://user@localhost.:8702", False), ("http://[::1", False),
        ],
    )  # fmt: skip
    async def test_the_form_of_a_rounds_address_hides_no_private_host(
        self, tmp_path: Path, url: str, is_public: bool
    ) -> None:
        async with serve(tmp_path, f"round.public_url={url}") as served:
            found = await served.client.get("/v1/leaderboard")
        assert ("Access-Control-Allow-Origin" in found.headers) == is_public

    async def test_the_page_that_verifies_permits_its_own_script_and_this_server_alone(self, served: Served) -> None:
        policy = (await served.client.get("/verify.html")).headers["Content-Security-Policy"]
        assert "connect-src 'self';" in policy
        assert "script-src 'sha256-" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy

    async def test_who_has_a_page_is_not_sent_it_again(self, served: Served) -> None:
        first = await served.client.get("/entries/0")
        again = await served.client.get("/entries/0", headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status, await again.read()) == (304, b"")
        other = await served.client.get("/entries/1", headers={"If-None-Match": first.headers["ETag"]})
        assert other.status == 200

    async def test_pages_are_compressed_for_whom_asks_for_it(self, served: Served) -> None:
        plain = await served.client.get("/entries/0", headers={"Accept-Encoding": "identity"})
        packed = await served.client.get("/entries/0", headers={"Accept-Encoding": "gzip"}, auto_decompress=False)
        assert gzip.decompress(await packed.read()) == await plain.read()
        assert plain.headers["Vary"] == "Accept-Encoding"

    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/leaderboard",
            "/join",
            "/usage",
            "/training",
            "/feed.atom",
            "/robots.txt",
            "/?q=a",
            "/entries/0",
            "/static/live.js",
            "/stats/nodes.csv",
            "/nodes/x",
        ],
    )
    async def test_no_page_lets_foreign_or_inline_code_run(self, served: Served, path: str) -> None:
        response = await served.client.get(path)
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"

    async def test_a_node_has_a_badge_and_a_card_that_other_sites_may_show(self, served: Served) -> None:
        page = await (await served.client.get(f"/nodes/{EARNER}")).text()
        for picture, text in (("badge", " tokens · #"), ("card", "verified tokens")):
            address = f"/nodes/{EARNER}/{picture}.svg"
            assert address in page
            response = await served.client.get(address)
            assert response.content_type == "image/svg+xml"
            assert text in await response.text()
        assert (await served.client.get("/nodes/nobody/badge.svg")).status == 404

    async def test_a_node_that_is_not_there_is_a_page_that_says_so(self, served: Served) -> None:
        response = await served.client.get("/nodes/%3Cscript%3E")
        assert response.status == 404
        assert "<script>" not in (await response.text()).replace('<script type="module"', "")

    async def test_what_was_not_measured_yet_has_no_place_above_the_pages(self, served: Served) -> None:
        page = await (await served.client.get("/training")).text()
        assert "<dt>learner idle</dt>" in page
        assert "<dt>score</dt>" not in page
        assert "<dt>Score</dt>" not in await (await served.client.get("/")).text()

    @pytest.mark.parametrize("name", ["..%2findex.py", "live.js%00", "nothing.js", "STYLE.css"])
    async def test_static_files_are_those_of_their_folder_and_no_others(self, served: Served, name: str) -> None:
        assert (await served.client.get(f"/static/{name}")).status == 404

    @pytest.mark.parametrize(
        "query", ["page=9999999", "page=-1", "page=²", "sort=;drop", "view=%00", "q=%ff", f"q={'a' * 5000}"]
    )
    async def test_any_query_is_some_view_of_the_board(self, served: Served, query: str) -> None:
        assert (await served.client.get(f"/leaderboard?{query}")).status == 200

    async def test_an_index_beyond_the_log_is_an_empty_page(self, served: Served) -> None:
        response = await served.client.get("/entries/999999999999999999")
        assert response.status == 200
        assert "The log ends before this index." in await response.text()

    async def test_where_nobody_is_nobody_is_said_to_work(self, tmp_path: Path) -> None:
        async with serve(tmp_path) as empty:
            text = await (await empty.client.get("/training")).text()
        assert "No node is active." in text
        assert "All nodes are working" not in text

    async def test_search_finds_a_node_by_name_and_by_id(self, served: Served) -> None:
        for sought in ("N1", EARNER[-8:].lower()):
            assert f"/nodes/{EARNER}" in await (await served.client.get("/leaderboard", params={"q": sought})).text()
        assert "/nodes/" not in await (await served.client.get("/leaderboard", params={"q": "nobody at all"})).text()


class TestStats:
    async def test_a_formula_in_a_name_is_no_formula_in_a_spreadsheet(self, served: Served) -> None:
        text = await (await served.client.get("/stats/nodes.csv")).text()
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == 2 + len(HOSTILE)
        assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "@", "+"))]

    async def test_json_says_what_the_leaderboard_says(self, served: Served) -> None:
        found = await (await served.client.get("/stats/nodes.json")).json()
        board = await (await served.client.get("/v1/leaderboard")).json()
        told = {row["node_id"]: row["posted_micros"] for row in found["rows"]}
        assert told == {row["node_id"]: row["posted_micros"] for row in board["nodes"]}
        assert told[EARNER] > 0

    async def test_the_orders_are_shown_without_who_gave_them(self, served: Served) -> None:
        text = await (await served.client.get("/training")).text()
        assert "The operator's orders" in text
        assert "somebody@somewhere" not in text

    async def test_a_team_is_searched_by_its_name(self, served: Served) -> None:
        rows = (await (await served.client.get("/stats/teams.json")).json())["rows"]
        assert [(row["team"], row["nodes"]) for row in rows] == [("<b>heron</b>", 1)]
        text = await (await served.client.get("/leaderboard?view=teams")).text()
        assert "&lt;b&gt;heron&lt;/b&gt;" in text
        found = await (await served.client.get("/leaderboard?q=%40%3Cb%3Eheron")).text()
        assert hostile_id(list(HOSTILE).index("team")) in found

    async def test_boinc_files_are_sound_xml_and_refer_to_each_other(self, served: Served) -> None:
        files = {}
        for name in ("tables", "user", "team", "host"):
            files[name] = ET.fromstring(await (await served.client.get(f"/stats/{name}.xml")).text())
        hosts = files["host"].findall("host")
        assert files["tables"].findtext("nhosts_total") == str(len(hosts)) == str(2 + len(HOSTILE))
        assert files["tables"].findtext("nteams_total") == str(len(files["team"])) == "1"
        users = {user.findtext("id") for user in files["user"].findall("user")}
        assert {host.findtext("userid") for host in hosts} == users
        assert str(number(EARNER)) in users
        total = sum(float(host.findtext("total_credit", "nan")) for host in hosts)
        assert total == pytest.approx(float(files["tables"].findtext("total_credit", "nan")))
        packed = await (await served.client.get("/stats/host.gz")).read()
        assert len(ET.fromstring(gzip.decompress(packed))) == len(hosts)


class TestEvents:
    async def test_a_listener_hears_at_once_and_whoever_comes_back_only_what_is_new(self, served: Served) -> None:
        first = await self.heard(served, "")
        assert json.loads(first["data"])["version"] == 1
        listening = asyncio.create_task(self.heard(served, first["id"]))
        await served.join(55)
        second = await listening
        assert second["id"] != first["id"]
        assert json.loads(second["data"]) != json.loads(first["data"])

    async def test_who_leaves_is_counted_out_and_too_many_are_told_to_ask_instead(self, served: Served) -> None:
        watch = watch_of(served)
        await self.heard(served, "")
        async with asyncio.timeout(60):
            while watch.listeners:
                await served.client.get("/healthz")
        watch.listeners["elsewhere"] = Bounds().listeners
        response = await served.client.get("/v1/events")
        watch.listeners.clear()
        assert response.status == 503
        assert "Retry-After" in response.headers

    async def heard(self, served: Served, known: str) -> dict[str, str]:
        """The first event of a stream."""
        response = await served.client.get("/v1/events", headers={"Last-Event-ID": known})
        fields: dict[str, str] = {}
        async with asyncio.timeout(60):
            while not fields.get("data"):
                line = (await response.content.readline()).decode().strip()
                name, _, value = line.partition(": ")
                fields[name] = value
        response.close()
        return fields


class TestSnapshot:
    """Computed once for all who ask, and never much too old."""

    async def test_a_crowd_costs_one_computation(self) -> None:
        made = Made()
        snapshot = PageSnapshot(made.compute, clock=made.clock)
        crowd = [asyncio.create_task(snapshot.get()) for _ in range(100)]
        await made.started.wait()
        made.release.set()
        assert {(await one).figures for one in crowd} == {1}

    async def test_who_asks_while_newer_figures_are_made_gets_the_last_unless_they_are_too_old(self) -> None:
        made = Made()
        snapshot = PageSnapshot(made.compute, fresh_s=2, shown_at_most_s=10, clock=made.clock)
        made.release.set()
        assert (await snapshot.get()).figures == 1
        made.now_s = 1.9
        assert (await snapshot.get()).figures == 1
        made.release.clear()
        made.now_s = 5
        assert (await snapshot.get()).figures == 1
        made.now_s = 11
        waiting = asyncio.create_task(snapshot.get())
        await made.started.wait()
        made.release.set()
        assert (await waiting).figures == 2

    async def test_a_failure_is_told_and_the_next_one_asks_again(self, caplog: pytest.LogCaptureFixture) -> None:
        made = Made()
        made.release.set()
        made.fails = True
        snapshot = PageSnapshot(made.compute, clock=made.clock)
        with pytest.raises(RuntimeError):
            await snapshot.get()
        assert "could not compute the figures" in caplog.text
        made.fails = False
        assert (await snapshot.get()).figures == 2


class Made:
    """Figures that count how often they were computed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.times = 0
        self.fails = False
        self.started, self.release = asyncio.Event(), asyncio.Event()

    def clock(self) -> float:
        return self.now_s

    async def compute(self) -> int:
        self.times += 1
        self.started.set()
        await self.release.wait()
        if self.fails:
            raise RuntimeError("no figures")
        return self.times
