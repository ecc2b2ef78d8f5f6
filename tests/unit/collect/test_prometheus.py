"""Metrics by way of a Prometheus: a fake one for what is hard to bring about, and Debian's."""

import asyncio
import json
import re
import time

import pytest
from aiohttp import web

from exporters import Exporter, free_port, prometheus
from tandem import fetch
from tandem.collect.incarnations import Incarnations
from tandem.collect.prometheus import MEMBERS_PER_QUERY, PrometheusSource
from tandem.engines.sglang import SglangEngine
from tandem.ports import ReadsPages
from tandem.records import Member, Role
from tandem.records import vocabulary as v
from tandem.routers.smg import SmgRouter

T = 1_764_500_000.0
SECRET = "s3cr3t-bearer"


def member(name="decode-0", role=Role.DECODE, *, port=30001, engine="sglang", **fields):
    """A member at a port of this host."""
    url = f"http://127.0.0.1:{port}"
    return Member(name=name, role=role, url=url, engine=engine, **fields)


def series(name, values, *, instance="127.0.0.1:30001", job="sglang", **labels):
    """One series of an answer: (seconds since `T`, value) pairs."""
    metric = {"__name__": name, "job": job, "instance": instance, **labels}
    return {"metric": metric, "values": [[T + at, str(value)] for at, value in values]}


def scraped(moments, tokens, **where):
    """A target with `up` and one counter, scraped at these moments."""
    return [
        series("up", [(at, 1) for at in moments], **where),
        series("sglang:realtime_tokens_total", list(zip(moments, tokens, strict=True)), **where),
    ]


class Server:
    """Answers queries as a test says, and keeps what was asked."""

    def __init__(self):
        self.result, self.status, self.body = [], 200, None
        self.queries, self.tokens = [], []
        self.port = free_port()

    async def _answer(self, request):
        form = await request.post()
        self.queries.append(form["query"])
        self.tokens.append(request.headers.get("Authorization", ""))
        body = self.body
        if body is None:
            data = {"resultType": "matrix", "result": self.result}
            body = json.dumps({"status": "success", "data": data})
        return web.Response(status=self.status, text=body, content_type="application/json")

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/prom/api/v1/query", self._answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


class Look:
    """A source over a server, with a clock of its own."""

    def __init__(self, url, session, members, **how):
        self.time = T + 10.0
        engine, router = SglangEngine(session), SmgRouter(session, members)
        readers = [(one, router if one.role is Role.ROUTER else engine) for one in members]
        self.source = PrometheusSource(
            url, readers, session, Incarnations(), now=lambda: self.time, **how
        )

    async def rows(self, name=None, subject=None):
        """Look once; the observations, of one name and subject where given."""
        harvest = await self.source.collect()
        return [
            seen
            for seen in harvest.observations
            if name in (None, seen.name) and subject in (None, seen.subject)
        ]

    async def tokens(self, **which):
        """Look once at the progress counters: (when, value, missing)."""
        rows = await self.rows(v.PROGRESS_TOKENS_TOTAL, **which)
        return [(seen.at - T, seen.value, seen.missing) for seen in rows]


@pytest.fixture
async def server():
    """Give a server that answers what it is told to."""
    async with Server() as made:
        yield made


@pytest.fixture
async def look_at(server):
    """Give a function that looks at members by way of that server."""
    async with fetch.session() as session:
        yield lambda *members, **how: Look(
            f"http://127.0.0.1:{server.port}/prom/", session, members or (member(),), **how
        )


