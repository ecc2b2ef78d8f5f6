"""The smg adapter against the real router in front of stub members."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest

from oracles import agrees
from stub_engine import StubEngine, rows, stub_pair
from tandem import fetch
from tandem.ports import Router
from tandem.records import Member, Role
from tandem.records import vocabulary as v
from tandem.routers.smg import SCANNER, SmgRouter

START_S = 15.0
AGES = "".join(
    f'smg_http_inflight_request_age_count{{gt="{gt}",le="{le}"}} {count}\n'
    for gt, le, count in (("0", "30", 3), ("180", "300", 1), ("30", "60", 2), ("300", "600", 0))
)


def free_ports(count):
    """Ports that nobody holds now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.asynccontextmanager
async def smg(tmp_path, prefill, decode):
    """The real router in front of two stub members; gives its member record."""
    port, prometheus = free_ports(2)
    argv = [
        str(Path(sys.executable).with_name("smg")),
        *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "random"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)),
        *("--pd-disaggregation", "--prefill", prefill.url, str(prefill.member.bootstrap_port)),
        *("--decode", decode.url, "--health-check-interval-secs", "1"),
        *("--retry-max-retries", "2", "--cb-failure-threshold", "2"),
        *("--shutdown-grace-period-secs", "1"),
    ]
    with (tmp_path / "smg.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        yield Member(
            name="router",
            role=Role.ROUTER,
            url=f"http://127.0.0.1:{port}",
            engine="smg",
            metrics_url=f"http://127.0.0.1:{prometheus}/metrics",
        )
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            process.kill()
            await process.wait()


async def until(question, timeout_s=START_S):
    """Ask until the answer is true."""
    async with asyncio.timeout(timeout_s):
        while not await question():
            await asyncio.sleep(0)


@pytest.fixture
async def session():
    async with fetch.session() as client:
        yield client


@pytest.mark.needs("router")
@pytest.mark.timeout(60)
class TestSmg:
    """smg as it really is."""

    async def test_it_says_its_workers_and_carries_requests(self, session, tmp_path):
        """Workers are named as members, requests of both kinds complete and are counted."""
        async with stub_pair() as (prefill, decode), smg(tmp_path, prefill, decode) as member:
            router = SmgRouter(session, [prefill.member, decode.member])
            await until(lambda: router.ready(member, 2.0))
            told = await router.complete(
                member, prompt="a b", output_tokens=2, timeout_s=10.0, chat=False
            )
            chatted = await router.complete(
                member, prompt="a b", output_tokens=2, timeout_s=10.0, chat=True
            )
            seen = rows(await router.observe(member, 2.0))
            page = await fetch.fetch(session, member.metrics_url, timeout_s=5.0)

        assert agrees(SCANNER, page.body)
        assert isinstance(router, Router)
        assert (told.status, told.token_ids) == ("completed", (1, 1))
        assert (chatted.status, chatted.text) == ("completed", "ok")
        assert {
            (v.WORKER_HEALTHY, "prefill-0"): True,
            (v.WORKER_HEALTHY, "decode-0"): True,
            (v.WORKER_BREAKER_OPEN, "decode-0"): False,
            (v.WORKER_ACTIVE_REQS, "prefill-0"): 0,
            (v.ROUTER_REQUESTS_TOTAL, ""): 2,
            (v.ROUTER_RESPONSES_TOTAL, ""): 2,
            (v.ROUTER_RESPONSES_TOTAL, "200"): 2,
            (v.ROUTER_ACTIVE_REQS, ""): 0,
            (v.WORKER_STATUS, "decode-0"): "ready",
        }.items() <= {key: one.value for key, one in seen.items()}.items()

    async def test_a_hung_request_is_requests_minus_responses(self, session, tmp_path):
        """While a request hangs it is active and unanswered; a client that leaves ends it."""
        async with stub_pair() as (prefill, decode), smg(tmp_path, prefill, decode) as member:
            router = SmgRouter(session, [prefill.member, decode.member])
            await until(lambda: router.ready(member, 2.0))
            prefill.hanging.add("/generate")
            decode.hanging.add("/generate")
            hung = asyncio.create_task(
                router.complete(member, prompt="a", output_tokens=1, timeout_s=3.0, chat=False)
            )
            await asyncio.wait_for(prefill.reached["/generate"].wait(), 5.0)
            during = rows(await router.observe(member, 2.0))
            ended = await hung
            healthy = await router.ready(member, 2.0)

        assert ended.status == "timed_out"
        assert (
            during[v.ROUTER_REQUESTS_TOTAL, ""].value,
            during[v.ROUTER_RESPONSES_TOTAL, ""].value,
            during[v.ROUTER_ACTIVE_REQS, ""].value,
            during[v.WORKER_ACTIVE_REQS, "prefill-0"].value,
        ) == (1, 0, 1, 1)
        assert healthy

    async def test_an_open_breaker_shows_though_every_worker_is_healthy(self, session, tmp_path):
        """Failing prefills open a breaker while `/workers` goes on calling the worker healthy."""
        async with stub_pair() as (prefill, decode), smg(tmp_path, prefill, decode) as member:
            router = SmgRouter(session, [prefill.member, decode.member])
            await until(lambda: router.ready(member, 2.0))
            prefill.status["/generate"] = 500
            for _ in range(3):
                ended = await router.complete(
                    member, prompt="a", output_tokens=1, timeout_s=10.0, chat=False
                )
            seen = rows(await router.observe(member, 2.0))

        assert ended.status == "failed"
        assert (
            seen[v.WORKER_BREAKER_OPEN, "prefill-0"].value,
            seen[v.WORKER_HEALTHY, "prefill-0"].value,
        ) == (True, True)

    async def test_a_worker_it_does_not_have_is_said_to_be_missing(self, session, tmp_path):
        """A member that the router does not list is told, with the reason."""
        other = Member(name="decode-1", role=Role.DECODE, url="http://127.0.0.1:9", engine="sglang")
        async with stub_pair() as (prefill, decode), smg(tmp_path, prefill, decode) as member:
            router = SmgRouter(session, [prefill.member, decode.member, other])
            await until(lambda: router.ready(member, 2.0))
            seen = rows(await router.observe(member, 2.0))

        assert "does not list it" in seen[v.WORKER_HEALTHY, "decode-1"].missing


