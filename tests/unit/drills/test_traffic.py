"""The clients of a drill and their log: the only yardstick of how long nobody noticed."""

import asyncio
import json

import pytest
from aiohttp import web

from tandem.drills.traffic import ClientLog, Sent, Shape, Traffic


def sent(at, ended_at=None, status="completed"):
    """Give one line of the log."""
    return Sent(session=f"s{at}", turn=0, sent_at=at, ended_at=ended_at, status=status)


class TestFirstNeverCompleted:
    """From which request on the loop should have noticed."""

    @pytest.mark.parametrize(
        ("lines", "first"),
        [
            pytest.param([sent(1, 2), sent(3, None, "open"), sent(4, None, "open")], 3, id="open"),
            pytest.param([sent(1, 60, "failed")], 1, id="killed later, by the repair"),
            pytest.param([sent(1, 5, "failed"), sent(6, None, "open")], 6, id="failed before"),
            pytest.param([sent(1, 60)], None, id="slow, but it completed"),
            pytest.param([sent(20, None, "open")], None, id="sent after the finding"),
            pytest.param([], None, id="no traffic"),
        ],
    )
    def test_it_is_the_earliest_that_hung_when_it_was_found(self, lines, first):
        """Sent before the finding, without an end then, and never completed."""
        found = ClientLog(sent=lines).first_never_completed(10.0)

        assert (found.sent_at if found else None) == first


class TestLog:
    """What was sent, counted and written."""

    def test_counts(self):
        """By how requests ended, with the longest waiting one."""
        log = ClientLog(sent=[sent(1, 2), sent(3, None, "open"), sent(4, 5, "failed")])

        assert (log.count("completed"), log.count("failed"), log.open_count()) == (1, 1, 1)
        assert log.oldest_open().sent_at == 3

    def test_it_is_one_json_line_per_request(self, tmp_path):
        """The file can be read line by line."""
        ClientLog(sent=[sent(1, 2), sent(3, None, "open")]).write(tmp_path / "client.jsonl")
        lines = (tmp_path / "client.jsonl").read_text().splitlines()

        assert [json.loads(line)["status"] for line in lines] == ["completed", "open"]


class Counter:
    """A router that answers, fails, talks nonsense or never answers."""

    def __init__(self):
        self.asked = []
        self.arrived = asyncio.Event()
        self.how = "answer"

    async def answer(self, request):
        body = await request.json()
        self.asked.append(body)
        self.arrived.set()
        if self.how == "hang":
            await asyncio.Event().wait()
        if self.how == "fail":
            return web.Response(status=503)
        if self.how == "nonsense":
            return web.Response(text="<html>")
        return web.json_response({"choices": [{"message": {"content": f"n{len(self.asked)}"}}]})


@pytest.fixture
async def router():
    """Give such a router and its address."""
    counter = Counter()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", counter.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    counter.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield counter
    await runner.cleanup()


SHAPE = Shape(sessions=1, turns=3, pause_s=0.0, backoff_s=0.0, words=6)


async def talked(router, *, seed=1, session="a"):
    """Hold one conversation; gives its log."""
    log = ClientLog()
    traffic = Traffic(router.url, Shape(sessions=0, pause_s=0.0, backoff_s=0.0), seed=seed, log=log)
    await traffic.start()
    await traffic.talk(session)
    await traffic.stop()
    return log


class TestTraffic:
    """Sessions as agents hold them."""

    async def test_each_turn_carries_what_was_said_before(self, router):
        """The third request has three questions and two answers."""
        log = await talked(router)

        assert [len(body["messages"]) for body in router.asked] == [1, 3, 5]
        assert router.asked[2]["messages"][1] == {"role": "assistant", "content": "n1"}
        assert log.count("completed") == 3

    async def test_a_seed_replays_its_words(self, router):
        """Two runs of one seed send the same; another seed does not."""
        for seed in (1, 1, 2):
            await talked(router, seed=seed)
        first, again, other = (
            [body["messages"][-1]["content"] for body in router.asked[start : start + 3]]
            for start in (0, 3, 6)
        )

        assert first == again
        assert first != other

    @pytest.mark.parametrize(("how", "detail"), [("fail", "HTTP 503"), ("nonsense", "DecodeError")])
    async def test_what_failed_ends_its_conversation(self, router, how, detail):
        """The failure is in the log, with its end, and no further turn is sent."""
        router.how = how
        log = await talked(router)
        (one,) = log.sent

        assert (one.status, one.detail) == ("failed", detail)
        assert one.ended_at >= one.sent_at

    async def test_what_has_no_answer_stays_open(self, router):
        """Stopping leaves a hung request open in the log: it never completed."""
        router.how = "hang"
        log = ClientLog()
        traffic = Traffic(router.url, SHAPE, seed=1, log=log)
        await traffic.start()
        await router.arrived.wait()
        await traffic.stop()
        (one,) = log.sent

        assert (one.status, one.ended_at) == ("open", None)

    async def test_after_a_pause_nothing_is_begun(self, router):
        """Sessions end their present request and say no more."""
        log = ClientLog()
        traffic = Traffic(router.url, SHAPE, seed=1, log=log)
        await traffic.start()
        await router.arrived.wait()
        await traffic.pause()
        await asyncio.gather(*traffic._tasks)
        count = len(log.sent)
        await traffic.stop()

        assert log.open_count() == 0
        assert count <= 2

    async def test_stopping_before_starting_is_nothing(self):
        """A scene that never came so far is put away all the same."""
        await Traffic("http://127.0.0.1:1", SHAPE, seed=1, log=ClientLog()).stop()
