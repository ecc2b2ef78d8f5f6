"""One HTTP question ends in a reply or in a reason, whatever the other side does."""

import contextlib
import gzip

import pytest
from aiohttp import web

from tandem.fetch import address, fetch, host_of, session


@contextlib.asynccontextmanager
async def serving(answer):
    """A server whose every answer is made by `answer(request)`; gives its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def client():
    async with session() as made:
        yield made


class TestFetch:
    """How a question ends."""

    async def test_a_get_gives_status_and_body(self, client):
        """200 with its body is an answer."""

        async def answer(request):
            return web.Response(text=request.method)

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0)

        assert (got.ok, got.body, got.problem) == (True, b"GET", None)

    async def test_a_post_carries_json(self, client):
        """What is given is sent as the body."""

        async def answer(request):
            return web.json_response(await request.json())

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0, json={"a": 1})

        assert got.body == b'{"a": 1}'

    async def test_an_unwelcome_status_is_an_answer_too(self, client):
        """A 503 has a status and a body, and its clause says so."""

        async def answer(_):
            return web.Response(status=503, text="no")

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0)

        assert (got.ok, got.status, got.why_not) == (False, 503, "answered HTTP 503")

    async def test_a_compressed_page_is_read(self, client):
        """Gzip is undone on the way."""

        async def answer(_):
            return web.Response(body=gzip.compress(b"x 1\n"), headers={"Content-Encoding": "gzip"})

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0)

        assert got.body == b"x 1\n"

    async def test_a_bomb_is_refused(self, client):
        """A small compressed reply that grows past the bound is a reason, not memory."""

        async def answer(_):
            return web.Response(
                body=gzip.compress(bytes(5_000_000)), headers={"Content-Encoding": "gzip"}
            )

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0, body_bytes_max=100_000)

        assert got.problem == "sent more than 100000 bytes"

    async def test_a_reply_cut_short_is_a_reason(self, client):
        """A server that promises more than it sends is not believed."""

        async def answer(request):
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"x 1\n")
            request.transport.close()
            return response

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0)

        assert "connection broke" in got.why_not

    async def test_a_redirect_is_not_followed(self, client):
        """A member that points elsewhere is not the one that was asked."""

        async def answer(_):
            raise web.HTTPFound("http://127.0.0.1:9/")

        async with serving(answer) as url:
            got = await fetch(client, url, timeout_s=5.0)

        assert got.status == 302

    async def test_nobody_there_is_refused(self, client):
        """A closed port is a definite answer."""
        got = await fetch(client, "http://127.0.0.1:9", timeout_s=5.0)

        assert (got.refused, got.why_not) == (True, "connection refused")

    @pytest.mark.parametrize("url", ["http://", "nonsense", "http://[::1", "http://h:99999/"])
    async def test_a_url_that_is_none_is_a_reason(self, client, url):
        """A wrong URL is told like every other failure."""
        got = await fetch(client, url, timeout_s=5.0)

        assert (got.status, bool(got.problem)) == (None, True)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://127.0.0.1:30000", "http://localhost:30000/", True),
        ("HTTP://Host:1", "http://host:1/path", True),
        ("host:30000", "http://host:30000", True),
        ("http://host", "http://host:80", True),
        ("https://host", "http://host", False),
        ("http://host:1", "http://host:2", False),
        ("http://[::1", "http://[::1", True),
        ("http://host:x", "http://host:80", False),
    ],
)
def test_addresses_compare_without_case_path_and_loopback_names(one, other, same):
    """Two URLs of one listener are one address, and of two listeners two."""
    assert (address(one) == address(other)) is same


def test_the_host_of_a_url_has_no_brackets():
    """An IPv6 host is given bare."""
    assert (host_of("http://[::1]:30000"), host_of("http://h:1/x")) == ("::1", "h")