class TestDeadRouter:
    """A router that is not there."""

    async def test_everything_it_would_say_is_missing(self, session):
        """Workers and counters each say that the connection was refused; nothing is raised."""
        member = Member(name="r", role=Role.ROUTER, url="http://127.0.0.1:9", engine="smg")
        router = SmgRouter(session)
        seen = rows(await router.observe(member, 2.0))
        ended = await router.complete(
            member, prompt="a", output_tokens=1, timeout_s=2.0, chat=False
        )

        assert {v.WORKER_HEALTHY, v.ROUTER_REQUESTS_TOTAL} <= {name for name, _ in seen}
        assert all("refused" in one.missing for one in seen.values())
        assert (await router.ready(member, 2.0), ended.status) == (False, "failed")

    async def test_an_answer_of_another_shape_is_a_reason(self, session):
        """A page that is no router's gives reasons, and zero requests are not claimed."""
        async with StubEngine(Role.PREFILL) as stranger:
            member = Member(name="r", role=Role.ROUTER, url=stranger.url, engine="smg")
            seen = rows(await SmgRouter(session).observe(member, 2.0))

        assert "HTTP 404" in seen[v.WORKER_HEALTHY, ""].missing
        for name in (v.ROUTER_ACTIVE_REQS, v.ROUTER_REQUESTS_TOTAL, v.ROUTER_REQUEST_AGE_S):
            assert "no series of this router" in seen[name, ""].missing

    @pytest.mark.parametrize(
        ("page", "name", "said"),
        [
            ("", v.ROUTER_REQUEST_AGE_S, "shows no ages"),
            (AGES, v.ROUTER_REQUEST_AGE_S, 180.0),
            ('smg_http_requests_total{path="/generate"} 4\nsmg_http_resp',
             v.ROUTER_RESPONSES_TOTAL, "ends in the middle of a line"),
        ],
    )  # fmt: skip
    async def test_what_its_page_says_of_requests(self, session, page, name, said):
        """The oldest open request by its bucket; what a broken page does not show is no nought."""
        page = 'smg_worker_requests_active{worker="http://x"} 1\n' + page
        async with StubEngine(Role.PREFILL, page=page) as stub:
            member = Member(name="r", role=Role.ROUTER, url=stub.url, engine="smg")
            seen = rows(await SmgRouter(session).observe(member, 2.0))[name, ""]

        assert said in (seen.missing or "") if isinstance(said, str) else seen.value == said