class TestScrapes:
    """What one scrape says, and when."""

    async def test_a_sample_has_the_time_of_its_scrape(self, server, look_at):
        """Not the time at which Prometheus was asked; the source is that of a metrics page."""
        server.result = scraped([5.0, 7.25], [100, 130])
        look = look_at()
        (row,) = await look.rows(v.PROGRESS_TOKENS_TOTAL)

        assert (row.at, row.value, row.source) == (T + 7.25, 130, "metrics")

    async def test_what_was_given_is_not_given_again(self, server, look_at):
        """Until Prometheus scrapes again there is nothing new to say: no value is repeated."""
        server.result = scraped([7.0], [100])
        look = look_at()
        first, second = await look.tokens(), await look.tokens()
        server.result = scraped([7.0, 8.0], [100, 100])
        third = await look.tokens()

        assert [first, second, third] == [[(7.0, 100, None)], [], [(8.0, 100, None)]]

    async def test_a_series_that_left_the_page_is_missing(self, server, look_at):
        """Scraped once without it, it is gone: its last value is not carried on."""
        server.result = [
            series("up", [(6, 1), (7, 1)]),
            series("sglang:realtime_tokens_total", [(6, 100)]),
            series("sglang:num_requests_total", [(6, 4), (7, 5)]),
        ]
        look = look_at()
        rows = {seen.name: seen for seen in await look.rows()}

        assert rows[v.REQUESTS_TOTAL].value == 5
        assert rows[v.PROGRESS_TOKENS_TOTAL].value is None
        assert "not on the metrics page" in rows[v.PROGRESS_TOKENS_TOTAL].missing

    async def test_a_target_that_cannot_be_scraped_is_missing(self, server, look_at):
        """`up` at 0 is newer than every sample: the last ones are not taken for now."""
        server.result = [
            series("up", [(6, 1), (7, 0)]),
            series("sglang:realtime_tokens_total", [(6, 100)]),
        ]
        look = look_at()

        assert await look.tokens() == [
            (7.0, None, "/metrics: Prometheus could not scrape it (up is 0)")
        ]

    async def test_a_target_nobody_scrapes_is_missing(self, server, look_at):
        """What it was looked for by is named."""
        look = look_at()
        ((at, value, missing),) = await look.tokens()

        assert (at, value) == (10.0, None)
        assert 'no sample of {instance="127.0.0.1:30001"} in the last 60 s' in missing

    async def test_ranks_add_up_as_on_a_page(self, server, look_at):
        """Labels are kept, so that the adapter sums what one scrape of it would sum."""
        server.result = [
            series("up", [(7, 1)]),
            *(
                series("sglang:realtime_tokens_total", [(7, 10)], dp_rank=str(rank), mode=mode)
                for rank in range(4)
                for mode in ("decode", "prefill_compute")
            ),
        ]
        look = look_at()

        assert await look.tokens() == [(7.0, 80, None)]

    async def test_hostile_labels_are_data(self, server, look_at):
        """Quotes, line feeds and braces in a label neither break a page nor add to it."""
        evil = 'x"} 1\nsglang:realtime_tokens_total 999\n\\'
        server.result = [
            series("up", [(7, 1)]),
            series("sglang:realtime_tokens_total", [(7, 10)], model_name=evil),
        ]
        look = look_at()

        assert await look.tokens() == [(7.0, 10, None)]

    async def test_a_router_is_read_by_its_own_adapter(self, server, look_at):
        """Requests and responses of inference paths, and the breaker of a worker."""
        where = {"instance": "127.0.0.1:29000", "job": "smg"}
        path = {"path": "/generate", **where}
        server.result = [
            series("up", [(7, 1)], **where),
            series("smg_http_requests_total", [(7, 12)], **path),
            series("smg_http_responses_total", [(7, 9)], status_code="200", **path),
            series("smg_worker_requests_active", [(7, 3)], worker="http://a:1", **where),
        ]
        router = member(
            "router", Role.ROUTER, engine="smg", port=30000,
            metrics_url="http://127.0.0.1:29000/metrics",
        )  # fmt: skip
        look = look_at(router)
        rows = {(seen.name, seen.label): seen.value for seen in await look.rows()}

        assert rows[v.ROUTER_REQUESTS_TOTAL, ""] == 12
        assert rows[v.ROUTER_RESPONSES_TOTAL, ""] == 9
        assert rows[v.ROUTER_ACTIVE_REQS, ""] == 3


