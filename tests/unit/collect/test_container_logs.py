"""A container's log is read from its engine, and counted with the exact times of its lines."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from podmans import Podman
from tandem.collect.container_logs import AGAIN_S, ContainerLogSource, Frames
from tandem.collect.incarnations import Incarnations
from tandem.collect.log_lines import LINE_BYTES_MAX
from tandem.containers import ContainerEngine
from tandem.records import Member, Role
from tandem.records import vocabulary as v

MEMBER = Member(name="d", role=Role.DECODE, url="http://127.0.0.1:1", engine="sglang")
ID = "d280ef1b0efba040658c2447839e87e524674790cfc8938491dd4267ca3c6755"
UNTIL_S = 10.0


def frame(text, kind=1):
    data = text if isinstance(text, bytes) else text.encode()
    return bytes((kind, 0, 0, 0)) + len(data).to_bytes(4, "big") + data


def stamped(second, text):
    return f"2026-01-01T00:00:{second:02d}.000000001Z {text}\n"


class Docker:
    """A server with the logs that a test gives it; each answer is one connection's stream."""

    def __init__(self, path):
        self.path = str(path)
        self.tty = False
        self.status = 200
        self.answers = []
        self.asked = []

    async def start(self):
        app = web.Application()
        app.router.add_get("/containers/{name}/json", self.inspect)
        app.router.add_get("/containers/{name}/logs", self.logs)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.UnixSite(self.runner, self.path).start()

    async def inspect(self, request):
        return web.json_response(
            {"Id": ID, "State": {"Status": "running"}, "Config": {"Tty": self.tty}}
        )

    async def logs(self, request):
        self.asked.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"message": "driver cannot read"}, status=self.status)
        return web.Response(body=self.answers.pop(0) if self.answers else b"")


class Bench:
    """A source over one engine."""

    def __init__(self, path, name="d"):
        self.engine = ContainerEngine(path)
        self.name = name
        self.at = 1767225700.0
        self.source = ContainerLogSource(
            MEMBER, lambda _: self.seen, Incarnations(), now=lambda: self.at
        )

    async def look(self):
        self.seen = (self.engine, await self.engine.container(self.name))
        harvest = await self.source.collect()
        return {(one.name, one.label): one for one in harvest.observations}

    async def until(self, wanted):
        rows = {}
        async with asyncio.timeout(UNTIL_S):
            while not wanted(rows):
                rows |= await self.look()
        return rows

    async def close(self):
        await self.source.close()
        await self.engine.close()


@pytest.fixture
async def docker(tmp_path):
    made = Docker(tmp_path / "docker.sock")
    await made.start()
    yield made
    await made.runner.cleanup()


@pytest.fixture
async def bench(docker):
    made = Bench(docker.path)
    yield made
    await made.close()


def total(rows):
    return rows[v.LOG_LINES_TOTAL, ""].value if (v.LOG_LINES_TOTAL, "") in rows else None


class TestDocker:
    """What Docker answers."""

    async def test_lines_of_both_streams_are_counted_at_their_times(self, docker, bench):
        """Standard output and error come in frames, and each line with its time."""
        docker.answers = [
            frame(stamped(1, "Decode batch, 1"))
            + frame(stamped(2, "Traceback (most recent call last):"), kind=2)
            + frame(stamped(3, "Decode batch, 2"))
        ]
        rows = await bench.until(lambda rows: total(rows) == 3)

        assert rows[v.LOG_SIGNATURE, "decode-batch"].value == 2
        assert rows[v.LOG_FIRST_SEEN_AT, "decode-batch"].value == 1767225601.0
        assert rows[v.LOG_LAST_SEEN_AT, "traceback"].value == 1767225602.0
        assert rows[v.LOG_LAST, "traceback"].value == "Traceback (most recent call last):"
        assert docker.asked[0]["tail"] == "500"

    async def test_it_goes_on_after_the_last_line(self, docker, bench):
        """A stream that ended is asked for again from there, and not at every look."""
        docker.answers = [frame(stamped(1, "one")), frame(stamped(2, "two"))]
        await bench.until(lambda rows: total(rows) == 1)
        await bench.look()
        early = len(docker.asked)
        bench.at += AGAIN_S
        await bench.until(lambda rows: total(rows) == 2)

        assert early == 1
        assert docker.asked[1]["since"] == "1767225601.000001"

    async def test_a_container_with_a_terminal_has_no_frames(self, docker, bench):
        """Its stream is the text itself."""
        docker.tty = True
        docker.answers = [(stamped(1, "one\r") + stamped(2, "CUDA error\r")).encode()]
        rows = await bench.until(lambda rows: total(rows) == 2)

        assert rows[v.LOG_LAST, "cuda-error"].value == "CUDA error"

    async def test_a_driver_that_cannot_be_read_is_a_reason_now_and_then(self, docker, bench):
        """The engine's own words are told, and not at every look."""
        docker.status = 501
        first = await bench.look()
        bench.at += AGAIN_S
        second = await bench.look()

        assert "driver cannot read" in first[v.LOG_LINES_TOTAL, ""].missing
        assert second == {}

    async def test_a_member_in_no_container_is_nothing_to_tell(self):
        """Nothing is asked."""
        source = ContainerLogSource(MEMBER, lambda _: None, Incarnations())

        assert (await source.collect()).observations == ()


class TestFrames:
    """The stream of a log."""

    @given(
        st.lists(st.tuples(st.sampled_from((1, 2)), st.binary(max_size=40)), max_size=20),
        st.integers(1, 50),
    )
    def test_however_it_is_cut_its_lines_are_the_same(self, frames, size):
        """Chunks end anywhere: within a header, a frame or a line."""
        stream = b"".join(frame(data, kind) for kind, data in frames)
        frames_read = Frames(tty=False)
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        lines = [line for chunk in chunks for line in frames_read.lines(chunk)]
        wanted = [
            line.rstrip(b"\r")
            for kind in (1, 2)
            for line in b"".join(data for of, data in frames if of == kind).split(b"\n")[:-1]
        ]

        assert sorted(lines) == sorted(wanted)

    @given(st.binary(max_size=400))
    def test_any_bytes_are_read(self, stream):
        """A stream that is no log breaks nothing."""
        frames = Frames(tty=False)
        frames.lines(stream)

        assert len(frames._rest) <= 4

    def test_a_line_without_end_costs_a_bound(self):
        """Megabytes without a newline are cut."""
        frames = Frames(tty=False)
        for _ in range(20):
            frames.lines(frame(b"x" * 1_000_000))

        assert sum(map(len, frames._rest.values())) <= LINE_BYTES_MAX


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """Start a real engine once for this file."""
    made = Podman(tmp_path_factory.mktemp("podman"))
    yield made
    made.close()


@pytest.mark.needs("podman")
class TestReal:
    """A real Podman."""

    async def test_what_it_writes_is_followed(self, podman):
        """Lines of before and of while it is followed."""
        script = (
            "echo Decode batch, 1; while test ! -e /go; do sleep 0.05; done; "
            "echo 'Traceback (most recent call last):' >&2; exec sleep 999"
        )
        podman.start("talks", script)
        bench = Bench(podman.socket, "talks")
        first = await bench.until(lambda rows: total(rows) == 1)
        podman.run("exec", "talks", "/bin/sh", "-c", "true > /go")
        rows = await bench.until(lambda rows: total(rows) == 2)
        await bench.close()

        assert first[v.LOG_SIGNATURE, "decode-batch"].value == 1
        assert rows[v.LOG_SIGNATURE, "traceback"].value == 1
        assert rows[v.LOG_LAST_SEEN_AT, "traceback"].value > 1.7e9