class TestMatchers:
    """Which series are a member's."""

    async def test_labels_may_be_given(self, server, look_at):
        """`metrics_labels` instead of the instance: job and pod, say; both have to fit."""
        first = member("a", metrics_labels={"job": "sglang", "pod": "a-0"})
        second = member("b", port=30002, metrics_labels={"job": "sglang", "pod": "b-0"})
        server.result = [
            *scraped([7.0], [1], pod="a-0"),
            *scraped([7.0], [2], pod="b-0", instance="y"),
            *scraped([7.0], [3], pod="a-0", job="other"),
        ]
        look = look_at(first, second)
        rows = await look.rows(v.PROGRESS_TOKENS_TOTAL)

        assert [(seen.subject, seen.value) for seen in rows] == [("a", 1), ("b", 2)]
        assert 'job=~"sglang",pod=~"a-0|b-0"' in server.queries[1]

    async def test_two_targets_for_one_member_are_not_added_up(self, server, look_at):
        """Two jobs that scrape the same address would count everything twice: that is said."""
        server.result = scraped([7.0], [1]) + scraped([7.1], [1], job="twice")
        look = look_at()
        ((_, value, missing),) = await look.tokens()

        assert value is None
        assert "2 targets for it (sglang 127.0.0.1:30001, twice 127.0.0.1:30001)" in missing
        assert "narrow its metrics_labels" in missing

    async def test_a_matcher_matches_itself_alone(self, server, look_at):
        """What a regular expression would read into an address is escaped."""
        look = look_at(member(metrics_labels={"instance": '10.0.0.1:1|.*"\\'}))
        await look.rows()
        matcher = re.search(r'instance=~"((?:[^"\\]|\\.)*)"', server.queries[0])[1]

        assert json.loads(f'"{matcher}"') == r"10\.0\.0\.1:1\|\.\*\"\\"

    async def test_many_members_cost_few_queries(self, server, look_at):
        """Two thousand members are asked for in ten queries, each of its own two hundred."""
        everyone = [member(f"d{i}", port=20000 + i) for i in range(2000)]
        look = look_at(*everyone)
        rows = await look.tokens()
        asked = [len(re.findall(r"127\\\\.0", query)) for query in server.queries]

        # Twice the first time: how often they are scraped is asked for before anything else.
        assert asked == [MEMBERS_PER_QUERY] * 20
        assert len(rows) == 2000

    async def test_buckets_are_asked_for_seldom(self, server, look_at):
        """Most of a page are histograms: they come with the first look and every half minute."""
        server.result = scraped([5.0, 7.0], [100, 130])
        look = look_at()
        for moment in (8.0, 9.0, 10.0):
            await look.rows()
            server.result = scraped([7.0, moment], [100, 130])
        look.time += 31.0
        await look.rows()
        data = [query for query in server.queries if "realtime" in query]

        assert ["_bucket" in query for query in data] == [True, False, False, True]
        assert len(server.queries) - len(data) == 2

    async def test_a_look_between_two_scrapes_does_not_cost_the_buckets(self, server, look_at):
        """When nothing new was scraped they are asked for again, until they came."""
        server.result = scraped([5.0, 7.0], [100, 130])
        look = look_at()
        await look.rows()
        look.time += 31.0
        await look.rows()
        await look.rows()
        server.result = scraped([5.0, 7.0, 41.0], [100, 130, 140])
        for _ in range(2):
            await look.rows()
        data = [query for query in server.queries if "realtime" in query]

        assert ["_bucket" in query for query in data] == [True, True, True, True, False]

    async def test_the_window_fits_the_scrapes(self, server, look_at):
        """`up` tells how often is scraped; then what holds a few scrapes, since the last look."""
        server.result = scraped([0, 15, 30], [1, 2, 3])
        look = look_at()
        await look.rows()
        look.time += 1.0
        await look.rows()
        windows = [re.search(r"\[(\d+)ms\]$", query)[1] for query in server.queries]

        assert windows == ["150000", "37500", "38500"]
        assert '__name__=~"up"' in server.queries[0]

    async def test_the_slowest_target_sets_the_window(self, server, look_at):
        """One that is scraped every 15 s is not missing beside one that is every second."""
        slow = {"instance": "127.0.0.1:30002"}
        server.result = [
            *scraped([7.0, 8.0, 9.0], [1, 2, 3]),
            *scraped([-6.0, 9.0], [1, 2], **slow),
        ]
        look = look_at(member("a"), member("b", port=30002))
        await look.rows()
        windows = [re.search(r"\[(\d+)ms\]$", query)[1] for query in server.queries]

        assert windows == ["150000", "37500"]

    async def test_what_was_scraped_once_is_asked_for_anew(self, server, look_at):
        """Until two scrapes are known a minute is asked for, and learning goes on."""
        server.result = scraped([7.0], [1])
        look = look_at()
        await look.rows()
        await look.rows()
        windows = [re.search(r"\[(\d+)ms\]$", query)[1] for query in server.queries]

        assert windows == ["150000", "60000"] * 2


class TestFailures:
    """A failure to look is an observation."""

    @pytest.mark.parametrize(
        ("status", "body", "said"),
        [
            (401, "", "Prometheus: answered HTTP 401"),
            (
                422,
                '{"status":"error","error":"query processing would load too many samples"}',
                "answered HTTP 422; query processing would load too many samples",
            ),
            (200, "<html>", "it answered something else than its API's JSON"),
            (200, '{"status":"error","error":"timed out"}', "Prometheus: timed out"),
            (200, '{"status":"success","data":{"result":[{"metric":3}]}}', "something else"),
            (200, "", "it gave no answer"),
        ],
    )
    async def test_what_the_server_said_is_told(self, server, look_at, status, body, said):
        """Of every member it was asked for."""
        server.status, server.body = status, body
        look = look_at(member("a"), member("b", port=30002))
        found = await look.tokens()

        assert len(found) == 2
        assert all(said in missing for _, _, missing in found)

    async def test_a_server_that_is_away_is_told(self, look_at, server):
        """Connection refused, by name of the server's side."""
        await server.runner.cleanup()
        look = look_at()
        ((_, _, missing),) = await look.tokens()

        assert missing == "/metrics: Prometheus: connection refused"

    async def test_the_token_is_sent_and_never_told(self, server, look_at):
        """It is read anew for each look, and in no observation, whatever went wrong."""
        tokens = iter([SECRET, f"{SECRET}-2"])
        server.status = 403
        look = look_at(token=lambda: next(tokens))
        rows = [*await look.rows(), *await look.rows()]

        assert server.tokens == [f"Bearer {SECRET}", f"Bearer {SECRET}-2"]
        assert SECRET not in repr(rows)

    async def test_a_token_that_cannot_be_read_is_told(self, server, look_at):
        """Nothing is asked without it."""

        def unreadable():
            raise PermissionError(13, "Permission denied")

        look = look_at(token=unreadable)
        ((_, _, missing),) = await look.tokens()

        assert missing == "/metrics: Prometheus: its token cannot be read: Permission denied"
        assert server.queries == []


def test_the_adapters_read_pages():
    """Engine and router can both read what somebody else scraped."""
    assert isinstance(SglangEngine(None), ReadsPages)
    assert isinstance(SmgRouter(None), ReadsPages)


PAGE = """\
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{{engine_type="decode",mode="decode",tp_rank="0"}} {tokens}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{engine_type="decode"}} 3
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{{le="1"}} 99
sglang:time_to_first_token_seconds_bucket{{le="+Inf"}} 100
sglang:time_to_first_token_seconds_sum 50
sglang:time_to_first_token_seconds_count 100
"""


@pytest.mark.needs("prometheus")
@pytest.mark.timeout(180)
class TestRealServer:
    """Debian's Prometheus, scraping a page once a second."""

    async def until(self, look, wanted):
        """Look until a row is as wanted; gives it and every row before."""
        rows = []
        async with asyncio.timeout(60):
            while True:
                look.time = time.time()
                new = await look.rows(v.PROGRESS_TOKENS_TOTAL)
                rows += new
                if new and wanted(new[-1]):
                    return new[-1], rows
                await asyncio.sleep(0.05)

    async def test_values_move_and_what_is_gone_is_missing(self, tmp_path):
        """A value, the next one, a page without it, a target that is away, and back again."""
        async with Exporter() as exporter, fetch.session() as session:
            exporter.page = PAGE.format(tokens=7)
            target = f"127.0.0.1:{exporter.port}"
            async with prometheus(tmp_path, {"sglang": [target]}) as url:
                look = Look(url, session, (member(port=exporter.port),))
                first, _ = await self.until(look, lambda row: row.value == 7)
                exporter.page = PAGE.format(tokens=9)
                second, _ = await self.until(look, lambda row: row.value == 9)
                exporter.page = "\n".join(PAGE.format(tokens=9).splitlines()[2:]) + "\n"
                gone, _ = await self.until(look, lambda row: row.value is None)
                exporter.away = True
                away, _ = await self.until(look, lambda row: "up is 0" in (row.missing or ""))
                exporter.away, exporter.page = False, PAGE.format(tokens=11)
                back, rows = await self.until(look, lambda row: row.value == 11)

        assert first.at < second.at < gone.at < away.at < back.at
        assert abs(back.at - time.time()) < 30.0
        assert "not on the metrics page" in gone.missing
        assert len({row.at for row in rows if row.value is not None}) == len(
            [row for row in rows if row.value is not None]
        )
